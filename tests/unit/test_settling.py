"""The end of a stream: what is held is given back, and a queue that is away does not keep the process."""

import threading
from typing import Any

import pytest
import structlog

from eaglefeed.clock import ManualClock
from eaglefeed.consumer.cleaning import Cleaner
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.settling import Settler
from eaglefeed.errors import QueueUnavailable
from eaglefeed.queue.base import AckResult, Lease, QueueItem
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.storage.memory import MemoryStore

NUM_LEASES = 20


class SlowQueue(MemoryLeaseQueue):
    """Takes `nack_s` for each nack, and does not answer those beyond the first `num_answered`."""

    nack_s, num_answered, nacks = 0.0, NUM_LEASES, 0
    clock: ManualClock

    def nack(self, *args: Any, **options: Any) -> AckResult:
        self.nacks += 1
        self.clock.advance(self.nack_s)
        if self.nacks > self.num_answered:
            raise QueueUnavailable("redis://there", "away")
        return super().nack(*args, **options)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(clock: ManualClock) -> SlowQueue:
    made = SlowQueue(MemoryServer(clock), "run", "samples")
    made.clock = clock
    made.put([QueueItem(f"s-{index:02}", b"ref") for index in range(2 * NUM_LEASES)])
    return made


def _settler(queue: SlowQueue, clock: ManualClock) -> Settler:
    """One that holds twenty leases of two samples each."""
    holdings = Holdings(LeaseRenewer(queue, visibility_timeout_s=60, clock=clock))
    for _ in range(NUM_LEASES):
        lease = queue.lease(2, visibility_timeout_s=60, consumer="t")
        assert isinstance(lease, Lease)
        holdings.add(lease.token, [item.id for item in lease.items])
    return Settler(
        queue,
        MemoryStore(),
        holdings=holdings,
        stats=StreamStats(),
        retain=False,
        outage_s=0,
        stop=threading.Event(),
        clock=clock,
    )


def test_what_is_given_back_comes_again_in_the_order_it_was_put(queue: SlowQueue, clock: ManualClock) -> None:
    settler = _settler(queue, clock)
    assert settler.close()
    again = queue.lease(2 * NUM_LEASES, visibility_timeout_s=60, consumer="u")
    assert isinstance(again, Lease)
    assert [item.id for item in again.items] == [f"s-{index:02}" for index in range(2 * NUM_LEASES)]
    assert settler._stats.returned == 2 * NUM_LEASES


def test_a_queue_that_is_away_at_the_end_is_asked_once_and_not_once_a_lease(
    queue: SlowQueue, clock: ManualClock
) -> None:
    queue.nack_s, queue.num_answered = 30.0, 0
    settler = _settler(queue, clock)
    began_s = clock.monotonic()
    with structlog.testing.capture_logs() as logs:
        assert not settler.close()
    assert (queue.nacks, clock.monotonic() - began_s) == (1, 30.0)
    assert [(each["event"], each["num_samples"]) for each in logs] == [("leases_left_to_expire", 40)]


@pytest.mark.parametrize(("drained", "wait_s"), [(False, 60.0), (True, 600.0)])
def test_the_end_of_a_run_waits_longer_for_its_shards_to_be_deleted_than_a_stop(
    queue: SlowQueue, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, drained: bool, wait_s: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Cleaner, "close", lambda _, timeout_s: waits.append(timeout_s))
    assert _settler(queue, clock).close(drained=drained)
    assert waits == [wait_s]


def test_a_queue_that_answers_slowly_does_not_keep_the_end_beyond_one_deadline(
    queue: SlowQueue, clock: ManualClock
) -> None:
    queue.nack_s = 12.0
    settler = _settler(queue, clock)
    began_s = clock.monotonic()
    with structlog.testing.capture_logs() as logs:
        assert not settler.close()
    assert clock.monotonic() - began_s == 36.0  # 30 s, and the call that was under way
    assert settler._stats.returned == 6
    assert (len(logs[0]["leases"]), logs[0]["num_samples"]) == (NUM_LEASES - 3, 2 * (NUM_LEASES - 3))
