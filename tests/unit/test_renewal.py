import threading
from itertools import pairwise

import pytest

from eaglefeed.clock import ManualClock
from eaglefeed.errors import QueueUnavailable
from eaglefeed.queue.base import Lease, QueueItem
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.queue.rules import WORKER_GRACE_S

VISIBILITY_S = 60.0


class Bench:
    """One leased item, a renewer, and an outage that can be switched on."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue = MemoryLeaseQueue(MemoryServer(self.clock), "run", "samples")
        self.queue.put([QueueItem("a", b"payload")])
        self.lost: list[int] = []
        self.renewer = LeaseRenewer(
            self.queue,
            visibility_timeout_s=VISIBILITY_S,
            stall_timeout_s=600.0,
            max_lease_age_s=1800.0,
            on_lost=self.lost.append,
            clock=self.clock,
        )
        self.token = self.lease().token
        self.renewer.add(self.token)

    def lease(self) -> Lease:
        got = self.queue.lease(1, visibility_timeout_s=VISIBILITY_S, consumer="c")
        assert isinstance(got, Lease)
        return got

    def is_free(self) -> bool:
        """Whether somebody else could lease the item now; would reclaim it."""
        return isinstance(self.queue.lease(1, visibility_timeout_s=VISIBILITY_S, consumer="other"), Lease)

    def work(self, seconds: float, *, progress: bool) -> None:
        """Let time pass in steps of 5 s."""
        for _ in range(int(seconds / 5)):
            self.clock.advance(5)
            if progress:
                self.renewer.progress()
            self.renewer.tick()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_lease_is_kept_while_its_holder_makes_progress(bench: Bench) -> None:
    bench.work(1200, progress=True)
    assert not bench.is_free()
    assert bench.queue.ack(bench.token, ["a"]).ok == ("a",)


def test_a_lease_is_renewed_at_a_third_of_its_timeout(bench: Bench) -> None:
    bench.clock.advance(19)
    assert bench.renewer.tick() == pytest.approx(1)
    bench.clock.advance(1)
    bench.renewer.tick()
    bench.clock.advance(59)
    assert not bench.is_free()
    bench.clock.advance(1)
    assert bench.is_free()


def test_a_worker_shows_signs_of_life_however_long_its_leases_last() -> None:
    clock, signs = ManualClock(), list[float]()
    queue = MemoryLeaseQueue(MemoryServer(clock), "run", "prompts")
    queue.put([QueueItem("a", b"payload")])
    lease = queue.lease(1, visibility_timeout_s=600, consumer="c")
    assert isinstance(lease, Lease)
    seen = lambda: signs.append(clock.monotonic())  # noqa: E731
    renewer = LeaseRenewer(queue, visibility_timeout_s=600, on_renewed=seen, clock=clock)
    renewer.add(lease.token)
    end_s = clock.monotonic() + 300
    while clock.monotonic() < end_s:  # a long forward
        clock.advance(renewer.tick())
    assert len(signs) >= 300 / WORKER_GRACE_S
    assert max(later - sooner for sooner, later in pairwise(signs)) < WORKER_GRACE_S


def test_a_stalled_holder_loses_its_lease_and_learns_of_it(bench: Bench) -> None:
    bench.work(600, progress=False)
    assert not bench.is_free()
    bench.work(65, progress=False)
    assert bench.is_free()
    assert bench.lost == []
    bench.renewer.progress()
    bench.renewer.tick()
    assert bench.lost == [bench.token]
    assert bench.renewer.is_lost(bench.token)


def test_a_holder_that_goes_on_in_time_keeps_its_lease(bench: Bench) -> None:
    bench.work(640, progress=False)
    bench.work(100, progress=True)
    assert not bench.is_free()


def test_a_lease_is_not_renewed_beyond_its_greatest_age(bench: Bench) -> None:
    bench.work(1800, progress=True)
    assert not bench.is_free()
    bench.work(65, progress=True)
    assert bench.is_free()


def test_a_wait_for_work_is_no_stall(bench: Bench) -> None:
    bench.renewer.forget(bench.token)
    bench.queue.ack(bench.token, ["a"])
    bench.work(3600, progress=False)
    bench.queue.put([QueueItem("b", b"payload")])
    bench.renewer.add(bench.lease().token)
    bench.work(300, progress=False)
    assert not bench.is_free()


def test_an_outage_is_waited_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(token: int, *, visibility_timeout_s: float) -> int:
        raise QueueUnavailable("redis://somewhere", "away")

    with monkeypatch.context() as outage:
        outage.setattr(bench.queue, "renew", away)
        bench.work(300, progress=True)
    assert bench.lost == []
    bench.work(30, progress=True)
    assert not bench.is_free()


def test_a_holder_that_leases_again_after_a_pause_or_an_outage_does_not_take_its_own_lease_back(bench: Bench) -> None:
    bench.clock.advance(VISIBILITY_S + 5)
    assert bench.renewer.keep_up()
    assert not bench.is_free()
    assert bench.renewer.is_kept(bench.token)
    bench.clock.advance(VISIBILITY_S + 5)
    assert bench.is_free()
    assert bench.renewer.keep_up()
    assert not bench.renewer.is_kept(bench.token)


def test_a_stalled_holder_is_to_lease_nothing_which_would_cost_it_what_it_holds(bench: Bench) -> None:
    bench.clock.advance(601)
    assert not bench.renewer.keep_up()
    bench.renewer.progress()
    assert bench.renewer.keep_up()
    assert bench.queue.ack(bench.token, ["a"]).ok == ("a",)


def test_a_lease_that_is_too_old_to_be_renewed_is_not_kept(bench: Bench) -> None:
    bench.work(1800, progress=True)
    assert bench.renewer.is_kept(bench.token)
    bench.work(30, progress=True)
    assert not bench.renewer.is_kept(bench.token)
    assert not bench.renewer.is_lost(bench.token)


def test_one_lost_lease_does_not_stop_the_others(bench: Bench) -> None:
    bench.queue.put([QueueItem("b", b"payload")])
    other = bench.lease().token
    bench.renewer.add(other)
    bench.queue.nack(bench.token, ["a"], reason="stop", delay_s=0)
    bench.work(120, progress=True)
    assert bench.lost == [bench.token]
    assert bench.queue.ack(other, ["b"]).ok == ("b",)


def test_a_forgotten_lease_is_neither_renewed_nor_lost(bench: Bench) -> None:
    bench.renewer.forget(bench.token)
    bench.work(65, progress=True)
    assert bench.is_free()
    assert bench.lost == []
    bench.renewer.forget(bench.token)


def test_the_thread_outlives_a_bug_in_the_callback_and_ends_when_told() -> None:
    bench = Bench()
    told = threading.Event()

    def fail(token: int) -> None:
        told.set()
        raise RuntimeError(token)

    renewer = LeaseRenewer(bench.queue, visibility_timeout_s=0.03, on_lost=fail)
    renewer.add(12345)
    renewer.start()
    assert told.wait(30)
    again = threading.Event()
    renewer._on_lost = lambda _token: again.set()
    renewer.add(12346)
    assert again.wait(30)
    assert renewer.stop()


def test_a_renewer_that_never_started_stops() -> None:
    assert Bench().renewer.stop()
