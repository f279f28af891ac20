"""Processes that take part in a measurement: they read one line of JSON, and write lines of JSON."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import EaglefeedError

__all__ = ["Partner", "race", "say"]

_LINE_TIMEOUT_S = 120.0
_SETTLE_S = 0.3
"""What a consumer gets between saying that it is ready and the first message."""
_TOLD_BYTES = 800


class Partner:
    """A process that is killed at the end of the block.

    Args:
        who: how messages call it.
        command: the words that start it.
        task: its first line; may hold a password, which a command line must not.
        fix: what helps if it fails.
    """

    def __init__(self, who: str, command: Sequence[str], task: Mapping[str, object], *, fix: str = "") -> None:
        self._who, self._fix, self._read = who, fix, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the block
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        except OSError as error:
            self._errors.close()
            raise self._failed(f"cannot be started: {error.strerror}") from None
        self._write(json.dumps(task))

    def __enter__(self) -> "Partner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def go(self) -> None:
        """Let it start."""
        self._write("go")

    def ask(self, **words: object) -> dict[str, Any]:
        """Write a line and wait for its answer; see `line`."""
        self._write(json.dumps(words))
        return self.line()

    def line(self, timeout_s: float = _LINE_TIMEOUT_S) -> dict[str, Any]:
        """Its next line.

        Raises:
            EaglefeedError: it ended, or wrote none in time; says what it wrote on stderr.
        """
        end_s = SYSTEM_CLOCK.monotonic() + timeout_s
        while b"\n" not in self._read:
            self._read += self._more(end_s)
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _more(self, end_s: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None or not select.select([pipe], [], [], max(0.0, end_s - SYSTEM_CLOCK.monotonic()))[0]:
            raise self._failed("no answer in time")
        part = os.read(pipe.fileno(), 2**16)
        if not part:
            raise self._failed("it ended")
        return part

    def _write(self, line: str) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode() + b"\n")
        except OSError:
            raise self._failed("it ended") from None

    def _failed(self, what: str) -> EaglefeedError:
        said = ""
        if not self._errors.closed:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()[-_TOLD_BYTES:]
        return EaglefeedError(what, subject=self._who, got=said or None, fix=self._fix)


def say(**fields: object) -> None:
    """Write a line, in a process that takes part."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def race(producer: Partner, consumer: Partner, count: int) -> float:
    """Messages a second from the first put to the end that the consumer tells."""
    with producer, consumer:
        consumer.line()
        producer.line()
        SYSTEM_CLOCK.sleep(_SETTLE_S)
        producer.go()
        start_s = producer.line()["start"]
        producer.line()
        return count / float(consumer.line()["end"] - start_s)
