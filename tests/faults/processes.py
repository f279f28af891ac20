"""Servers that are killed, processes that are started, and waiting for what they do."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from eaglefeed.queue import EmbeddedServer
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.server_process import is_alive


def pid(server: EmbeddedServer) -> int:
    return int((server.folder / "server.pid").read_text())


def kill(server: EmbeddedServer, client: QueueClient) -> None:
    # a write waits for a sync that is under way (everysec): that second is lost with the process
    wait_until(lambda: b"aof_buffer_length:0\r" in client.call("INFO", "persistence"))
    os.kill(pid(server), signal.SIGKILL)
    wait_until(lambda: not is_up(server))


def kill_at_once(server: EmbeddedServer) -> None:
    """In the middle of whatever it does."""
    os.kill(pid(server), signal.SIGKILL)
    wait_until(lambda: not is_up(server))


def is_up(server: EmbeddedServer) -> bool:
    return is_alive(server.folder)


def resume(server: EmbeddedServer) -> None:
    if is_up(server):
        os.kill(pid(server), signal.SIGCONT)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@contextmanager
def spawned(*calls: tuple[str | Path, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    """Python processes, each of a program and its arguments; none outlives the test."""
    pipe = subprocess.PIPE
    commands = [[sys.executable, "-c", *map(str, call)] for call in calls]
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for command in commands]
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield processes


def has_lines(log: Path) -> bool:
    return log.exists() and log.stat().st_size > 0


@contextmanager
def restarted(server: EmbeddedServer) -> Iterator[None]:
    """A killed server, started again."""
    with EmbeddedServer(server.folder, binary=server._binary):
        yield
