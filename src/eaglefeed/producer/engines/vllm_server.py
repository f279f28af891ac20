"""A vLLM server: one that is started and watched here, or one that runs already."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.producer.engines import guard
from eaglefeed.producer.engines.vllm_launch import Launch
from eaglefeed.storage.control import ControlClient, Refused

__all__ = ["OwnServer", "RunningServer", "Server"]

_START_S, _GRACE_S, _STOP_S, _ASK_S, _LOOK_S = 900.0, 10.0, 20.0, 15.0, 0.1
_LOG_BYTES, _LOG_LINES = 65_536, 8
_log = get_logger(__name__)


class Server(Protocol):
    """Where a vLLM server listens, the key that it asks for, "" for none, and the folder that it writes captures to."""

    url: str
    key: str
    captures: Path

    def revive(self) -> None:
        """Called after a failed request: make it answer again, if that is in our power."""

    def explain(self, error: TargetUnavailable) -> TargetUnavailable:
        """What to raise when it still fails."""

    def stop(self) -> None:
        """End what was started here."""


@dataclass
class RunningServer:
    """A server of somebody else's: it is only asked."""

    url: str
    captures: Path
    key: str = ""

    def revive(self) -> None:
        """Give it a moment."""
        SYSTEM_CLOCK.sleep(1.0)

    def explain(self, error: TargetUnavailable) -> TargetUnavailable:
        """The error itself."""
        return error

    def stop(self) -> None:
        """Leave it running."""


class OwnServer:
    """A server that is started here, on a port of its own on loopback, and ends with this process.

    Other users of the machine lack its key, without which it says no more than that it lives. Its log and captures lie
    in a temporary folder that goes with it.

    Args:
        launch: how it is started.
        parent: where its folder is made; the system's place for temporary files by default.
        start_timeout_s: for loading the model.
        clock: measures waits.

    Raises:
        ConfigError: the folder cannot be made.
        TargetUnavailable: it did not start; says the end of its log.
    """

    def __init__(
        self,
        launch: Launch,
        parent: Path | None = None,
        *,
        start_timeout_s: float = _START_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._launch, self._start_timeout_s, self._clock = launch, start_timeout_s, clock
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="eaglefeed-vllm-", dir=parent))
        except OSError as error:
            fix = "pass target.engine_dir, a folder that can be written to"
            raise ConfigError("no place for captures", subject=str(parent), got=error.strerror, fix=fix) from None
        self.captures = self._folder / "captures"
        self.captures.mkdir()
        self._reserved = _reserved()
        self._port: int = self._reserved.getsockname()[1]
        self.url, self.key = f"http://127.0.0.1:{self._port}", secrets.token_hex(16)
        self._client = ControlClient(self.url)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.revive()
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Start it again if it has died or answers no more.

        Raises:
            TargetUnavailable: it did not start; says the end of its log.
        """
        with self._lock:
            if self._is_alive() and self._answers(_ASK_S):
                return
            self._end()
            self._start()

    def explain(self, error: TargetUnavailable) -> TargetUnavailable:
        """The end of its log, if it has died."""
        return error if self._is_alive() else self._failed("the engine has ended")

    def stop(self) -> None:
        """End it; its folder goes too."""
        with self._lock:
            self._end()
        self._client.close()
        self._reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        _log.info("engine_starts", engine="vllm", source=self._launch.source, log=str(self._log_path))
        command = self._launch.command(self._port, self.captures)
        try:
            self.captures.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", guard.__file__, str(_GRACE_S), str(self._folder), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    # The one place for a secret that no other user can look at.
                    env=os.environ | {"VLLM_API_KEY": self.key},  # noqa: TID251 - inherited, not read
                    start_new_session=True,  # Ctrl-C is for this process, which still needs the server to drain
                )
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise

    def _wait_until_ready(self) -> None:
        end = self._clock.monotonic() + self._start_timeout_s
        while not (self._answers(_ASK_S) and self._is_alive()):  # who answers for a dead engine is somebody else
            if not self._is_alive():
                raise self._failed("the engine ended at its start")
            if self._clock.monotonic() > end:
                raise self._failed(f"the engine was not ready after {self._start_timeout_s:g} s")
            self._clock.sleep(_LOOK_S)

    def _answers(self, timeout_s: float) -> bool:
        try:
            return self._client.call("/health", method="GET", timeout_s=timeout_s).status == 200
        except (Refused, TargetUnavailable):
            return False

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the guard hangs: it, and all that it has started
            process.wait()

    @property
    def _log_path(self) -> Path:
        return self._folder / "server.log"

    def _failed(self, what: str) -> TargetUnavailable:
        """With what its log says: its last errors, or its last lines."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, self._log_path.stat().st_size - _LOG_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        telling = [line for line in lines if "Error" in line] or lines
        said = "\n".join(["its log ends with", *telling[-_LOG_LINES:]])
        return TargetUnavailable(what, subject="vllm", got=said, fix="see what it says")


def _reserved() -> socket.socket:
    """A socket that has a free port and does not listen there: an engine may, and nobody is given it meanwhile.

    The engine and each that follows it set one of the two options, as every server does that is to start again at once.
    """
    reserved = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
