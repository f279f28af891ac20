"""The queue's client without a server: how calls are packed, and how connections are shared."""

import threading
from typing import Any

import pytest
from hiredis import pack_command

from eaglefeed.errors import QueueUnavailable
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.scripts import Keys, load

MOST = 64


class Pool:
    """Connections that answer once `most` calls are under way at the same time."""

    def __init__(self, most: int) -> None:
        self.made: list[Any] = []
        self.all_busy = threading.Event()
        self.most, self.busy, self.peak = most, 0, 0
        self.lock = threading.Lock()

    def make_connection(self) -> "Pool":
        with self.lock:
            self.made.append(self)
        return self

    def send_packed_command(self, packed: tuple[bytes]) -> None:
        with self.lock:
            self.busy += 1
            self.peak = max(self.peak, self.busy)
            if self.busy >= self.most:
                self.all_busy.set()

    def read_response(self) -> bytes:
        assert self.all_busy.wait(30)
        with self.lock:
            self.busy -= 1
        return b"PONG"


class FastClock:
    """Sleeps as long as it takes to say so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_call_with_packed_keys_is_the_same_command_as_one_packed_at_once() -> None:
    names, args = ["eaglefeed:{r}:k", "eaglefeed:{r}:ü"], ["id", b"\r\n$3\r\n\x00\xff", 12.5, 7]
    script = load("put")
    words = ("EVALSHA", script.sha, 2, *names, *args)
    assert Keys(names).pack(script, args) == pack_command(words)  # type: ignore[arg-type]
    assert Keys(names).pack(script, []) == pack_command(words[:5])  # type: ignore[arg-type]


def test_callers_beyond_the_connections_wait_for_one_and_no_more_are_made() -> None:
    pool, replies = Pool(MOST), list[bytes]()
    client = QueueClient(pool, address="nowhere")  # type: ignore[arg-type]
    threads = [threading.Thread(target=lambda: replies.append(client.call("PING"))) for _ in range(MOST + 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert replies == [b"PONG"] * (MOST + 6)
    assert (len(pool.made), pool.peak) == (MOST, MOST)


def test_a_caller_that_gets_no_connection_is_told_in_the_end() -> None:
    pool = Pool(MOST)
    client = QueueClient(pool, address="nowhere", clock=FastClock())  # type: ignore[arg-type]
    threads = [threading.Thread(target=client.call, args=("PING",)) for _ in range(MOST - 1)]
    pool.most = MOST + 1
    taken = client._take_connection()
    for thread in threads:
        thread.start()
    while pool.busy < MOST - 1:
        threading.Event().wait(0.001)
    with pytest.raises(QueueUnavailable, match="all 64 connections are in use"):
        client.call("PING")
    pool.all_busy.set()
    for thread in threads:
        thread.join(60)
    client._idle.append(taken)
    assert client.call("PING") == b"PONG"
