"""What every lease queue promises of groups, released items, epochs and purges."""

import pytest

from eaglefeed.errors import ConfigError, StaleLease
from eaglefeed.queue.base import DrainState, QueueItem, QueueLimits
from queue_servers import Bench
from queue_steps import (
    counts,
    dead_ids,
    expire,
    fail,
    finish,
    ids,
    items,
    learn,
    lease,
    nothing,
    numbered,
    released_ids,
    two_groups,
)

# groups


def test_one_put_feeds_every_group_in_put_order(bench: Bench) -> None:
    a, b = two_groups(bench)
    assert a.put(items("y", "x", "z")) == (3, 0, 3)
    for queue in (a, b):
        assert [(i.id, i.payload, i.delivery_count) for i in lease(queue).items] == [
            (name, f"payload of {name}\n\xff".encode("latin-1"), 1) for name in "yxz"
        ]


def test_what_a_group_does_leaves_the_other_alone(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("done", "dead", "tentative", "leased"))
    finish(a, 1)
    fail(a, "dead")
    learn(a, 1, step=1)
    held = lease(a)
    assert counts(b) == (4, 0, 0, 0, 0)
    assert b.ack(held.token, ["leased"]).stale == ("leased",)
    assert list(b.dead_letters()) == []
    assert b.requeue(["dead"]) == 0
    assert b.commit(1) == 0
    assert a.ack(held.token, ["leased"]).ok == ("leased",)
    assert (a.stats().group, b.stats().group) == ("a", "b")


def test_sessions_and_restores_are_a_groups_own(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x"))
    learn(a, 1, step=1)
    learn(b, 1, step=1)
    session = a.restore(0)
    assert counts(a) == (1, 0, 0, 0, 0)
    assert b.commit(1) == 1
    with pytest.raises(StaleLease):
        a.commit(1)
    assert ids(lease(a, session=session)) == ["x"]
    assert (a.stats().committed_step, b.stats().committed_step) == (0, 1)


def test_an_expired_lease_of_a_group_is_redelivered_to_that_group_alone(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x"))
    expire(bench, a)
    assert [i.delivery_count for i in lease(b).items] == [1]
    assert [i.delivery_count for i in lease(a).items] == [2]
    assert [i.delivery_count for i in a.payloads()] == [1]
    assert [i.delivery_count for i in b.payloads()] == [0]


def test_a_sample_is_released_only_when_every_group_has_done_it(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x", stored_bytes=7))
    finish(a)
    assert (a.stats().done, a.stats().released, a.stats().stored_bytes) == (1, 0, 7)
    assert a.put([]).depth == 1
    learn(b, 1, step=1)
    assert b.released() == []
    b.commit(1)
    assert (b.stats().done, b.stats().released, b.stats().stored_bytes) == (1, 1, 0)
    assert a.put([]).depth == 0
    assert a.released() == [QueueItem("x", b"payload of x\n\xff", 7)]


def test_a_sample_that_is_dead_to_one_group_and_done_by_the_other_takes_no_room_and_keeps_its_shard(
    bench: Bench,
) -> None:
    a, b = two_groups(bench)
    a.put(items("x", stored_bytes=7))
    finish(a)
    fail(b, "x")
    assert (b.stats().stored_bytes, b.stats().released, b.put([]).depth) == (0, 0, 0)
    assert [dead.payload for dead in b.dead_letters()] == [b"payload of x\n\xff"]
    assert list(a.payloads()) == []


@pytest.mark.parametrize("done_first", [True, False])
def test_a_dead_letter_that_is_requeued_and_done_is_released(bench: Bench, done_first: bool) -> None:
    a, b = two_groups(bench)
    a.put(items("x", "y", stored_bytes=7))
    if done_first:
        finish(a, 1)
    fail(b, "x")
    assert b.requeue(["x"]) == 1
    assert (b.stats().stored_bytes, b.put([]).depth) == (14, 2)
    # A place of its own is lost only by what no group worked on any more.
    assert [item.id for item in b.payloads()] == (["y", "x"] if done_first else ["x", "y"])
    if not done_first:
        finish(a, 1)
    assert finish(b) == ["y", "x"]
    assert released_ids(b) == ["x"]


def test_a_sample_that_is_dead_to_both_groups_is_kept_until_both_have_done_it(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x", stored_bytes=7))
    fail(a, "x")
    assert a.stats().stored_bytes == 7
    fail(b, "x")
    assert a.stats().stored_bytes == 0
    a.requeue(["x"])
    finish(a)
    assert (a.stats().stored_bytes, a.released(), dead_ids(b)) == (0, [], ["x"])
    b.requeue(["x"])
    finish(b)
    assert (released_ids(a), dead_ids(a), dead_ids(b)) == (["x"], [], [])


def test_a_closed_queue_is_drained_for_each_group_by_itself(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x"))
    a.close()
    finish(a)
    assert nothing(a).state is DrainState.DRAINED
    assert ids(lease(b)) == ["x"]
    assert nothing(b).state is DrainState.EMPTY
    assert (a.stats().drained, b.stats().drained) == (True, False)


def test_a_handoff_feeds_every_group(bench: Bench) -> None:
    a, b = two_groups(bench)
    prompts = bench.queue("prompts")
    prompts.put(items("p"))
    prompts.handoff(lease(prompts).token, "p", QueueItem("s", b"ref", 3), a)
    assert [ids(lease(queue)) for queue in (a, b)] == [["s"], ["s"]]


def test_groups_are_declared_once_and_may_be_said_again(bench: Bench) -> None:
    a, _ = two_groups(bench)
    limits = QueueLimits(high_count=7, low_count=2, backoff_base_s=0.25)
    a.configure(limits, groups=["b", "a"])
    a.configure(limits)
    for others in (["a"], ["a", "b", "c"], ["main"]):
        with pytest.raises(ConfigError):
            a.configure(QueueLimits(high_count=1), groups=others)
    assert a.limits() == limits


def test_a_queue_whose_items_came_before_its_groups_has_the_main_group_alone(bench: Bench) -> None:
    queue = bench.queue("samples")
    assert queue.limits() == QueueLimits()
    queue.put(items("x"))
    for others in (["other"], ["main", "other"]):
        with pytest.raises(ConfigError):
            queue.configure(QueueLimits(), groups=others)
    queue.configure(QueueLimits(max_depth=9), groups=["main"])
    assert queue.limits().max_depth == 9
    assert finish(queue) == ["x"]


def test_a_group_that_was_not_declared_leases_nothing(bench: Bench) -> None:
    a, _ = two_groups(bench)
    a.put(items("x"))
    for group in ("c", "main"):
        with pytest.raises(ConfigError):
            lease(bench.queue("samples", group))
    with pytest.raises(ConfigError):
        lease(bench.queue("prompts", "a"))
    with pytest.raises(ConfigError):
        bench.queue("samples", "no{group")


# released


def test_a_released_sample_stays_listed_until_it_is_forgotten(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("a", "b", "open", "dead", stored_bytes=2))
    finish(queue, 2)
    lease(queue, 1)
    fail(queue, "dead")
    for _ in range(2):
        assert sorted(queue.released()) == items("a", "b", stored_bytes=2)
    for _ in range(2):
        queue.forget(["a", "open", "dead", "never put"])
        assert released_ids(queue) == ["b"]
    assert queue.stats().released == 1
    assert counts(queue) == (0, 0, 1, 2, 1)
    assert sorted(item.id for item in queue.payloads()) == ["open"]
    assert queue.put(items("a", "b")) == (0, 2, 1)


def test_what_stores_nothing_is_never_listed_as_released(bench: Bench) -> None:
    queue = bench.queue("prompts")
    queue.put(items("p"))
    finish(queue)
    assert (queue.released(), queue.stats().released) == ([], 0)


def test_released_samples_come_in_bounded_steps(bench: Bench) -> None:
    queue = bench.queue("samples")
    names = numbered(1200)
    queue.put(items(*names, stored_bytes=1))
    for n in (1000, 200):
        learn(queue, n, step=1)
    queue.commit(1)
    assert len(queue.released(3)) == 3
    seen: list[str] = []
    while found := queue.released():
        assert len(found) <= 1000
        seen += [item.id for item in found]
        queue.forget([item.id for item in found])
    assert sorted(seen) == names


# epochs


def test_epochs_are_queues_of_their_own_with_the_same_ids(bench: Bench) -> None:
    first, second, prompts = bench.queue("samples"), bench.queue("samples.e1"), bench.queue("prompts.e1")
    first.put(items("p"))
    prompts.put(items("p"))
    prompts.handoff(lease(prompts).token, "p", QueueItem("p", b"another ref", 1), second)
    assert [i.payload for i in lease(second).items] == [b"another ref"]
    assert [i.payload for i in lease(first).items] == [b"payload of p\n\xff"]
    first.close()
    assert (first.stats().closed, second.stats().closed) == (True, False)
    assert second.restore(0) == second.stats().session
    assert first.stats().session == 0
    first.purge()
    assert ids(lease(second, session=second.stats().session)) == ["p"]


# purge


def test_a_purge_keeps_groups_sessions_and_tokens_and_nothing_else(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.configure(QueueLimits(high_count=4, low_count=0))
    a.put(items("dead", "released", "tentative", "leased", "delayed", "ready", stored_bytes=5))
    fail(b, "dead")
    finish(b, 1)
    session = a.restore(3)
    for queue, of in ((a, session), (b, 0)):
        learn(queue, 2, 4, of)
    held = lease(a, 1, session=session)
    a.nack(held.token, ids(held), reason="later", delay_s=60)
    a.close()
    assert b.purge() == 6
    for queue in (a, b):
        s = queue.stats()
        assert (s.unsettled, s.done, s.dead, s.released, s.stored_bytes, s.redelivered) == (0, 0, 0, 0, 0, 0)
        assert (s.closed, s.full, s.committed_step) == (False, False, 0)
    assert (a.stats().session, b.stats().session) == (session, 0)
    assert a.limits() == QueueLimits()
    a.put(items("dead"))
    assert lease(a, session=session).token > held.token
    assert ids(lease(b)) == ["dead"]


def test_a_purge_counts_what_was_not_released(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("released", "dead", "tentative", "leased", "ready", stored_bytes=1))
    finish(queue, 1)
    fail(queue, "dead")
    learn(queue, 1, step=1)
    lease(queue, 1)
    assert queue.purge() == 4
    assert queue.purge() == 0
