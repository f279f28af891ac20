"""What a stream tells checkpoints, and how it goes on from them: state_dict, load_state_dict, acknowledging a part."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import pipeline
from eaglefeed.consumer import leasing
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError, ContractMismatch, QueueError, SchemaError
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.batch import Eagle3TargetBatch
from queue_servers import Bench


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)


def _run(name: str = "samples", server: MemoryServer | None = None) -> pipeline.Run:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*(pipeline.prompt(index) for index in range(6)))
    run.produce()
    if name != "samples":
        items = list(run.samples.find([f"p-{index}" for index in range(6)]))
        run.samples = MemoryLeaseQueue(server or MemoryServer(run.clock), "run", name)
        run.samples.put(items)
        run.samples.close()
    return run


@pytest.fixture
def run() -> pipeline.Run:
    return _run()


@pytest.fixture
def stream(run: pipeline.Run) -> Iterator[SampleStream]:
    with _stream(run) as opened:
        yield opened


def _stream(run: pipeline.Run) -> SampleStream:
    return SampleStream(run.samples, run.store, consumer="t", clock=run.clock)


def _ids(batches: list[Eagle3TargetBatch]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def _rest(run: pipeline.Run, state: Any) -> list[str]:
    with _stream(run) as stream:
        stream.load_state_dict(state)
        return _ids(stream.take(9, linger_s=0.1))


def test_nothing_is_leased_before_the_first_take(run: pipeline.Run, stream: SampleStream) -> None:
    assert run.samples.stats().leased == 0
    assert not stream.commit_due
    assert stream.take(1)
    assert run.samples.stats().leased > 0


@pytest.mark.parametrize("acked", [0, 1, 2])
def test_a_stream_goes_on_from_any_state_that_another_had_between_steps(run: pipeline.Run, acked: int) -> None:
    with _stream(run) as stream:
        stream.load_state_dict(stream.state_dict())
        states = [stream.state_dict()]
        for step in (1, 2):
            stream.take(2)
            stream.ack(step)
            states.append(stream.state_dict())
    assert states[acked]["seen"] == [f"p-{index}" for index in range(2 * acked)]
    assert _rest(run, states[acked]) == [f"p-{index}" for index in range(2 * acked, 6)]


def test_a_loaded_state_is_told_again(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        stream.take(2)
        stream.ack(7)
        state = stream.state_dict()
    with _stream(run) as stream:
        stream.load_state_dict(state)
        # Settled for good by the restore.
        assert stream.state_dict() == {"run": "run", "queue": "samples", "step": 7, "seen": []}


@pytest.mark.parametrize("kind", ["stream", "backend"])
def test_a_state_that_comes_after_the_first_batch_is_refused(run: pipeline.Run, kind: str) -> None:
    prompts = [pipeline.prompt(index) for index in range(3)]
    opened = _stream(run) if kind == "stream" else BackendStream(run.target, prompts)
    with opened as stream:
        state = stream.state_dict()
        stream.take(1)
        with pytest.raises(ConfigError, match="handed out batches already"):
            stream.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"queue": "samples", "step": -1, "seen": []},
        {"queue": "samples", "step": "3", "seen": []},
        {"queue": "samples", "step": 3, "seen": "p-0"},
        {"queue": "samples", "step": 3, "seen": [7]},
        {"queue": None, "step": 3, "seen": []},
        {"run": 7, "queue": "samples", "step": 3, "seen": []},
    ],
)
def test_what_is_no_state_is_refused_and_the_queue_left_alone(run: pipeline.Run, state: Any) -> None:
    before = run.samples.stats()
    with _stream(run) as stream, pytest.raises(SchemaError, match="state_dict"):
        stream.load_state_dict(state)
    assert run.samples.stats().session == before.session


def test_the_state_of_an_earlier_epoch_begins_this_one(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        stream.take(4)
        stream.ack(5)
        state = stream.state_dict()
    later = _run("samples.e2")
    assert _rest(later, state) == [f"p-{index}" for index in range(6)]  # the same ids, seen in another epoch
    assert later.samples.stats().committed_step == 5


@pytest.mark.parametrize(("own", "theirs"), [("samples", "samples.e1"), ("samples.e1", "samples.e3")])
def test_the_state_of_a_later_epoch_is_refused_with_both(own: str, theirs: str) -> None:
    run = _run(own)
    state = {"queue": theirs, "step": 1, "seen": []}
    with _stream(run) as stream, pytest.raises(ConfigError, match=f"wanted {own}, got {theirs}"):
        stream.load_state_dict(state)


def test_the_state_of_another_run_is_refused_with_both_whatever_its_ids_are(run: pipeline.Run) -> None:
    before = run.samples.stats()
    state = {"run": "another", "queue": "samples", "step": 1, "seen": ["p-0"]}
    with _stream(run) as stream, pytest.raises(ContractMismatch, match="wanted run, got another"):
        stream.load_state_dict(state)
    assert replace(run.samples.stats(), oldest_ready_s=0) == replace(before, oldest_ready_s=0)


def test_states_of_trainings_with_and_without_a_queue_are_told_apart(run: pipeline.Run, stream: SampleStream) -> None:
    with BackendStream(run.target, [pipeline.prompt(index) for index in range(3)]) as walked:
        walked.take(2)
        walked.ack(1)
        place = walked.state_dict()
    assert (place["queue"], place["step"]) == ("", 1)
    with pytest.raises(ContractMismatch, match="got one of a colocated or remote target"):
        stream.load_state_dict(place)
    with BackendStream(run.target, []) as other, pytest.raises(ContractMismatch, match="got one of a stream"):
        other.load_state_dict(stream.state_dict())


def test_a_step_before_the_committed_one_is_refused(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        state = stream.state_dict()
        stream.take(2)
        stream.ack(3)
        stream.commit(3)
    with pytest.raises(QueueError, match="step 3 or later"):
        _rest(run, state)


def test_a_loop_that_takes_ahead_acknowledges_what_it_trained_on(run: pipeline.Run, stream: SampleStream) -> None:
    first, second = _ids(stream.take(2)), _ids(stream.take(2))
    assert stream.round_ids == ("p-2", "p-3")
    assert stream.ack(1, first) == 2
    assert stream.state_dict() == {"run": "run", "queue": "samples", "step": 1, "seen": first}
    assert run.samples.stats().tentative == 2
    assert stream.ack(2, second[1:]) == 1
    assert stream.ack(3) == 1
    assert stream.state_dict()["seen"] == [*first, "p-3", "p-2"]
    assert stream.stats.acked == 4


def test_samples_that_are_not_in_hand_are_not_acknowledged(run: pipeline.Run, stream: SampleStream) -> None:
    stream.take(2)
    stream.ack(1, ["p-0"])
    for ids in (["p-0"], ["p-1", "p-5"], ["other"]):
        with pytest.raises(ConfigError, match="not in hand"):
            stream.ack(2, ids)
    assert run.samples.stats().tentative == 1
    assert stream.ack(2, ["p-1"]) == 1


def test_what_was_taken_ahead_and_not_acknowledged_goes_back(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        taken = _ids(stream.take(4))
        stream.ack(None, taken[:1])
    assert (run.samples.stats().done, run.samples.stats().ready) == (1, 5)


def test_a_walk_is_acknowledged_in_its_order() -> None:
    run = pipeline.Run()
    prompts = [pipeline.prompt(index) for index in range(5)]
    with BackendStream(run.target, prompts) as stream:
        stream.take(2)
        stream.take(2)
        with pytest.raises(ConfigError, match="out of their order, wanted p-0, p-1, got p-2, p-3"):
            stream.ack(1, ["p-2", "p-3"])
        assert stream.ack(1, ["p-1", "p-0"]) == 2
        state = stream.state_dict()
    with BackendStream(run.target, prompts) as stream:
        stream.load_state_dict(state)
        assert _ids(stream.take(9)) == ["p-2", "p-3", "p-4"]


def test_a_trainer_that_was_killed_gets_what_no_checkpoint_holds_and_its_producer_makes_nothing_again(
    bench: Bench,
) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.prompts, run.samples = bench.queue("prompts"), bench.queue("samples")
    run.feed(*(pipeline.prompt(index, rows=(pipeline.PromptRow((1 + index % 40, 2), (0, 1)),)) for index in range(100)))
    run.produce()
    every, settled = {f"p-{index}" for index in range(100)}, []
    with SampleStream(run.samples, run.store, consumer="t", lease_batch=4, prefetch=4, clock=run.clock) as stream:
        for step in range(1, 41):
            (batch,) = stream.take(1)
            settled += batch.sample_ids
            stream.ack(step)
        stream.commit(40)  # its checkpoint is written
        state = stream.state_dict()
        held = {sample_id for batch in stream.take(4) for sample_id in batch.sample_ids}
        stream.stop()
        stream._taker.join(10)
        stream._queue.holdings.drain()  # what a killed process holds stays leased
    assert run.produce(name="again").produced == 0
    assert run.target.calls == 100
    rest = []
    with SampleStream(run.samples, run.store, consumer="t2", clock=run.clock) as stream:
        stream.load_state_dict(state)
        for batch in stream:
            rest += batch.sample_ids
    assert len(rest) == 60
    assert sorted(settled + rest) == sorted(every)
    assert held <= set(rest)
    stats = run.samples.stats()
    assert (stats.done, stats.dead, stats.unsettled, list(run.store.scan())) == (100, 0, 0, [])
