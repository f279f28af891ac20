"""What every lease queue promises when a producer dies that holds tensors: its prompts are made again by another."""

from collections.abc import Callable

import pytest

from eaglefeed.errors import IdConflict, StaleLease
from eaglefeed.queue.base import DrainState, Lease, LeaseQueue, QueueLimits
from queue_servers import Bench
from queue_steps import (
    SHORT_S,
    dead_ids,
    fail,
    finish,
    hand_off,
    held_and_done,
    held_pair,
    ids,
    items,
    lease,
    nothing,
    ref,
    released_ids,
    two_groups,
)

# recall


def test_a_living_producers_prompts_are_not_recalled(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b")
    prompts.put(items("c"))
    hand_off((prompts, samples), "c", holder="p2")
    prompts.beat("producer", "p1")
    samples.beat("trainer", "p2")
    assert prompts.recall(samples) == 1
    assert held_and_done(prompts) == (1, 2, 0)
    assert prompts.recall(samples) == 0
    samples.farewell("producer", "p1")
    assert prompts.recall(samples) == 2


def test_a_producer_that_has_been_silent_too_long_loses_its_prompts(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs half a minute")
    prompts, samples = held_pair(bench, "a")
    prompts.beat("producer", "p1")
    bench.pass_time(29)
    assert prompts.recall(samples) == 0
    bench.pass_time(2)
    assert prompts.recall(samples) == 1


def test_recalled_prompts_go_to_the_head_in_put_order_and_count_no_delivery(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b", "c")
    prompts.put(items("d"))
    assert prompts.recall(samples) == 3
    assert [(item.id, item.delivery_count) for item in lease(prompts).items] == [(name, 1) for name in "abcd"]
    assert prompts.stats().redelivered == 0


def test_samples_that_wait_are_parked_when_their_producer_dies(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b", "c", "d")
    samples.nack(lease(samples, 1).token, ["d"], reason="later", delay_s=SHORT_S)
    leased = lease(samples, 1)
    prompts.recall(samples)
    s = samples.stats()
    assert (s.ready, s.delayed, s.leased, s.parked, s.stored_bytes) == (0, 0, 1, 3, 40)
    bench.pass_time(SHORT_S * 2)
    assert nothing(samples).state is DrainState.EMPTY
    assert [item.id for item in samples.payloads()] == ["d", "c", "b", "a"]
    assert samples.ack(leased.token, ["c"]).ok == ("c",)


def test_a_recall_reopens_the_samples_and_a_recall_of_nothing_does_not(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    prompts.beat("producer", "p1")
    for queue in (prompts, samples):
        queue.close()
    prompts.recall(samples)
    assert samples.stats().closed
    prompts.farewell("producer", "p1")
    prompts.recall(samples)
    assert (prompts.stats().closed, samples.stats().closed) == (True, False)
    assert nothing(samples).state is DrainState.EMPTY
    assert ids(lease(prompts)) == ["a"]


def to_the_head(bench: Bench, samples: LeaseQueue, held: Lease) -> None:
    samples.nack(held.token, ids(held), reason="stop", delay_s=0)


def delayed(bench: Bench, samples: LeaseQueue, held: Lease) -> None:
    samples.nack(held.token, ids(held), reason="peer gone")


def reclaimed(bench: Bench, samples: LeaseQueue, held: Lease) -> None:
    samples.renew(held.token, visibility_timeout_s=0)
    bench.pass_time(0.002)
    nothing(samples)


def restored(bench: Bench, samples: LeaseQueue, held: Lease) -> None:
    samples.restore(0)


def restored_tentative(bench: Bench, samples: LeaseQueue, held: Lease) -> None:
    samples.ack(held.token, ids(held), step=2)
    samples.restore(1)


def requeued(bench: Bench, samples: LeaseQueue, held: Lease) -> None:
    samples.nack(held.token, ids(held), reason="bad", retryable=False)
    assert samples.requeue(ids(held)) == 1


@pytest.mark.parametrize("back", [to_the_head, delayed, reclaimed, restored, restored_tentative, requeued])
def test_a_recalled_sample_that_comes_back_is_parked(
    bench: Bench, back: Callable[[Bench, LeaseQueue, Lease], None]
) -> None:
    prompts, samples = held_pair(bench, "a")
    held = lease(samples)
    prompts.recall(samples)
    assert (samples.stats().parked, samples.stats().leased) == (0, 1)
    back(bench, samples, held)
    s = samples.stats()
    assert (s.ready, s.delayed, s.leased, s.tentative, s.parked, s.dead) == (0, 0, 0, 0, 1, 0)
    hand_off((prompts, samples), "a", holder="p2", generation=2)
    assert [item.payload for item in lease(samples, session=s.session).items] == [b"a by generation 2"]


def test_a_recalled_sample_that_crashed_too_often_is_a_dead_letter(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    samples.configure(QueueLimits(max_deliveries=1))
    held = lease(samples)
    prompts.recall(samples)
    reclaimed(bench, samples, held)
    assert (samples.stats().parked, dead_ids(samples)) == (0, ["a"])


# the next producer


def test_the_next_handoff_gives_a_parked_sample_its_new_payload_at_the_tail(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b")
    prompts.recall(samples)
    samples.put([ref("other")])
    hand_off((prompts, samples), "a", holder="p2", generation=2, stored_bytes=25)
    assert (samples.stats().parked, samples.stats().stored_bytes) == (1, 45)
    assert [(item.id, item.payload) for item in lease(samples).items] == [
        ("other", b"other by generation 1"),
        ("a", b"a by generation 2"),
    ]
    assert held_and_done(prompts) == (1, 1, 0)
    assert samples.put([ref("a", 2)]).duplicate == 1
    with pytest.raises(IdConflict):
        samples.put([ref("a", 1)])


def test_the_next_handoff_reaches_the_groups_that_have_not_done_the_sample(bench: Bench) -> None:
    a, b = two_groups(bench)
    prompts = bench.queue("prompts")
    prompts.put(items("x"))
    hand_off((prompts, a), "x")
    finish(a)
    prompts.recall(a)
    assert (a.stats().parked, b.stats().parked) == (0, 1)
    hand_off((prompts, a), "x", holder="p2", generation=2)
    assert nothing(a).state is DrainState.EMPTY
    assert finish(b) == ["x"]
    assert (released_ids(a), held_and_done(prompts)) == (["x"], (0, 0, 1))


def test_a_sample_that_was_done_before_the_next_handoff_stays_as_it_is(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b")
    leased = lease(samples, 1)
    prompts.recall(samples)
    samples.ack(leased.token, ["b"])
    session = samples.restore(1, seen=["a"])
    hand_off((prompts, samples), "a", "b", holder="p2", generation=2, stored_bytes=99)
    assert held_and_done(prompts) == (0, 0, 2)
    assert sorted(samples.released()) == [ref("a"), ref("b")]
    assert nothing(samples, session).state is DrainState.EMPTY
    assert samples.stats().stored_bytes == 0


def test_a_leased_sample_whose_next_generation_came_returns_with_it(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    leased = lease(samples)
    prompts.recall(samples)
    hand_off((prompts, samples), "a", holder="p2", generation=2)
    assert samples.stats().leased == 1
    samples.nack(leased.token, ["a"], reason="peer gone", delay_s=0)
    assert [item.payload for item in lease(samples).items] == [b"a by generation 2"]


def test_a_dead_sample_whose_next_generation_came_is_requeued_with_it(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    fail(samples, "a")
    prompts.recall(samples)
    hand_off((prompts, samples), "a", holder="p2", generation=2, stored_bytes=33)
    assert samples.stats().stored_bytes == 0
    samples.requeue(["a"])
    assert samples.stats().stored_bytes == 33
    assert [item.payload for item in lease(samples).items] == [b"a by generation 2"]
    assert held_and_done(prompts) == (0, 1, 0)


def test_the_first_producer_cannot_hand_off_again_once_it_was_recalled(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("a"))
    first = lease(prompts)
    prompts.handoff(first.token, "a", ref("a"), samples, holder="p1")
    prompts.recall(samples)
    with pytest.raises(StaleLease):
        prompts.handoff(first.token, "a", ref("a", 2), samples, holder="p1")
    assert samples.stats().parked == 1
    hand_off((prompts, samples), "a", holder="p2", generation=2)
    with pytest.raises(StaleLease):
        prompts.handoff(first.token, "a", ref("a"), samples, holder="p1")
    assert [item.payload for item in lease(samples).items] == [b"a by generation 2"]


def test_a_recalled_prompt_may_be_settled_by_a_producer_that_stores_its_tensors(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    prompts.recall(samples)
    hand_off((prompts, samples), "a", holder="", generation=2)
    assert held_and_done(prompts) == (0, 0, 1)
    assert [item.payload for item in lease(samples).items] == [b"a by generation 2"]
