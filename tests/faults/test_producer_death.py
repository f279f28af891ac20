"""Producers that die or stall between any two lines: one sample a prompt, and no shard of another is touched."""

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

import pipeline
from eaglefeed.errors import StaleLease
from eaglefeed.producer import worker as worker_module
from eaglefeed.producer.accounts import Accounts
from eaglefeed.producer.making import SampleMaker
from eaglefeed.producer.worker import ProducerStats
from eaglefeed.producer.writing import SampleWriter, Writing
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from eaglefeed.schema.refs import SampleRef, decode_ref

THREE = tuple(pipeline.prompt(index) for index in range(3))


def _take_over(run: pipeline.Run) -> ProducerStats:
    """The leases of whoever stalled or died have run out; another producer does the rest."""
    run.clock.advance(61)
    return run.produce(name="other")


def _shards(run: pipeline.Run) -> list[str]:
    return sorted(shard.key.split("/")[1] for shard in run.store.scan())


def test_a_producer_that_dies_between_its_shard_and_its_hand_off_leaves_an_orphan_and_no_sample() -> None:
    run = pipeline.Run()
    run.feed(THREE[0])

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run.prompts.handoff, handoff = die, run.prompts.handoff  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        run.worker(name="dies").run(threading.Event())
    run.prompts.handoff = handoff  # type: ignore[method-assign]
    (orphan,) = _shards(run)
    assert run.samples.stats().unsettled == 0
    assert _take_over(run).produced == 1
    (item,) = run.samples.payloads()
    key = next(iter(decode_ref(item.payload).feature_keys.values()))
    assert key.split("/")[1] != orphan
    assert sorted([key.split("/")[1], orphan]) == _shards(run)
    assert (run.prompts.stats().done, run.prompts.stats().dead) == (1, 0)


def test_a_stalled_producer_that_wakes_after_its_prompt_was_done_takes_only_its_own_shard_back() -> None:
    run = pipeline.Run()
    run.feed(THREE[0])
    plain, others = run.store.put, list[str]()

    def stall(ref: SampleRef, tensors: dict[str, torch.Tensor]) -> SampleRef:
        run.store.put = plain  # type: ignore[method-assign]
        written = plain(ref, tensors)  # then it sleeps beyond its lease
        assert _take_over(run).produced == 1
        others.extend(set(_shards(run)) - {next(iter(ref.feature_keys.values())).split("/")[1]})
        return written

    run.store.put = stall  # type: ignore[method-assign,assignment]
    stats = run.worker(name="stalls").run(threading.Event())
    assert (stats.produced, stats.stale) == (0, 1)
    assert _shards(run) == others
    assert len(others) == 1
    assert run.samples.stats().ready == 1


def test_two_producers_of_one_prompt_make_one_sample_of_the_lease_that_holds() -> None:
    run = pipeline.Run()
    run.feed(THREE[0])
    first = run.prompts.lease(1, visibility_timeout_s=60, consumer="slow")
    assert isinstance(first, Lease)
    assert _take_over(run).produced == 1
    with pytest.raises(StaleLease):
        run.prompts.handoff(first.token, "p-0", QueueItem("p-0", b"of the slow one"), run.samples)
    (item,) = run.samples.payloads()
    assert decode_ref(item.payload).sample_id == "p-0"


def _hold(run: pipeline.Run, producer: str) -> None:
    """A producer hands off p-0 to p-2, and keeps their tensors."""
    run.prompts.beat("producer", producer)
    lease = run.prompts.lease(3, visibility_timeout_s=60, consumer=producer)
    assert isinstance(lease, Lease)
    for item in lease.items:
        run.prompts.handoff(lease.token, item.id, QueueItem(item.id, b"held"), run.samples, holder=producer)


def test_prompts_that_a_dead_producer_held_are_produced_again() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    _hold(run, "dead")
    assert (run.prompts.stats().held, run.samples.stats().ready) == (3, 3)
    run.clock.advance(31)
    assert run.produce().produced == 3
    assert (run.prompts.stats().held, run.prompts.stats().done) == (0, 3)
    assert [decode_ref(item.payload).sample_id for item in run.samples.payloads()] == ["p-0", "p-1", "p-2"]
    assert (run.samples.stats().ready, run.samples.stats().closed) == (3, True)


def test_a_living_producers_prompts_are_left_to_it() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    _hold(run, "living")
    run.clock.advance(20)
    assert run.produce().produced == 0
    assert (run.prompts.stats().held, run.samples.stats().ready) == (3, 3)


def test_a_waiting_producer_looks_for_prompts_of_dead_ones_now_and_then() -> None:
    run = pipeline.Run()
    run.feed(*THREE, close=False)
    _hold(run, "dead")
    calls: list[float] = []
    plain = run.prompts.recall

    def recall(samples: LeaseQueue) -> int:
        calls.append(run.clock.monotonic())
        if len(calls) == 5:
            run.prompts.close()
        return plain(samples)

    run.prompts.recall = recall  # type: ignore[method-assign]
    assert run.produce().produced == 3
    waits_s = [later - sooner for sooner, later in pairwise(calls[:5])]
    assert all(10 <= wait_s < 12 for wait_s in waits_s), waits_s


class KilledError(BaseException):
    """Nobody catches it."""


def _kill_at(patch: pytest.MonkeyPatch, owner: object, name: str, number: int, *, after: bool) -> None:
    """From call `number` of a function on, before it or after it, nothing of this producer does anything any more."""
    plain, calls = getattr(owner, name), [0]

    def killed(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > number or (calls[0] == number and not after):
            raise KilledError
        result = plain(*args, **options)
        if calls[0] == number:
            raise KilledError
        return result

    patch.setattr(owner, name, killed)


# The writer's thread has store.put, Accounts.settle (of a hand-off) and prompts.handoff; the others are the producer's.
LINES = [
    ("maker", "make"),
    ("writer", "write"),
    ("store", "put"),
    ("accounts", "settle"),
    ("prompts", "handoff"),
    ("writing", "end"),
    ("writing", "result"),
    ("accounts", "produced"),
]


def _owner(run: pipeline.Run, name: str) -> object:
    owners = {"maker": SampleMaker, "writer": SampleWriter, "writing": Writing, "accounts": Accounts}
    return owners.get(name) or {"store": run.store, "prompts": run.prompts}[name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), LINES, ids=lambda word: word)
def test_a_producer_that_is_killed_at_any_line_leaves_orphans_at_worst(
    owner: str, name: str, after: bool, number: int
) -> None:
    run = pipeline.Run()
    run.feed(*THREE, pipeline.prompt(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "_LAST_WRITE_S", 10.0)
        _kill_at(patch, _owner(run, owner), name, number, after=after)
        with pytest.raises(BaseException, match=r"^$|not written") as caught:
            run.worker(name="dies", stall_timeout_s=0.1).run(threading.Event())
    assert not isinstance(caught.value, AssertionError)
    handed_off = run.samples.stats().ready
    assert _take_over(run).produced == 4 - handed_off
    refs = [decode_ref(item.payload) for item in run.samples.payloads()]
    assert sorted(ref.sample_id for ref in refs) == ["p-0", "p-1", "p-2", "p-3"]
    for ref in refs:
        index = float(ref.sample_id[2:])
        assert run.store.get(ref)["aux_hidden_states"][0, :, 0].tolist() == [1.0 + index, 2.0, 3.0]
    assert len(_shards(run)) - len(refs) <= 2
    assert (run.prompts.stats().done, run.prompts.stats().dead, run.prompts.stats().unsettled) == (4, 0, 0)
