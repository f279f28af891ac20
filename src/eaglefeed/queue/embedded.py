"""A server of the run's own, on a unix socket in a folder of the run, shared by all processes of the run.

    start.lock    held while somebody joins or leaves
    users.lock    held shared by every process that uses the server; the last to leave stops it
    server.lock   held by the server itself
    server.sock  server.log  server.pid  appendonlydir/

Locks are the kernel's: a killed process holds none. The server outlives whoever started it. Its append-only file is
synced every second: a lost machine loses about that much, and so may a killed server whose disk is slow to sync.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.queue.server_process import find_server_binary, is_alive, launch, shut_down, wait_until_ready

__all__ = ["EmbeddedServer"]

_POLL_S = 0.005
_MAX_SOCKET_PATH = 100
"""Bytes; Linux takes 107 and macOS 103."""


class EmbeddedServer:
    """This process's share in the run's server: `start` (or entering) joins it, `close` leaves.

    Args:
        folder: the server's folder, such as runs/<id>/queue; it holds nothing else.
        binary: the server's program; None finds it.
        timeout_s: how long starting, loading, stopping, or waiting for another process that does so may take.
    """

    def __init__(self, folder: str | Path, *, binary: str | None = None, timeout_s: float = 30.0) -> None:
        self.folder = Path(folder).resolve()
        self._binary, self._timeout_s, self._pid = binary, timeout_s, os.getpid()
        self._users_fd = self._folder_fd = -1

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where `connect` finds the server, in this process."""
        return f"unix://{quote(self._socket_path)}"

    @property
    def _socket_path(self) -> str:
        """The socket by a path that is short enough for the kernel.

        Raises:
            ConfigError: there is no such path.
        """
        path = str(self.folder / "server.sock")
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            return path
        short = Path(f"/proc/self/fd/{self._folder_fd}")
        if not short.exists():
            raise ConfigError("path too long for a socket", subject=path, fix="choose a folder with a shorter path")
        return str(short / "server.sock")

    def start(self) -> None:
        """Join the run's server, and start it if nobody has.

        Raises:
            ConfigError: no program, a folder that cannot be used, or a socket that is somebody else's.
            QueueUnavailable: the server does not start or answer; says why.
        """
        self._open_files()
        try:
            with self._start_lock():
                fcntl.flock(self._users_fd, fcntl.LOCK_SH)
                if not is_alive(self.folder):
                    launch(self._binary or find_server_binary(), self.folder, self._socket_path)
                wait_until_ready(self.folder, self._socket_path, self._timeout_s)
        except OSError as error:  # of a lock, such as of a file system that has none
            self._close_files()
            fix = "put run.dir on a local disk, or run a server and pass --redis"
            raise ConfigError(
                "a server cannot be started here", subject=str(self.folder), got=error.strerror, fix=fix
            ) from None
        except BaseException:
            self._close_files()
            raise

    def close(self) -> None:
        """Leave; the last one stops the server, which writes its file first. Safe to repeat.

        Raises:
            QueueUnavailable: the server does not stop.
        """
        if self._users_fd < 0:
            return
        try:
            with self._start_lock():
                if self._pid == os.getpid() and self._is_last() and is_alive(self.folder):
                    shut_down(self.folder, self._socket_path, self._timeout_s)
        finally:
            self._close_files()

    def _is_last(self) -> bool:
        try:
            fcntl.flock(self._users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _open_files(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._users_fd = self._open_lock("users.lock")
        except OSError as error:
            self._close_files()
            raise ConfigError("the folder cannot be used", subject=str(self.folder), got=error.strerror) from None

    def _open_lock(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _close_files(self) -> None:
        for fd in (self._users_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._users_fd = self._folder_fd = -1

    @contextmanager
    def _start_lock(self) -> Iterator[None]:
        """One process at a time joins or leaves."""
        fd = self._open_lock("start.lock")
        try:
            self._wait_for(fd)
            yield
        finally:
            os.close(fd)

    def _wait_for(self, fd: int) -> None:
        end_s = SYSTEM_CLOCK.monotonic() + self._timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if SYSTEM_CLOCK.monotonic() >= end_s:
                    reason = f"another process has been starting or stopping it for {self._timeout_s:g} s"
                    raise QueueUnavailable(f"embedded server in {self.folder}", reason) from None
                SYSTEM_CLOCK.sleep(_POLL_S)
            else:
                return
