"""Faults that other queues shipped with, as far as one queue alone can show them; the rest is in tests/faults."""

import threading
import time
from collections.abc import Sequence
from itertools import count

import pytest

from eaglefeed.clock import SystemClock
from eaglefeed.queue.base import AckResult, DrainState, Lease, LeaseQueue, QueueLimits
from queue_servers import Bench
from queue_steps import LONG_S, SHORT_S, counts, dead_ids, expire, filled, finish, ids, items, lease, nothing, numbered

# delivered twice while still running


def test_items_are_not_delivered_twice_while_their_lease_runs(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = lease(queue)
    got = nothing(queue)
    assert (got.state, got.next_ms) == (DrainState.EMPTY, held.deadline_ms)


def test_a_lease_that_is_renewed_in_time_is_never_delivered_to_another(bench: Bench) -> None:
    queue = filled(bench, "a")
    timeout_s = LONG_S if bench.is_virtual else 1.0
    held = lease(queue, 1, timeout_s)
    for _ in range(2):
        bench.pass_time(timeout_s * 0.6)
        queue.renew(held.token, visibility_timeout_s=timeout_s)
        assert nothing(queue).state is DrainState.EMPTY
    assert queue.ack(held.token, ["a"]).ok == ("a",)
    assert queue.stats().redelivered == 0


# a zombie's late ack counted for the new owner; slow worker and recovery both complete


def test_a_zombies_late_ack_is_stale_and_leaves_the_new_owner_alone(bench: Bench) -> None:
    queue = filled(bench, "a")
    zombie = expire(bench, queue)
    owner = lease(queue)
    assert queue.ack(zombie.token, ["a"]) == AckResult((), ("a",))
    assert queue.nack(zombie.token, ["a"], reason="late", retryable=False) == AckResult((), ("a",))
    assert counts(queue) == (0, 0, 1, 0, 0)
    assert queue.ack(owner.token, ["a"]) == AckResult(("a",), ())
    assert queue.ack(zombie.token, ["a"]) == AckResult((), ("a",))
    assert queue.ack(owner.token, ["a"]) == AckResult((), ("a",))
    assert counts(queue) == (0, 0, 0, 1, 0)


def test_of_a_slow_worker_and_the_one_that_took_over_only_the_owner_completes(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("a", stored_bytes=5))
    slow = expire(bench, queue)
    assert finish(queue) == ["a"]
    assert queue.ack(slow.token, ["a"]) == AckResult((), ("a",))
    assert counts(queue) == (0, 0, 0, 1, 0)
    assert [item.id for item in queue.released()] == ["a"]


def test_a_slow_worker_cannot_make_another_ones_work_tentative_at_its_step(bench: Bench) -> None:
    queue = filled(bench, "a")
    slow = expire(bench, queue)
    owner = lease(queue)
    assert queue.ack(slow.token, ["a"], step=1) == AckResult((), ("a",))
    assert queue.ack(owner.token, ["a"], step=7).ok == ("a",)
    assert (queue.commit(1), queue.commit(7)) == (0, 1)


# finished item later marked failed


@pytest.mark.parametrize("step", [None, 3])
def test_an_item_that_was_finished_cannot_be_marked_failed_later(bench: Bench, step: int | None) -> None:
    queue = filled(bench, "a", "b")
    held = lease(queue)
    queue.ack(held.token, ["a"], step=step)
    for retryable, delay_s in ((False, None), (True, None), (True, 0), (True, 1.0)):
        result = queue.nack(held.token, ["a"], reason="late", retryable=retryable, delay_s=delay_s)
        assert result == AckResult((), ("a",))
    stats = queue.stats()
    assert (stats.ready, stats.delayed, stats.leased, stats.dead) == (0, 0, 1, 0)
    assert (stats.tentative, stats.done) == ((0, 1) if step is None else (1, 0))


# active without a lease; non-atomic pop and register


def test_every_item_that_left_the_ready_ones_has_a_lease_that_ends(bench: Bench) -> None:
    queue = filled(bench, *numbered(120))
    taken: list[Lease] = []

    def take() -> None:
        while isinstance(got := queue.lease(8, visibility_timeout_s=LONG_S, consumer="c"), Lease):
            taken.append(got)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(i for got in taken for i in ids(got)) == numbered(120)
    assert counts(queue) == (0, 0, 120, 0, 0)
    for got in taken:
        queue.ack(got.token, ids(got)[:1])
        queue.nack(got.token, ids(got)[1:2], reason="later", delay_s=LONG_S)
        queue.renew(got.token, visibility_timeout_s=0)
    bench.pass_time(0.002)
    assert len(lease(queue).items) == 1
    assert counts(queue) == (89, 15, 1, 15, 0)


# reclaim capped so that a backlog never drains


def let_all_run_out(bench: Bench, queue: LeaseQueue, tokens: Sequence[int]) -> None:
    if bench.is_virtual:
        bench.pass_time(LONG_S * 2)
        return
    for token in tokens:
        queue.renew(token, visibility_timeout_s=0)
    bench.pass_time(0.002)


def test_a_backlog_of_expired_leases_drains_whatever_a_call_reclaims(bench: Bench) -> None:
    names = numbered(1000 if bench.kind == "fakeredis" else 3000)
    queue = filled(bench, *names)
    queue.configure(QueueLimits(max_deliveries=1))
    let_all_run_out(bench, queue, [lease(queue, 1).token for _ in names])
    for calls in count(1):
        assert nothing(queue).state is DrainState.EMPTY
        if not queue.stats().leased:
            break
        assert calls < 50
    assert counts(queue) == (0, 0, 0, 0, len(names))


def test_a_backlog_of_expired_leases_does_not_hide_what_is_ready(bench: Bench) -> None:
    names = numbered(160)
    queue = filled(bench, *names)
    let_all_run_out(bench, queue, [lease(queue, 1).token for _ in names[1:]])
    assert sorted(i for _ in names for i in ids(lease(queue, 1))) == names


# client clock


@pytest.mark.parametrize("off_s", [86_400, -86_400])
def test_a_client_whose_clock_is_off_by_a_day_leases_and_renews_right(
    bench: Bench, off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = filled(bench, "a", "b", "c")
    right = lease(queue, 1)
    monkeypatch.setattr(SystemClock, "time", lambda self: time.time() + off_s)
    wrong = lease(queue, 1)
    assert right.deadline_ms <= wrong.deadline_ms < right.deadline_ms + 3_600_000
    assert queue.renew(wrong.token, visibility_timeout_s=LONG_S) < right.deadline_ms + 3_600_000
    delayed = lease(queue, 1)
    queue.nack(delayed.token, ["c"], reason="later", delay_s=0.2)
    assert nothing(queue).state is DrainState.EMPTY
    got = queue.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=30)
    assert isinstance(got, Lease)
    monkeypatch.undo()
    assert nothing(queue).state is DrainState.EMPTY
    assert [queue.ack(held.token, ids(held)).stale for held in (right, wrong, got)] == [(), (), ()]


# a poison item takes its lease mates along


def test_a_poison_item_among_64_dies_alone(bench: Bench) -> None:
    names = numbered(64)
    queue = filled(bench, *names)
    queue.configure(QueueLimits(max_deliveries=2))
    poison = names[40]
    expire(bench, queue, 64)
    while isinstance(got := queue.lease(64, visibility_timeout_s=SHORT_S, consumer="c"), Lease):
        work(bench, queue, got, poison)
    assert dead_ids(queue) == [poison]
    assert counts(queue) == (0, 0, 0, 63, 1)


def work(bench: Bench, queue: LeaseQueue, got: Lease, poison: str) -> None:
    """Settle what was leased, but for the poison item, which kills the worker."""
    if poison in ids(got):
        bench.pass_time(SHORT_S * 2)
    else:
        assert queue.ack(got.token, ids(got)).ok == tuple(ids(got))
