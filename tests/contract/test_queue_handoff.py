"""What every lease queue promises of hand-offs: a sample comes, its prompt is settled, in one step."""

import pytest

from eaglefeed.errors import ConfigError, IdConflict, InputError, StaleLease
from eaglefeed.queue.base import QueueItem, QueueLimits
from queue_servers import Bench
from queue_steps import counts, expire, ids, items, lease


def test_a_handoff_puts_the_sample_and_settles_the_prompt(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    held = lease(prompts)
    prompts.handoff(held.token, "p", QueueItem("s", b"ref", 7), samples)
    assert counts(prompts) == (0, 0, 0, 1, 0)
    assert samples.stats().stored_bytes == 7
    assert [(i.id, i.payload) for i in lease(samples).items] == [("s", b"ref")]
    with pytest.raises(StaleLease):
        prompts.renew(held.token, visibility_timeout_s=1)


def test_a_repeated_handoff_is_a_success_also_when_the_sample_is_done(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    held = lease(prompts)
    for _ in range(2):
        prompts.handoff(held.token, "p", QueueItem("s", b"ref"), samples)
    samples.ack(lease(samples).token, ["s"])
    prompts.handoff(held.token, "p", QueueItem("s", b"ref"), samples)
    assert counts(samples) == (0, 0, 0, 1, 0)


def test_a_handoff_without_the_prompts_lease_changes_nothing(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    zombie = expire(bench, prompts)
    owner = lease(prompts)
    with pytest.raises(StaleLease):
        prompts.handoff(zombie.token, "p", QueueItem("p", b"zombie's ref"), samples)
    prompts.handoff(owner.token, "p", QueueItem("p", b"owner's ref"), samples)
    with pytest.raises(StaleLease):
        prompts.handoff(zombie.token, "p", QueueItem("p", b"zombie's ref"), samples)
    assert [i.payload for i in lease(samples).items] == [b"owner's ref"]


def test_a_handoff_is_refused_neither_for_room_nor_by_a_closed_queue(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    samples.configure(QueueLimits(max_depth=0, high_count=1, low_count=0))
    samples.close()
    prompts.put(items("p", "q"))
    held = lease(prompts)
    for name in ("p", "q"):
        prompts.handoff(held.token, name, QueueItem(name, b"ref"), samples)
    assert samples.stats().full
    assert not samples.stats().drained


def test_a_sample_of_another_prompt_is_not_replaced(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p", "q"))
    held = lease(prompts)
    prompts.handoff(held.token, "p", QueueItem("s", b"of p"), samples)
    with pytest.raises(IdConflict):
        prompts.handoff(held.token, "q", QueueItem("s", b"of q"), samples)
    assert prompts.ack(held.token, ["q"]).ok == ("q",)


def test_a_stalled_producer_that_wakes_after_another_did_its_prompt_hands_off_nothing(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    stalled = expire(bench, prompts)
    owner = lease(prompts)
    prompts.handoff(owner.token, "p", QueueItem("p", b"owner's ref", 4), samples)
    lease(samples)
    with pytest.raises(StaleLease):
        prompts.handoff(stalled.token, "p", QueueItem("p", b"stalled ref", 9), samples)
    assert counts(samples) == (0, 0, 1, 0, 0)
    assert samples.stats().stored_bytes == 4


def test_a_producer_that_dies_before_its_handoff_leaves_the_prompt_to_another(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    expire(bench, prompts)
    prompts.handoff(lease(prompts).token, "p", QueueItem("p", b"second ref"), samples)
    assert [i.payload for i in lease(samples).items] == [b"second ref"]
    assert counts(prompts) == (0, 0, 0, 1, 0)


def test_a_handoff_of_a_prompt_that_was_given_back_is_refused(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    held = lease(prompts)
    prompts.nack(held.token, ["p"], reason="stop", delay_s=0)
    with pytest.raises(StaleLease):
        prompts.handoff(held.token, "p", QueueItem("p", b"ref"), samples)
    assert counts(samples) == (0, 0, 0, 0, 0)
    assert ids(lease(prompts)) == ["p"]


def test_a_sample_of_another_run_or_that_cannot_be_kept_is_refused(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    held = lease(prompts)
    with pytest.raises(InputError):
        prompts.handoff(held.token, "p", QueueItem("two\nlines", b""), samples)
    with pytest.raises(ConfigError):
        prompts.handoff(held.token, "p", QueueItem("s", b"ref"), samples, holder="producer")
    assert prompts.ack(held.token, ["p"]).ok == ("p",)
