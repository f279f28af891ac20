"""What every lease queue promises of checkpoints: acks wait for their commit, and a restore undoes later ones."""

import threading
from collections.abc import Callable, Sequence

import pytest

from eaglefeed.errors import QueueError, StaleLease
from eaglefeed.queue.base import AckResult, DrainState, LeaseQueue
from queue_servers import Bench
from queue_steps import (
    LONG_S,
    counts,
    dead_ids,
    expire,
    fail,
    filled,
    ids,
    items,
    learn,
    lease,
    nothing,
    numbered,
    released_ids,
)


def progress(queue: LeaseQueue) -> Sequence[int]:
    s = queue.stats()
    return s.ready, s.leased, s.tentative, s.done


# commit


def test_an_ack_with_a_step_is_tentative_until_that_step_is_committed(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    learn(queue, 1, step=3)
    assert progress(queue) == (1, 0, 1, 0)
    assert queue.commit(2) == 0
    assert progress(queue) == (1, 0, 1, 0)
    assert queue.commit(3) == 1
    assert progress(queue) == (1, 0, 0, 1)
    assert queue.stats().committed_step == 3


def test_a_commit_settles_its_step_and_older_ones_only_and_may_be_repeated(bench: Bench) -> None:
    queue = filled(bench, *numbered(6))
    for step, n in ((1, 1), (4, 2), (2, 1), (5, 2)):
        learn(queue, n, step)
    assert [queue.commit(4), queue.commit(4)] == [4, 0]
    assert progress(queue) == (0, 0, 2, 4)
    assert queue.commit(9) == 2


def test_a_commit_of_an_older_step_takes_nothing_back(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.commit(5)
    learn(queue, 1, step=4)
    assert [queue.commit(3), queue.stats().committed_step] == [0, 5]
    assert [queue.commit(5), queue.stats().committed_step] == [1, 5]


def test_an_ack_without_a_step_is_settled_at_once(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    got = lease(queue)
    queue.ack(got.token, ["a"], step=0)
    queue.ack(got.token, ["b"])
    assert progress(queue) == (0, 0, 1, 1)
    assert queue.commit(0) == 1


def test_tentative_items_take_room_and_keep_their_payload(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("a", "b", stored_bytes=8))
    learn(queue, 1, step=1)
    assert queue.put([]).depth == 2
    assert [(item.id, item.delivery_count) for item in queue.payloads()] == [("a", 0), ("b", 0)]
    assert queue.stats().stored_bytes == 16
    queue.commit(1)
    assert [item.id for item in queue.payloads()] == ["b"]
    assert queue.stats().stored_bytes == 8


def test_a_tentative_item_has_left_its_lease_and_is_not_redelivered_by_a_timeout(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    got = lease(queue, 2, 0.04)
    queue.ack(got.token, ["a"], step=1)
    assert queue.ack(got.token, ["a"], step=2) == AckResult((), ("a",))
    bench.pass_time(0.08)
    assert ids(lease(queue)) == ["b"]
    assert queue.commit(1) == 1


def test_tentative_and_committed_ids_are_known_for_good(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    learn(queue, 1, step=1)
    queue.commit(1)
    learn(queue, 1, step=2)
    assert queue.put(items("a", "b")) == (0, 2, 1)


def test_a_closed_queue_is_drained_while_its_last_acks_wait_for_their_commit(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.close()
    learn(queue, 1, step=1)
    assert nothing(queue, wait_s=30).state is DrainState.DRAINED
    assert queue.stats().drained
    assert queue.stats().unsettled == 1
    session = queue.restore(0)
    assert not queue.stats().drained
    assert ids(lease(queue, session=session)) == ["a"]


# sessions


def test_a_restore_opens_a_new_session_and_each_is_newer_than_all_before(bench: Bench) -> None:
    queue = filled(bench, "a")
    assert queue.stats().session == 0
    first, second = queue.restore(0), queue.restore(0)
    assert 0 < first < second == queue.stats().session
    queue.purge()
    assert queue.restore(0) > second


@pytest.mark.parametrize("off", [0, -1, 1])
def test_calls_of_any_session_but_the_newest_are_refused_and_change_nothing(bench: Bench, off: int) -> None:
    queue = filled(bench, "a", "b")
    learn(queue, 1, step=3)
    newest = queue.restore(3)
    held = lease(queue, session=newest)
    other = newest + off if off else 0
    calls: list[Callable[[], object]] = [
        lambda: queue.lease(1, visibility_timeout_s=1, consumer="c", session=other),
        lambda: queue.ack(held.token, ["b"], session=other),
        lambda: queue.ack(held.token, ["b"], step=4, session=other),
        lambda: queue.ack(held.token, [], session=other),
        lambda: queue.commit(9, session=other),
    ]
    for call in calls:
        with pytest.raises(StaleLease):
            call()
    assert progress(queue) == (0, 1, 0, 1)
    assert queue.stats().committed_step == 3
    assert queue.ack(held.token, ["b"], step=4, session=newest).ok == ("b",)


def test_a_trainer_paused_over_a_restore_of_its_successor_settles_nothing_of_it(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    learn(queue, 1, step=1)
    paused = lease(queue, 1)
    session = queue.restore(0)
    with pytest.raises(StaleLease):
        queue.ack(paused.token, ["b"], step=2)
    with pytest.raises(StaleLease):
        queue.commit(2)
    with pytest.raises(StaleLease):
        queue.renew(paused.token, visibility_timeout_s=LONG_S)
    assert queue.nack(paused.token, ["b"], reason="late", retryable=False) == AckResult((), ("b",))
    assert queue.ack(paused.token, ["b"], session=session) == AckResult((), ("b",))
    assert learn(queue, 9, 1, session) == ["a", "b", "c"]
    assert queue.commit(1, session=session) == 3


def test_a_waiting_lease_of_an_older_session_ends(bench: Bench) -> None:
    queue = bench.queue("samples")
    late = threading.Timer(0.05, queue.restore, [0])
    late.start()
    with pytest.raises(StaleLease):
        queue.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=30)
    late.join()


# restore


def test_a_restore_puts_leased_and_later_items_to_the_head_in_put_order(bench: Bench) -> None:
    queue = filled(bench, *"abcdefg")
    first, second, third = lease(queue, 2), lease(queue, 2), lease(queue, 2)
    queue.ack(third.token, ["f"], step=2)
    queue.ack(second.token, ["d", "c"], step=3)
    queue.ack(first.token, ["b"], step=1)
    assert queue.stats().ready == 1
    session = queue.restore(1)
    assert progress(queue) == (6, 0, 0, 1)
    again = lease(queue, session=session)
    assert [(item.id, item.delivery_count) for item in again.items] == [(i, 1) for i in "acdefg"]
    assert queue.stats().redelivered == 0


def test_a_restore_counts_neither_a_delivery_nor_a_crash_and_forgets_none(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    expire(bench, queue, 1)
    learn(queue, 1, step=1)
    learn(queue, 1, step=1)
    lease(queue, 1)
    session = queue.restore(0)
    got = [lease(queue, session=session) for _ in range(2)]
    assert [[(item.id, item.delivery_count) for item in held.items] for held in got] == [
        [("a", 2)],
        [("b", 1), ("c", 1)],
    ]


def test_what_a_checkpoint_learned_before_a_crash_kept_it_from_committing_is_settled(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    learn(queue, 2, step=5)
    learn(queue, 1, step=6)
    session = queue.restore(5)
    assert progress(queue) == (1, 0, 0, 2)
    assert queue.stats().committed_step == 5
    assert learn(queue, 9, 6, session) == ["c"]


def test_an_older_checkpoint_can_be_restored_while_it_is_not_committed(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    for step in (1, 2, 3):
        learn(queue, 1, step)
    queue.commit(1)
    session = queue.restore(2)
    assert learn(queue, 9, 3, session) == ["c", "d"]
    session = queue.restore(2)
    assert learn(queue, 9, 3, session) == ["c", "d"]
    assert queue.commit(3, session=session) == 2
    assert progress(queue) == (0, 0, 0, 4)


def test_a_step_before_the_committed_one_cannot_be_restored(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    learn(queue, 1, step=17)
    queue.commit(17)
    held = lease(queue)
    with pytest.raises(QueueError, match=r"(?s)(?=.*\b17\b)(?=.*\b16\b)"):
        queue.restore(16, seen=["b"])
    assert queue.stats().session == 0
    assert queue.ack(held.token, ["b"], step=18).ok == ("b",)
    queue.restore(17)
    with pytest.raises(QueueError):
        queue.restore(16)


def test_delayed_items_stay_delayed_and_dead_letters_dead_over_a_restore(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    fail(queue, "a")
    queue.nack(lease(queue, 1).token, ["b"], reason="later", delay_s=LONG_S)
    learn(queue, 1, step=1)
    due_ms = nothing(queue).next_ms
    session = queue.restore(0)
    got = lease(queue, session=session)
    assert ids(got) == ["c"]
    assert counts(queue) == (0, 1, 1, 0, 1)
    queue.ack(got.token, ["c"], session=session)
    assert nothing(queue, session).next_ms == due_ms


def test_ids_that_the_checkpoint_has_seen_are_settled_wherever_they_are(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("delayed", "early", "late", "leased", "mate", "dead", "done", "ready", "rest", stored_bytes=1))
    queue.nack(lease(queue, 1).token, ["delayed"], reason="later", delay_s=LONG_S)
    learn(queue, 1, step=1)
    learn(queue, 1, step=9)
    lease(queue, 2)
    fail(queue, "dead")
    queue.ack(lease(queue, 1).token, ["done"])
    seen = ["delayed", "early", "late", "leased", "dead", "done", "ready", "never put", "ready"]
    session = queue.restore(2, seen=seen)
    assert progress(queue) == (2, 0, 0, 6)
    assert dead_ids(queue) == ["dead"]
    assert released_ids(queue) == sorted(["delayed", "early", "late", "leased", "done", "ready"])
    assert ids(lease(queue, session=session)) == ["mate", "rest"]
    assert queue.stats().stored_bytes == 2


def test_a_server_that_lost_its_acks_learns_them_from_the_checkpoint(bench: Bench) -> None:
    names = numbered(2500)
    queue = filled(bench, *names)
    session = queue.restore(3, seen=[*names[:1000:2], *(f"lost{k}" for k in range(1000)), *names[1000:]])
    assert progress(queue) == (500, 0, 0, 2000)
    assert ids(lease(queue, 1000, session=session)) == names[1:1000:2]


def test_a_large_restore_keeps_put_order(bench: Bench) -> None:
    names = numbered(2400)
    queue = filled(bench, *names)
    for step in (3, 1, 2):
        learn(queue, 700, step)
    lease(queue, 200)
    session = queue.restore(1)
    assert progress(queue) == (1700, 0, 0, 700)
    again = ids(lease(queue, 1000, session=session)) + ids(lease(queue, 1000, session=session))
    assert again == names[:700] + names[1400:]


def test_a_restore_of_an_empty_queue_is_fine(bench: Bench) -> None:
    queue = bench.queue("samples")
    session = queue.restore(4, seen=["never put"])
    assert nothing(queue, session).state is DrainState.EMPTY
    assert counts(queue) == (0, 0, 0, 0, 0)
    assert queue.stats().committed_step == 4
