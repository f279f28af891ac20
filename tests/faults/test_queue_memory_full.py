"""A server whose memory is full, or whose policy makes room by itself: what is refused, what goes on, what recovers."""

import threading
from collections.abc import Iterator

import pytest
import structlog

from eaglefeed.cli import feed
from eaglefeed.errors import QueueUnavailable, UnsafeServer
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue, QueueItem
from eaglefeed.queue.connection import QueueClient
from queue_steps import LONG_S, counts, ids, items, lease

LIMIT_BYTES, OTHERS_BYTES = 5 * 2**20, 10 * 2**20


def fill(client: QueueClient) -> None:
    """Another application writes twice what the server may take, as far as it is let."""
    for _ in range(OTHERS_BYTES // 10240):
        try:
            client.call("EVAL", "return redis.call('SET', 'other' .. redis.call('INCR', 'n'), ARGV[1])", 0, "x" * 10240)
        except QueueUnavailable:
            return


def make_room(client: QueueClient) -> None:
    client.call("EVAL", "for k = 1, redis.call('GET', 'n') do redis.call('DEL', 'other' .. k) end", 0)


@pytest.fixture
def small(client: QueueClient) -> Iterator[QueueClient]:
    used = int(client.call("INFO", "memory").decode().partition("used_memory:")[2].partition("\r")[0])
    client.call("CONFIG", "SET", "maxmemory", str(used + LIMIT_BYTES))
    yield client
    client.call("CONFIG", "SET", "maxmemory", "0")


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_server_that_evicts_whatever_it_likes_is_refused(
    server: EmbeddedServer, client: QueueClient, policy: str
) -> None:
    client.call("CONFIG", "SET", "maxmemory-policy", policy)
    with pytest.raises(UnsafeServer, match=f"wanted noeviction, got {policy}; set maxmemory-policy noeviction"):
        connect(server.url)


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-lfu", "volatile-ttl", "volatile-random"])
def test_a_server_that_evicts_what_expires_is_warned_of_and_loses_no_ref(
    server: EmbeddedServer, small: QueueClient, queue: LeaseQueue, policy: str
) -> None:
    held = lease(queue, 2)
    small.call("CONFIG", "SET", "maxmemory-policy", policy)
    with structlog.testing.capture_logs() as logs:
        connect(server.url).close()
    assert [f"maxmemory-policy {policy}" in entry["what"] for entry in logs if "policy" in entry["what"]] == [True]
    fill(small)
    assert queue.ack(held.token, ids(held)).ok == ("i0", "i1")
    assert ids(lease(queue)) == ["i2", "i3", "i4", "i5"]


def test_a_full_server_refuses_a_put_at_once_lets_work_go_on_and_takes_it_once_there_is_room(
    small: QueueClient, queue: LeaseQueue
) -> None:
    held = lease(queue, 2)
    fill(small)
    new = [QueueItem(f"new{k}", bytes(10240)) for k in range(20)]
    with pytest.raises(
        QueueUnavailable, match="out of memory; raise its maxmemory, or let consumers catch up"
    ) as caught:
        queue.put(new)
    assert (caught.value.retryable, caught.value.is_full) == (True, True)
    assert queue.renew(held.token, visibility_timeout_s=LONG_S) > held.deadline_ms - 1000 * LONG_S
    assert queue.ack(held.token, ["i0"]).ok == ("i0",)
    assert queue.nack(held.token, ["i1"], reason="back", delay_s=0).ok == ("i1",)
    assert counts(queue) == (5, 0, 0, 1, 0)
    make_room(small)
    assert queue.put(new)[:2] == (20, 0)
    assert ids(lease(queue, 30)) == ["i1", "i2", "i3", "i4", "i5", *(item.id for item in new)]


def test_feed_waits_for_a_full_server_and_goes_on(
    client: QueueClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, fed = open_queue(client, "run", "prompts"), feed.Fed()
    client.call("CONFIG", "SET", "maxmemory", "1")
    monkeypatch.setattr(feed, "_FULL_PAUSE_S", 0.5)
    freer = threading.Timer(0.2, client.call, ("CONFIG", "SET", "maxmemory", "0"))
    freer.start()
    feed._put(prompts, items("a", "b"), fed)
    freer.join()
    assert (fed.queued, prompts.stats().ready) == (2, 2)
    assert "out of memory; raise its maxmemory" in capsys.readouterr().err


@pytest.mark.parametrize("is_full", [True, False])
def test_feed_ends_with_a_server_that_stays_full_and_with_one_that_is_away(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        puts = 0

        def put(self, _items: object) -> None:
            self.puts += 1
            raise QueueUnavailable("server", "is not there", is_full=is_full)

    away = Away()
    monkeypatch.setattr(feed, "_FULL_WAIT_S", 0.05)
    monkeypatch.setattr(feed, "_FULL_PAUSE_S", 0.02)
    with pytest.raises(QueueUnavailable):
        feed._put(away, items("a"), feed.Fed())  # type: ignore[arg-type]
    assert (away.puts > 1) == is_full
