"""The processes of a chaos run: started, killed, paused, replaced, and none left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults.chaos.record import write_death
from faults.chaos.worker import FENCED


class Slot:
    """One job of a role: a process, and those before it that were paused when it took over."""

    def __init__(self, folder: Path, role: str, index: int) -> None:
        self.role, self._folder, self._number = role, folder, index * 100_000
        self._process: subprocess.Popen[bytes] | None = None
        self._paused: dict[subprocess.Popen[bytes], float] = {}
        self._old: list[subprocess.Popen[bytes]] = []
        self._killed: set[subprocess.Popen[bytes]] = set()
        self._logs: dict[subprocess.Popen[bytes], Path] = {}
        self.suicides = self.fenced = 0

    @property
    def is_running(self) -> bool:
        """Whether it can be killed or paused: it has begun its work, and is awake."""
        process = self._process
        return process is not None and process not in self._paused and self._logs[process].exists()

    def start(self) -> None:
        self._number += 1
        command = [sys.executable, "-m", "faults.chaos.worker", str(self._folder), self.role, str(self._number)]
        with (self._folder / "errors.log").open("ab") as errors:
            self._process = subprocess.Popen(
                command, stderr=errors, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            )
        self._logs[self._process] = self._folder / "calls" / f"{self.role}.{self._number}.jsonl"

    def kill(self) -> None:
        assert self._process is not None
        self._killed.add(self._process)
        self._process.send_signal(signal.SIGKILL)

    def pause(self, pause_s: float, *, replace: bool) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._paused[self._process] = time.monotonic() + pause_s
        if replace:
            self._old.append(self._process)
            self.start()

    def tend(self) -> bool:
        """Wake the paused, replace the dead; True when the work is done."""
        for process, until_s in list(self._paused.items()):
            if time.monotonic() >= until_s:
                process.send_signal(signal.SIGCONT)
                del self._paused[process]
        for process in list(self._old):
            if process.poll() is not None:
                self._bury(process)
                self._old.remove(process)
        if self._process is not None and self._process.poll() is not None:
            ended, self._process = self._process, None
            if self._bury(ended) != 0:
                self.start()
        return self._process is None and not self._old

    def _bury(self, process: subprocess.Popen[bytes]) -> int:
        """Note how a process ended.

        Raises:
            RuntimeError: by an error of its own.
        """
        code = process.returncode
        self._paused.pop(process, None)
        if code == FENCED:
            self.fenced += 1
        elif code != 0:
            write_death(self._logs[process])
            if code != -signal.SIGKILL:
                told = (self._folder / "errors.log").read_text()[-3000:]
                raise RuntimeError(f"{self._logs[process].stem} ended with {code}: {told}")
            self.suicides += process not in self._killed
        return code

    def end(self) -> None:
        """Leave no process behind."""
        for process in [*self._old, *([self._process] if self._process else [])]:
            process.kill()
            process.wait()
