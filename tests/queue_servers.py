"""Servers and queues for tests: the memory model, fakeredis, and every real server that is installed."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha1
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fakeredis

from eaglefeed.errors import ConfigError
from eaglefeed.queue import EmbeddedServer, connect
from eaglefeed.queue.base import MAIN_GROUP, LeaseQueue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.queue.redis import RedisLeaseQueue
from eaglefeed.queue.scripts import Keys, Script
from eaglefeed.queue.server_process import find_server_binary

JITTER = 0.5
_TIME = "local time = call('TIME')"
_numbers = count(1)


class OffsetClock:
    """The real time, and as much more as a test has let pass."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def time(self) -> float:
        return time.time() + self.offset_s

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def advance(self, seconds: float) -> None:
        self.offset_s += seconds


class VirtualTimeClient(QueueClient):
    """Runs the scripts with one line changed: their time is the test's clock."""

    def __init__(self, pool: Any, clock: Any) -> None:
        super().__init__(pool, address="virtual time")
        self.test_clock = clock

    def run(self, script: Script, keys: Keys, args: Sequence[Any]) -> Any:
        now_us = int(self.test_clock.time() * 1000) * 1000
        return super().run(_with_argument(script), keys, [*args, now_us // 1_000_000, now_us % 1_000_000])


@cache
def _with_argument(script: Script) -> Script:
    assert script.text.count(_TIME) == script.text.count("'TIME'") <= 1
    head = "local AGAIN = table.remove(ARGV)\n" if script.replays else ""
    assert script.text.startswith(head)
    taken = "local TEST_TIME = {table.remove(ARGV, #ARGV - 1), table.remove(ARGV)}\n"
    text = head + taken + script.text.removeprefix(head).replace(_TIME, "local time = TEST_TIME")
    return replace(script, text=text, sha=sha1(text.encode()).hexdigest())


class OpenQueue(Protocol):
    """Opens a queue of the bench's run."""

    def __call__(self, name: str, group: str = MAIN_GROUP) -> LeaseQueue: ...


class Bench(NamedTuple):
    """One kind of queue under test, in a run of its own."""

    kind: str
    queue: OpenQueue
    pass_time: Callable[[float], None]

    @property
    def is_virtual(self) -> bool:
        """Whether a test may let hours pass."""
        return self.kind in {"memory", "fakeredis"}


def memory_bench() -> Bench:
    clock = OffsetClock()
    server = MemoryServer(clock)

    def queue(name: str, group: str = MAIN_GROUP) -> LeaseQueue:
        return MemoryLeaseQueue(server, "run", name, group, jitter=lambda: JITTER)

    return Bench("memory", queue, clock.advance)


def _redis_queues(client: QueueClient, namespace: str) -> OpenQueue:
    def queue(name: str, group: str = MAIN_GROUP) -> LeaseQueue:
        return RedisLeaseQueue(client, namespace, name, group, jitter=lambda: JITTER)

    return queue


def fakeredis_bench() -> Bench:
    clock = OffsetClock()
    client = VirtualTimeClient(fakeredis.FakeRedis().connection_pool, clock)
    return Bench("fakeredis", _redis_queues(client, "run"), clock.advance)


def real_bench(kind: str, client: QueueClient) -> Bench:
    return Bench(kind, _redis_queues(client, f"run{next(_numbers)}"), time.sleep)


def real_servers() -> dict[str, str]:
    """Kind → program of each server that can be started here."""
    try:
        found = {"valkey": find_server_binary()}
    except ConfigError:
        return {}
    redis_server = shutil.which("redis-server")
    if redis_server is not None and redis_server != found["valkey"]:
        found["redis"] = redis_server
    return found


@contextmanager
def running(binary: str) -> Iterator[EmbeddedServer]:
    """A server of the test's own, gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="eaglefeed-test-"))
    try:
        with EmbeddedServer(folder, binary=binary) as server:
            yield server
    finally:
        shutil.rmtree(folder)


@contextmanager
def connected(binary: str) -> Iterator[QueueClient]:
    with running(binary) as server:
        client = connect(server.url, max_wait_s=10.0)
        yield client
        client.close()
