"""What every lease queue promises of room, and of the workers that are alive."""

import threading
from collections.abc import Callable

import pytest

from eaglefeed.queue.base import DrainState, Lease, LeaseQueue, NoLease, QueueItem, QueueLimits
from queue_servers import Bench
from queue_steps import LONG_S, fail, filled, finish, ids, items, learn, lease, nothing, numbered, two_groups


def test_room_goes_at_the_high_mark_and_comes_back_at_the_low_one(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_count=3, low_count=1))
    seen = []
    for name in "abc":
        queue.put(items(name))
        seen.append(queue.has_room())
    held = lease(queue)
    for name in "abc":
        queue.ack(held.token, [name])
        seen.append(queue.has_room())
    assert seen == [True, True, False, False, True, True]


def test_room_is_counted_in_stored_bytes_too_and_dead_letters_take_none(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_bytes=30, low_bytes=10))
    queue.put(items("a", "b", "c", stored_bytes=10))
    assert not queue.has_room()
    assert not queue.wait_for_room(0.01)
    held = lease(queue)
    queue.ack(held.token, ["a"])
    assert not queue.has_room()
    queue.nack(held.token, ["b"], reason="bad", retryable=False)
    assert queue.wait_for_room(0.01)
    assert queue.stats().stored_bytes == 10
    queue.requeue(["b"])
    assert queue.stats().stored_bytes == 20


def test_new_limits_are_looked_at_at_once(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    queue.configure(QueueLimits(high_count=2, low_count=0))
    assert not queue.has_room()
    queue.configure(QueueLimits(high_count=9, low_count=5))
    assert queue.has_room()


def test_workers_are_counted_by_role_over_all_queues_of_the_run(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.beat("producer", "host a-1")
    prompts.beat("producer", "host b-2")
    samples.beat("trainer", "t")
    samples.beat("trainer", "t")
    assert samples.stats().workers == {"producer": 2, "trainer": 1}
    samples.farewell("producer", "host a-1")
    samples.farewell("producer", "never seen")
    assert prompts.stats().workers == {"producer": 1, "trainer": 1}


def test_a_silent_worker_does_not_live_any_more(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs half a minute")
    queue = bench.queue("samples")
    queue.beat("producer", "a")
    bench.pass_time(20)
    queue.beat("producer", "b")
    bench.pass_time(20)
    assert queue.stats().workers == {"producer": 1}


# room that comes back


def waiter(queue: LeaseQueue) -> Callable[[], bool]:
    """Start to wait for room in a thread; the result tells whether it came."""
    came: list[bool] = []
    thread = threading.Thread(target=lambda: came.append(queue.wait_for_room(30)))
    thread.start()

    def result() -> bool:
        thread.join(60)
        return came == [True]

    return result


def full_queue(bench: Bench, *names: str) -> LeaseQueue:
    queue = filled(bench, *names)
    queue.configure(QueueLimits(high_count=len(names), low_count=1))
    assert not queue.has_room()
    return queue


def test_room_that_an_ack_makes_wakes_who_waits_for_it(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    woken = waiter(queue)
    finish(queue, 2)
    assert woken()


def test_room_that_a_commit_makes_wakes_who_waits_for_it(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    learn(queue, 3, step=1)
    woken = waiter(queue)
    queue.commit(1)
    assert woken()


def test_room_that_a_restore_makes_wakes_who_waits_for_it(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    woken = waiter(queue)
    queue.restore(1, seen=["a", "b"])
    assert woken()


def test_room_that_dead_letters_make_wakes_who_waits_for_it(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    woken = waiter(queue)
    fail(queue, "a", "b")
    assert woken()


def test_room_that_new_limits_make_wakes_who_waits_for_it(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    woken = waiter(queue)
    queue.configure(QueueLimits())
    assert woken()


def test_everyone_who_waits_for_room_is_woken(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    woken = [waiter(queue) for _ in range(3)]
    finish(queue, 3)
    assert [came() for came in woken] == [True, True, True]


def test_room_is_back_only_when_count_and_bytes_are_both_low(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_count=4, low_count=2, high_bytes=100, low_bytes=20))
    queue.put([*items("a", "b", stored_bytes=5), *items("c", "d", stored_bytes=40)])
    held = lease(queue)
    seen = []
    for name in ("a", "b", "c", "d"):
        queue.ack(held.token, [name])
        seen.append(queue.has_room())
    assert seen == [False, False, False, True]


def test_a_sample_takes_room_until_the_slowest_group_has_done_it(bench: Bench) -> None:
    fast, slow = two_groups(bench)
    fast.configure(QueueLimits(high_count=2, low_count=0))
    fast.put(items("a", "b"))
    finish(fast)
    assert not fast.has_room()
    finish(slow, 1)
    assert not slow.has_room()
    finish(slow, 1)
    assert fast.has_room()


# tentative acks in a full queue


def test_a_full_queue_with_nothing_but_tentative_acks_asks_for_a_commit_at_once(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    learn(queue, 2, step=1)
    held = lease(queue)
    assert nothing(queue, wait_s=30) == NoLease(DrainState.COMMIT_DUE, held.deadline_ms)
    queue.ack(held.token, ["c"], step=2)
    assert nothing(queue, wait_s=30) == NoLease(DrainState.COMMIT_DUE, 0)
    queue.commit(1)
    assert queue.has_room()
    assert nothing(queue).state is DrainState.EMPTY


def test_a_waiting_lease_ends_when_a_commit_falls_due_meanwhile(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_bytes=10, low_bytes=5))
    queue.put(items("a", stored_bytes=9))
    queue.put(items("b"))
    held = lease(queue)
    queue.ack(held.token, ["a"], step=1)
    late = threading.Timer(0.05, queue.configure, [QueueLimits(high_count=2, low_count=0)])
    late.start()
    assert nothing(queue, wait_s=30).state is DrainState.COMMIT_DUE
    late.join()


def test_no_commit_is_due_while_there_is_room_or_work(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    learn(queue, 1, step=1)
    queue.configure(QueueLimits(high_count=3, low_count=0))
    assert ids(lease(queue)) == ["b", "c"]
    queue.configure(QueueLimits())
    assert nothing(queue).state is DrainState.EMPTY


def test_the_end_is_told_before_a_commit_that_is_due(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b")
    queue.close()
    learn(queue, 2, step=1)
    assert nothing(queue).state is DrainState.DRAINED


def test_a_commit_is_asked_of_the_group_whose_acks_wait(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.configure(QueueLimits(high_count=2, low_count=0))
    a.put(items("x", "y"))
    learn(a, 2, step=1)
    finish(b)
    assert nothing(a).state is DrainState.COMMIT_DUE
    assert nothing(b).state is DrainState.EMPTY


def test_watermarks_and_checkpoints_do_not_wait_for_each_other(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_bytes=50, low_bytes=30))
    coming, learned, step, commits = numbered(30), 0, 0, 0
    while learned < 30:
        while coming and queue.has_room():
            queue.put([QueueItem(coming.pop(0), b"ref", 10)])
        step += 1
        got = queue.lease(2, visibility_timeout_s=LONG_S, consumer="c")
        if isinstance(got, Lease):
            learned += len(queue.ack(got.token, ids(got), step=step).ok)
        elif got.state is DrainState.COMMIT_DUE:
            commits += queue.commit(step) > 0
        assert step < 100
    assert commits >= 5
    assert queue.stats().stored_bytes <= 50


# starving consumers


def test_room_comes_back_below_the_high_mark_when_consumers_starve(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    held = lease(queue)
    assert nothing(queue).state is DrainState.EMPTY
    assert not queue.has_room()
    queue.ack(held.token, ["a"])
    assert not queue.has_room()
    assert nothing(queue).state is DrainState.EMPTY
    assert queue.has_room()


def test_starving_consumers_do_not_make_room_by_bytes_that_are_stored(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_bytes=20, low_bytes=5))
    queue.put([*items("a", stored_bytes=20), *items("b", stored_bytes=6)])
    held = lease(queue)
    queue.ack(held.token, ["b"])
    assert nothing(queue).state is DrainState.EMPTY
    assert not queue.has_room()
    queue.put(items("c", stored_bytes=1))
    queue.ack(held.token, ["a"])
    assert queue.has_room()


def test_a_starving_consumer_wakes_who_waits_for_room(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c")
    held = lease(queue)
    queue.ack(held.token, ["a"])
    woken = waiter(queue)
    assert nothing(queue).state is DrainState.EMPTY
    assert woken()


def test_a_lease_that_finds_work_leaves_the_hysteresis_alone(bench: Bench) -> None:
    queue = full_queue(bench, "a", "b", "c", "d")
    finish(queue, 1)
    lease(queue, 1)
    assert not queue.has_room()
