"""Files in the making: their names tell who makes them, so that leftovers of a crash can be told from live ones."""

import contextlib
import functools
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator

__all__ = ["is_leftover", "temporary", "temporary_name"]

_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PREFIX = ".tmp-"
_NAME = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9a-f]{8}")


@functools.cache
def _host() -> str:
    """This host, this boot and this pid namespace: where a process id means one process."""
    name = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return f"{name}-{file.read(8)}-{namespace:x}"
    return name


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None if it is gone or cannot be looked at."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(fields[18])  # the 22nd field; proc_pid_stat(5) counts from pid


@functools.cache
def _own_start(pid: int) -> int:
    return _started(pid) or 0


def temporary_name() -> str:
    """A name for a file in the making, that tells who makes it: `.tmp-<host>-<pid>-<process start>-<rand>`."""
    pid = os.getpid()
    return f"{_PREFIX}{_host()}-{pid}-{_own_start(pid)}-{secrets.token_hex(4)}"


def _is_alive(pid: int, start: int) -> bool:
    started = _started(pid)
    if started is not None:
        return started == start
    try:  # /proc may hide other users' processes, or show a dead one that nobody has waited for
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def is_leftover(name: str, folder_fd: int, older_than_s: float, now_s: float) -> bool:
    """Whether a name is that of a write that nobody will finish.

    Args:
        name: of a file in the folder.
        folder_fd: the folder's handle.
        older_than_s: the age at which one of another host counts as such.
        now_s: seconds since the epoch.
    """
    if not name.startswith(_PREFIX):
        return False
    made = _NAME.fullmatch(name)
    if made and made["host"] == _host() and int(made["start"]):
        return not _is_alive(int(made["pid"]), int(made["start"]))
    try:
        return now_s - os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mtime > older_than_s
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def temporary(folder_fd: int, write: Callable[[int], None]) -> Iterator[str]:
    """A file that `write` has filled, under a name of its own; it is gone afterwards, whatever happens."""
    name = temporary_name()
    fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=folder_fd)
    try:
        try:
            write(fd)
        finally:
            os.close(fd)  # may say only now that there is no room (NFS)
        yield name
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder_fd)
