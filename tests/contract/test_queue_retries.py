"""What every lease queue promises of items that fail: crashes, nacks, dead letters; and of its listings."""

import pytest

from eaglefeed.queue.base import DrainState, LeaseQueue, NoLease, QueueLimits
from queue_servers import Bench
from queue_steps import LONG_S, counts, dead_ids, expire, fail, filled, finish, ids, items, lease, nothing, numbered

# crashes


def test_items_whose_lease_ran_out_are_leased_alone_from_then_on(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    expire(bench, queue, 2)
    assert [ids(lease(queue)) for _ in range(3)] == [["a"], ["b"], ["c", "d"]]


def test_a_batch_stops_before_an_item_with_a_crash_behind_it(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    held = lease(queue, 1)
    expire(bench, queue, 1)
    assert nothing_ready_but(queue, "b")
    queue.nack(held.token, ["a"], reason="return", delay_s=0)
    assert [ids(lease(queue)) for _ in range(3)] == [["a"], ["b"], ["c"]]


def nothing_ready_but(queue: LeaseQueue, suspect: str) -> bool:
    """Reclaim by a lease, then give the item back to the head."""
    got = lease(queue, 1)
    queue.nack(got.token, [suspect], reason="return", delay_s=0)
    return ids(got) == [suspect]


def test_only_lone_crashes_kill_and_lease_mates_survive_a_poison_item(bench: Bench) -> None:
    queue = filled(bench, "mate", "poison")
    queue.configure(QueueLimits(max_deliveries=2))
    expire(bench, queue)
    queue.ack(lease(queue).token, ["mate"])
    assert ids(expire(bench, queue)) == ["poison"]
    assert ids(expire(bench, queue)) == ["poison"]
    assert nothing(queue) == NoLease(DrainState.EMPTY, 0)
    (dead,) = queue.dead_letters()
    assert (dead.id, dead.delivery_count, dead.payload) == ("poison", 3, b"payload of poison\n\xff")
    assert dead.reason == "its lease ran out 2 times while it was leased alone"
    assert counts(queue) == (0, 0, 0, 1, 1)


def test_a_crashed_items_dead_letter_tells_its_last_error(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.configure(QueueLimits(max_deliveries=1))
    queue.nack(lease(queue).token, ["a"], reason="out of memory", delay_s=0.001)
    bench.pass_time(0.01)
    expire(bench, queue)
    nothing(queue)
    (dead,) = queue.dead_letters()
    assert dead.reason.endswith("; last error: out of memory")


# nack


def test_a_graceful_return_goes_to_the_head_in_order_and_counts_nothing(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    held = lease(queue, 3)
    assert queue.nack(held.token, ["b", "c"], reason="stop", delay_s=0).ok == ("b", "c")
    again = lease(queue)
    assert [(i.id, i.delivery_count) for i in again.items] == [("b", 1), ("c", 1), ("d", 1)]
    assert queue.stats().redelivered == 0


def test_a_delayed_item_is_leased_when_its_time_has_come_and_not_before(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.nack(lease(queue).token, ["a"], reason="later", delay_s=0.1)
    assert nothing(queue).next_ms > 0
    assert counts(queue) == (0, 1, 0, 0, 0)
    bench.pass_time(0.2)
    assert [(i.id, i.delivery_count) for i in lease(queue).items] == [("a", 2)]


def test_a_failure_that_is_not_the_items_delays_it_and_counts_no_delivery(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.nack(lease(queue).token, ["a"], reason="busy", delay_s=0.001)
    for _ in range(3):
        bench.pass_time(0.15)
        held = lease(queue)
        assert queue.nack(held.token, ["a"], reason="holder gone", delay_s=0.1, counted=False).ok == ("a",)
        assert nothing(queue).next_ms > 0
        assert counts(queue) == (0, 1, 0, 0, 0)
    bench.pass_time(0.15)
    assert [(i.id, i.delivery_count) for i in lease(queue).items] == [("a", 2)]


def test_an_uncounted_failure_is_told_of_by_a_later_dead_letter(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.configure(QueueLimits(max_deliveries=1))
    queue.nack(lease(queue).token, ["a"], reason="holder gone", delay_s=0.001, counted=False)
    bench.pass_time(0.01)
    expire(bench, queue)
    nothing(queue)
    (dead,) = queue.dead_letters()
    assert (dead.delivery_count, dead.reason.rpartition("; ")[2]) == (1, "last error: holder gone")


def test_an_uncounted_failure_waits_as_long_as_a_counted_one_and_may_be_the_last(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    queue.configure(QueueLimits(backoff_base_s=10))
    held = lease(queue)
    leased_ms = held.deadline_ms - LONG_S * 1000
    queue.nack(held.token, ["a"], reason="busy", counted=False)
    queue.nack(held.token, ["b"], reason="bad", retryable=False, counted=False)
    assert 7_500 <= nothing(queue).next_ms - leased_ms <= 9_500
    assert [letter.delivery_count for letter in queue.dead_letters()] == [0]


def test_the_backoff_doubles_with_each_delivery_up_to_its_bound(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs minutes")
    queue = filled(bench, "a")
    queue.configure(QueueLimits(backoff_base_s=10, backoff_max_s=30))
    for wanted_ms in (7_500, 15_000, 22_500, 22_500):
        held = lease(queue)
        leased_ms = held.deadline_ms - LONG_S * 1000
        queue.nack(held.token, ["a"], reason="busy")
        assert wanted_ms <= nothing(queue).next_ms - leased_ms <= wanted_ms + 2_000
        bench.pass_time(30)


def test_an_item_that_cannot_succeed_is_a_dead_letter_at_once(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    held = lease(queue)
    queue.nack(held.token, ["a"], reason="corrupt: ünïcode", retryable=False)
    (dead,) = queue.dead_letters()
    assert dead == ("a", "corrupt: ünïcode", 1, b"payload of a\n\xff")
    assert counts(queue) == (0, 0, 1, 0, 1)


def test_a_long_reason_is_cut(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.nack(lease(queue).token, ["a"], reason="x" * 10_000, retryable=False)
    (dead,) = queue.dead_letters()
    assert dead.reason == "x" * 499 + "…"


# dead letters and listings


def test_requeued_dead_letters_start_anew_also_in_a_closed_queue(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    expire(bench, queue, 1)
    queue.nack(lease(queue).token, ["a"], reason="bad", retryable=False)
    queue.close()
    assert queue.requeue(["a", "a", "b", "never"]) == 1
    assert [(i.id, i.delivery_count) for i in lease(queue).items] == [("b", 1), ("a", 1)]
    assert list(queue.dead_letters()) == []


def test_every_dead_letter_is_listed_once(bench: Bench) -> None:
    names = numbered(700)
    queue = filled(bench, *names)
    queue.nack(lease(queue, 700).token, names, reason="bad", retryable=False)
    assert sorted(dead.id for dead in queue.dead_letters()) == names


def test_payloads_are_those_of_all_unsettled_items_in_put_order(bench: Bench) -> None:
    names = numbered(450)
    queue = filled(bench, *names)
    held = lease(queue, 4)
    queue.ack(held.token, names[:1])
    queue.nack(held.token, names[1:2], reason="bad", retryable=False)
    queue.nack(held.token, names[2:3], reason="later", delay_s=LONG_S)
    found = list(queue.payloads())
    assert [item.id for item in found] == names[2:]
    assert [item.delivery_count for item in found] == [1, 0] + [0] * 446
    assert found[0].payload == b"payload of i00002\n\xff"


def test_a_purged_queue_knows_nothing_any_more(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    held = lease(queue, 2)
    queue.ack(held.token, ["a"])
    assert queue.purge() == 2
    assert counts(queue) == (0, 0, 0, 0, 0)
    assert queue.put(items("a")) == (1, 0, 1)
    assert lease(queue).token > held.token
    assert queue.ack(held.token, ["a", "b"]).stale == ("a", "b")


def test_requeued_items_go_to_the_tail_in_the_order_given(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    fail(queue, "a", "b", "c")
    assert queue.requeue(["c", "a"]) == 2
    assert ids(lease(queue)) == ["d", "c", "a"]
    assert dead_ids(queue) == ["b"]


def test_a_requeued_items_crashes_are_forgotten(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    queue.configure(QueueLimits(max_deliveries=1))
    expire(bench, queue, 1)
    assert ids(lease(queue)) == ["b"]
    assert dead_ids(queue) == ["a"]
    queue.put(items("c"))
    queue.requeue(["a"])
    assert ids(lease(queue)) == ["c", "a"]


def test_a_requeued_item_has_a_new_place_in_put_order(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    fail(queue, "a")
    queue.requeue(["a"])
    assert [(item.id, item.delivery_count) for item in queue.payloads()] == [("b", 0), ("c", 0), ("a", 0)]


def test_a_dead_letter_counts_the_deliveries_that_failed(bench: Bench) -> None:
    queue = filled(bench, "a")
    for _ in range(2):
        queue.nack(lease(queue).token, ["a"], reason="stop", delay_s=0)
    queue.nack(lease(queue).token, ["a"], reason="busy", delay_s=0.001)
    bench.pass_time(0.01)
    expire(bench, queue)
    fail(queue, "a")
    assert [dead.delivery_count for dead in queue.dead_letters()] == [3]


def test_a_dead_prompt_that_is_requeued_reopens_its_samples(bench: Bench) -> None:
    prompts, samples, other = bench.queue("prompts.e1"), bench.queue("samples.e1"), bench.queue("samples")
    prompts.put(items("p", "q"))
    for queue in (prompts, samples, other):
        queue.close()
    assert nothing(samples).state is DrainState.DRAINED
    fail(prompts, "p")
    finish(prompts)
    assert prompts.requeue(["q"]) == 0
    assert samples.stats().closed
    assert prompts.requeue(["p"]) == 1
    assert nothing(samples).state is DrainState.EMPTY
    assert (prompts.stats().closed, samples.stats().closed, other.stats().closed) == (True, False, True)


def test_a_requeued_sample_leaves_its_queue_closed(bench: Bench) -> None:
    samples = filled(bench, "a")
    samples.close()
    fail(samples, "a")
    assert samples.requeue(["a"]) == 1
    assert samples.stats().closed
    assert not samples.stats().drained
