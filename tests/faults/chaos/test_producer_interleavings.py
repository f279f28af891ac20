"""Interleavings of producers that hurt, step by step, with real processes, a real server and a folder of shards."""

import signal
from typing import Any

import pipeline
from eaglefeed.errors import SchemaError
from eaglefeed.queue.base import DrainState, Lease, QueueLimits
from faults.chaos.actors import Actor
from faults.chaos.interleaved import Run, ids_of, learn, state_of
from faults.processes import wait_until

# producers


def test_a_producer_that_dies_between_shard_and_handoff_leaves_an_orphan_and_its_prompt_is_made_once(run: Run) -> None:
    run.feed()
    with run.actor("producer") as doomed:
        assert doomed.hear() == "stored"
        doomed.send(signal.SIGKILL)
    (orphan,) = run.shards()
    assert run.samples.stats().unsettled == 0
    assert run.produce().produced == 1
    assert run.the_sample() != orphan
    assert run.shards() == {orphan, run.the_sample()}
    assert (run.prompts.stats().done, run.samples.stats().ready, run.samples.stats().closed) == (1, 1, True)


def test_two_producers_of_one_prompt_never_share_a_file_and_the_stale_one_takes_its_own_away(run: Run) -> None:
    run.feed()
    with run.actor("producer") as first, run.actor("producer") as second:
        stalled, other = _one_stores_and_stalls(first, second)
        (stale,) = run.shards()
        assert other.hear() == "stored"
        (good,) = run.shards() - {stale}
        stalled.send(signal.SIGCONT)
        stalled.tell()
        wait_until(lambda: run.shards() == {good})
        assert run.samples.stats().unsettled == 0
        other.tell()
        assert other.hear() == {"produced": 1, "stale": 0, "dead": 0}
        assert stalled.hear() == {"produced": 0, "stale": 1, "dead": 0}
    assert run.the_sample() == good
    assert run.shards() == {good}


def _one_stores_and_stalls(first: Actor, second: Actor) -> tuple[Actor, Actor]:
    """Whoever of the two has the prompt stops after its shard; returns it, and the other one."""
    stalled, other = (first, second) if first.heard_before(second) else (second, first)
    assert stalled.hear() == "stored"
    stalled.send(signal.SIGSTOP)
    return stalled, other


def test_a_stalled_producer_that_wakes_after_its_prompt_was_done_changes_nothing(run: Run) -> None:
    run.feed()
    with run.actor("producer") as stalled:
        assert stalled.hear() == "stored"
        stalled.send(signal.SIGSTOP)
        (stale,) = run.shards()
        assert run.produce().produced == 1
        good, before = run.the_sample(), list(run.samples.payloads())
        assert run.shards() == {stale, good}
        stalled.send(signal.SIGCONT)
        stalled.tell()
        assert stalled.hear() == {"produced": 0, "stale": 1, "dead": 0}
    assert run.shards() == {good}
    assert list(run.samples.payloads()) == before
    assert (run.prompts.stats().done, run.prompts.stats().dead) == (1, 0)


# room, and the end


def test_a_full_store_with_tentative_acks_asks_for_a_commit_and_producers_go_on(run: Run) -> None:
    run.samples.configure(QueueLimits(high_count=4, low_count=2))
    run.feed(12)
    session, step, due = run.samples.restore(0), 0, 0
    model: list[str] = []
    with run.actor("free") as producer:
        while True:
            got = run.samples.lease(2, visibility_timeout_s=60, consumer="t", wait_s=10, session=session)
            if isinstance(got, Lease):
                step += 1
                model += run.samples.ack(got.token, ids_of(got), step=step, session=session).ok
                continue
            due += got.state is DrainState.COMMIT_DUE
            run.samples.commit(step, session=session)
            if got.state is DrainState.DRAINED:
                break
        assert producer.hear() == {"produced": 12, "stale": 0, "dead": 0}
    assert due >= 2  # twelve samples, and room for four
    assert model == [f"p-{index}" for index in range(12)]
    assert run.samples.stats().done == 12


def test_a_dead_prompt_requeued_after_the_end_is_made_and_trained_by_others(run: Run) -> None:
    run.feed(2)
    broken = pipeline.EchoTarget()

    def fail_second(ids: Any) -> None:
        if ids[0, 0] == 2:
            raise SchemaError("broken for now")

    broken.before = fail_second
    stats = run.produce(broken)
    assert (stats.produced, stats.dead) == (1, 1)
    session = run.samples.restore(0)
    assert learn(run.samples, 2, step=1, session=session) == ["p-0"]
    run.samples.commit(1, session=session)
    assert state_of(run.samples, session) is DrainState.DRAINED
    assert run.prompts.requeue(["p-1"]) == 1
    assert state_of(run.samples, session) is DrainState.EMPTY
    with run.actor("free") as producer:
        assert producer.hear() == {"produced": 1, "stale": 0, "dead": 0}
    session = run.samples.restore(1, seen=["p-0"])
    assert learn(run.samples, 2, step=2, session=session) == ["p-1"]
    run.samples.commit(2, session=session)
    assert state_of(run.samples, session) is DrainState.DRAINED
    for queue in (run.prompts, run.samples):
        assert (queue.stats().done, queue.stats().dead, queue.stats().unsettled) == (2, 0, 0)
