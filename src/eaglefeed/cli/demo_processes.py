"""Commands as processes, as a user would start them; none of them outlives the demo."""

import subprocess
import sys
import threading
from types import TracebackType
from typing import IO

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import Settings
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue.address import has_password

__all__ = ["DemoProcesses"]

_POLL_S = 0.1
_COMMAND_S = 600.0


class DemoProcesses:
    """Starts commands with just these settings, whatever the folder and the variables, and kills what is left.

    Args:
        settings: of the run; each command's output goes to <run>/<command>.log.
        stop: once it is set, `check` raises KeyboardInterrupt. Signals set it instead of raising wherever they come, so
            that none falls between a process' start and its being known here.
        command_s: how long a command that is waited for may take.
    """

    def __init__(self, settings: Settings, stop: threading.Event, *, command_s: float = _COMMAND_S) -> None:
        self._settings, self._stop, self._command_s = settings, stop, command_s
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "DemoProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in list(self._running):
            self.kill(process)

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start a command."""
        with self._log(words[0]) as log:
            process = subprocess.Popen(self._command(*words), stdout=log, stderr=log)
        self._running.append(process)
        return process

    def run_to_end(self, *words: str) -> None:
        """Run a command and check that it ended well; see `wait`."""
        self.wait(self.start(*words))

    def wait(self, *processes: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of commands and check that they ended well.

        Raises:
            EaglefeedError: one did not, or not in `command_s`.
            KeyboardInterrupt: the demo was told to stop.
        """
        deadline_s = SYSTEM_CLOCK.monotonic() + self._command_s
        while any(process.poll() is None for process in processes):
            self.check()
            if SYSTEM_CLOCK.monotonic() > deadline_s:
                raise EaglefeedError(f"`eaglefeed {_name(processes[0])}` took over {self._command_s:g} s")
            SYSTEM_CLOCK.sleep(_POLL_S)
        self.check()

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """End a process with SIGKILL; it is not watched any more."""
        self._running.remove(process)
        process.kill()
        process.wait()

    def check(self) -> None:
        """Check that no process ended badly, and that the demo may go on.

        Raises:
            EaglefeedError: one did; names its log and the last line of it.
            KeyboardInterrupt: the demo was told to stop.
        """
        if self._stop.is_set():
            raise KeyboardInterrupt
        for process in self._running:
            if process.poll():
                raise self._failed(process)

    def _command(self, *words: str) -> list[str]:
        changed = self._settings.model_dump(mode="json", exclude_defaults=True)
        if self._settings.metrics.port is not None:
            changed["metrics"]["port"] = 0  # several run beside each other: each logs the one it took
        url = changed.pop("redis_url", "")
        overrides = [f"redis_url={url}"] if url and not has_password(url) else []  # that one they inherit, as variable
        overrides += [
            f"{section}.{field}={value}" for section, fields in changed.items() for field, value in fields.items()
        ]
        return [sys.executable, "-m", "eaglefeed", *words, *overrides]

    def _log(self, name: str) -> IO[bytes]:
        return (self._settings.run_dir / f"{name}.log").open("ab")

    def _failed(self, process: "subprocess.Popen[bytes]") -> EaglefeedError:
        name = _name(process)
        log = self._settings.run_dir / f"{name}.log"
        last = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
        return EaglefeedError(f"`eaglefeed {name}` ended with {process.returncode}", subject=str(log), got=last)


def _name(process: "subprocess.Popen[bytes]") -> str:
    words = process.args if isinstance(process.args, list) else [str(process.args)]
    return str(words[3])
