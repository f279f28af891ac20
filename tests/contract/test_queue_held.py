"""What every lease queue promises of prompts that are held while their samples' tensors stay with their producer."""

import pytest

from eaglefeed.errors import ConfigError, StaleLease
from eaglefeed.queue.base import DrainState, QueueLimits
from queue_servers import Bench
from queue_steps import (
    LONG_S,
    SHORT_S,
    counts,
    fail,
    finish,
    hand_off,
    held_and_done,
    held_pair,
    items,
    learn,
    lease,
    nothing,
    ref,
    two_groups,
)


def test_a_held_prompt_is_open_but_neither_leased_nor_waited_for(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    prompts.close()
    assert held_and_done(prompts) == (0, 1, 0)
    assert nothing(prompts).state is DrainState.DRAINED
    assert prompts.stats().drained
    assert prompts.put([]).depth == 1
    assert [item.id for item in prompts.payloads()] == ["a"]
    assert [(item.id, item.payload) for item in lease(samples).items] == [("a", b"a by generation 1")]


def test_a_held_prompt_has_no_deadline(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("a"))
    held = lease(prompts, 1, SHORT_S)
    prompts.handoff(held.token, "a", ref("a"), samples, holder="p1")
    bench.pass_time(SHORT_S * 2)
    assert nothing(prompts).next_ms == 0
    assert held_and_done(prompts) == (0, 1, 0)
    with pytest.raises(StaleLease):
        prompts.renew(held.token, visibility_timeout_s=LONG_S)


def test_a_held_prompt_is_done_with_the_commit_of_its_sample(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b")
    learn(samples, 1, step=1)
    assert held_and_done(prompts) == (0, 2, 0)
    samples.commit(1)
    assert held_and_done(prompts) == (0, 1, 1)
    samples.ack(lease(samples).token, ["a"])
    assert held_and_done(prompts) == (0, 0, 2)
    assert prompts.put([]).depth == 0


def test_a_held_prompt_is_done_when_every_group_has_done_its_sample(bench: Bench) -> None:
    a, b = two_groups(bench)
    prompts = bench.queue("prompts")
    prompts.put(items("x"))
    hand_off((prompts, a), "x")
    finish(a)
    assert held_and_done(prompts) == (0, 1, 0)
    b.restore(1, seen=["x"])
    assert held_and_done(prompts) == (0, 0, 1)


def test_a_dead_sample_keeps_its_prompt_held_until_it_is_requeued_and_done(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    fail(samples, "a")
    assert held_and_done(prompts) == (0, 1, 0)
    samples.requeue(["a"])
    finish(samples)
    assert held_and_done(prompts) == (0, 0, 1)


def test_prompts_are_held_for_samples_until_no_group_has_to_do_them(bench: Bench) -> None:
    a, b = two_groups(bench)
    prompts = bench.queue("prompts")
    prompts.put(items("x", "y", "plain"))
    assert prompts.held_for(a) == 0
    hand_off((prompts, a), "x", "y")
    hand_off((prompts, a), "plain", holder="")
    assert prompts.held_for(a) == prompts.held_for(b) == 2
    assert finish(a, 1) == ["y"]
    learn(a, 1, step=1)
    fail(b, "y", "x")
    assert prompts.held_for(a) == 1
    a.commit(1)
    assert (prompts.held_for(a), prompts.stats().held) == (0, 2)
    b.requeue(["x"])
    assert prompts.held_for(a) == 1


def test_prompts_of_the_dead_are_held_for_nobody_once_they_are_recalled(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b")
    assert prompts.held_for(samples) == 2
    prompts.recall(samples)
    assert prompts.held_for(samples) == 0
    hand_off((prompts, samples), "a", holder="p2", generation=2)
    assert prompts.held_for(samples) == 1
    assert [prompts.held_for(samples, producer=name) for name in ("p1", "p2")] == [0, 1]


def test_held_prompts_make_room_when_their_samples_are_done(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a", "b")
    prompts.configure(QueueLimits(high_count=2, low_count=0))
    assert not prompts.has_room()
    finish(samples)
    assert prompts.has_room()


def test_a_held_prompts_sample_has_its_id(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("a"))
    token = lease(prompts).token
    with pytest.raises(ConfigError):
        prompts.handoff(token, "a", ref("other"), samples, holder="p1")
    assert counts(samples) == (0, 0, 0, 0, 0)
    prompts.handoff(token, "a", ref("a"), samples, holder="p1")


def test_a_repeated_handoff_with_a_holder_is_a_success(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("a"))
    token = lease(prompts).token
    for _ in range(2):
        prompts.handoff(token, "a", ref("a"), samples, holder="p1")
    assert held_and_done(prompts) == (0, 1, 0)
    assert counts(samples) == (1, 0, 0, 0, 0)


def test_a_prompt_is_not_held_for_a_sample_that_is_done_already(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    samples.put([ref("a")])
    finish(samples)
    prompts.put(items("a"))
    prompts.handoff(lease(prompts).token, "a", ref("a"), samples, holder="p1")
    assert held_and_done(prompts) == (0, 0, 1)
