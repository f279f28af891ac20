"""The server that everything is measured on: its own clocks and counts, and empty queues on it."""

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ctypes.util import find_library
from itertools import count
from pathlib import Path

from eaglefeed.bench.items import make_items
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.queue import EmbeddedServer, connect
from eaglefeed.queue.base import QueueLimits
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.redis import RedisLeaseQueue
from eaglefeed.queue.server_process import find_server_binary

__all__ = ["Bed", "opened_bed"]

ROOMY = QueueLimits(
    max_depth=10**9, high_count=10**9, low_count=10**8, high_bytes=2**60, low_bytes=2**59, max_deliveries=1000
)
"""Limits that no measurement reaches."""
_PUT = 1000
_LARGE_LOG_BYTES = 256 * 2**20
_CALM_TIMEOUT_S, _POLL_S = 120.0, 0.02
_CRON_S = 0.25
"""Within this the server has counted its clients' buffers again."""
_BUSY = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress", "lazyfree_pending_objects")
_MAIN_THREAD = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
_PROCESS = ("used_cpu_user", "used_cpu_sys")


class Bed:
    """A connection to the server, which is the bench's alone: `clear` empties its database.

    Args:
        client: the connection.
        url: the same for other processes; may hold a password.
        allocator: where the server's memory comes from, unless it tells so itself.
    """

    def __init__(self, client: QueueClient, url: str, allocator: str = "") -> None:
        self.client, self.url = client, url
        self.allocator = allocator or self.info("memory").get("mem_allocator", "")
        self._numbers = count(1)
        told = self.info("cpu")
        self.cpu_fields = _MAIN_THREAD if _MAIN_THREAD[0] in told else _PROCESS

    def info(self, section: str) -> dict[str, str]:
        """The fields of a section of INFO."""
        lines = self.client.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def cpu_us(self) -> float:
        """CPU time that the server has used, in µs."""
        told = self.info("cpu")
        return sum(float(told[name]) for name in self.cpu_fields) * 1e6

    def script_us(self) -> tuple[int, int]:
        """Scripts that the server has run, and the time in them, in µs."""
        told = dict(part.split("=") for part in self.info("commandstats")["cmdstat_evalsha"].split(","))
        return int(told["calls"]), int(told["usec"])

    def data_bytes(self) -> int:
        """Memory that the server's data takes, without buffers and the log of slow commands."""
        self.client.call("SLOWLOG", "RESET")
        self.client.call("MEMORY", "PURGE")
        SYSTEM_CLOCK.sleep(_CRON_S)
        return int(self.info("memory")["used_memory_dataset"])

    def new_name(self) -> str:
        """A name that nothing here had before."""
        return f"bench{next(self._numbers)}"

    def queue(self, items: int = 0, *, stored: bool = True) -> RedisLeaseQueue:
        """A new queue with `items` ready."""
        queue = RedisLeaseQueue(self.client, self.new_name(), "samples")
        queue.configure(ROOMY)
        for start in range(0, items, _PUT):
            queue.put(make_items(min(_PUT, items - start), start=start, stored=stored))
        return queue

    def clear(self) -> None:
        """Empty the database, shorten a long append-only file, and wait until the server does nothing any more."""
        self.client.call("FLUSHDB", "SYNC")
        if int(self.info("persistence").get("aof_current_size", "0")) > _LARGE_LOG_BYTES:
            self.client.call("BGREWRITEAOF")
        self.calm()

    def calm(self) -> None:
        """Wait until the server has no work in the background.

        Raises:
            QueueUnavailable: it still has after two minutes.
        """
        end_s = SYSTEM_CLOCK.monotonic() + _CALM_TIMEOUT_S
        while any(self._background()):
            if SYSTEM_CLOCK.monotonic() > end_s:
                raise QueueUnavailable(self.client.address, "it has been rewriting its file or freeing for 2 minutes")
            SYSTEM_CLOCK.sleep(_POLL_S)

    def _background(self) -> list[int]:
        told = self.info("persistence") | self.info("memory")
        return [int(told.get(name, "0")) for name in _BUSY]

    @contextmanager
    def tuned(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Change settings of the server for a while."""
        before = {name: self.client.call("CONFIG", "GET", name)[1] for name in settings}
        try:
            for name, value in settings.items():
                self.client.call("CONFIG", "SET", name, value)
            yield
        finally:
            for name, old in before.items():
                self.client.call("CONFIG", "SET", name, old)


@contextmanager
def opened_bed(url: str | None) -> Iterator[Bed]:
    """The server at `url`, or one of the bench's own in a temporary folder.

    Its file is not rewritten on its own while something is measured.

    Raises:
        ConfigError: the database at `url` is not empty.
    """
    with ExitStack() as stack:
        allocator = ""
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eaglefeed-bench-")))
            binary, allocator = _server_program(folder)
            url = stack.enter_context(EmbeddedServer(folder / "queue", binary=binary)).url
        client = connect(url)
        stack.callback(client.close)
        if client.call("DBSIZE"):
            fix = "give a database that holds nothing: the bench empties it"
            raise ConfigError("the database is not empty", subject=client.address, fix=fix)
        bed = Bed(client, url, allocator)
        stack.enter_context(bed.tuned({"auto-aof-rewrite-percentage": "0"}))
        stack.callback(bed.clear)
        yield bed


def _server_program(folder: Path) -> tuple[str, str]:
    """The server that a run starts, with jemalloc where this machine has it, as servers of production are built.

    The bundled one is built with the C library's allocator, which costs it about a tenth of its time.
    """
    binary, library = find_server_binary(), find_library("jemalloc")
    if library is None:
        return binary, ""
    wrapper = folder / "server"
    wrapper.write_text(f'#!/bin/sh\nexec env LD_PRELOAD={shlex.quote(library)} {shlex.quote(binary)} "$@"\n')
    wrapper.chmod(0o700)
    return str(wrapper), f"{library}, preloaded"
