"""SampleDataset: a stream in plain loops and DataLoaders, each sample acknowledged when it was trained on."""

import threading
from collections.abc import Iterator

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import pipeline
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer import leasing
from eaglefeed.consumer.dataset import SampleDataset
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError
from eaglefeed.queue.base import QueueLimits

NUM_SAMPLES = 6


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)  # a stream's end waits for the lease call in hand


@pytest.fixture
def run() -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(NUM_SAMPLES)))
    made.produce()
    return made


@pytest.fixture
def stream(run: pipeline.Run) -> Iterator[SampleStream]:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as opened:
        yield opened


def who(inputs: dict[str, Tensor]) -> list[int]:
    """The indexes of the samples: their aux hidden states are their first token, 1 + index."""
    return [int(row[0, 0]) - 1 for row in inputs["aux_hidden_states"]]


def test_a_loop_gets_every_sample_once_and_the_next_one_acknowledges_the_one_before(
    run: pipeline.Run, stream: SampleStream
) -> None:
    seen = []
    for number, inputs in enumerate(SampleDataset(stream)):
        assert run.samples.stats().done == number
        seen += who(inputs)
    assert seen == list(range(NUM_SAMPLES))
    assert run.samples.stats().done == NUM_SAMPLES
    assert list(run.store.scan()) == []


def test_a_data_loader_passes_the_inputs_on_as_they_are(stream: SampleStream) -> None:
    loader = DataLoader(SampleDataset(stream, samples_per_batch=4), batch_size=None)
    first = next(iter(loader))
    assert set(first) == {"input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "target_logits"}
    assert who(first) == [0, 1, 2, 3]
    assert first["target_logits"].argmax(-1).tolist() == [[2, 3, 0]] * 4


def test_a_loop_that_is_left_gives_the_last_sample_back(run: pipeline.Run) -> None:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        for inputs in SampleDataset(stream):
            if who(inputs) == [2]:
                break
    stats = run.samples.stats()
    assert (stats.done, stats.ready) == (2, NUM_SAMPLES - 2)


def test_a_sample_that_an_iteration_was_left_at_is_acknowledged_with_the_next_ones_first(
    run: pipeline.Run, stream: SampleStream
) -> None:
    dataset, done = SampleDataset(stream), []
    assert who(next(iter(dataset))) == [0]
    for inputs in dataset:
        done.append((who(inputs), run.samples.stats().done))
    assert done == [([index], index) for index in range(1, NUM_SAMPLES)]
    assert run.samples.stats().done == NUM_SAMPLES


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_are_refused_and_nothing_is_leased(
    context: str, run: pipeline.Run, stream: SampleStream
) -> None:
    loader = DataLoader(SampleDataset(stream), batch_size=None, num_workers=1, multiprocessing_context=context)
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(loader))
    assert run.samples.stats().leased == 0


def test_a_loop_that_fetches_ahead_acknowledges_only_what_it_trained_on(
    run: pipeline.Run, stream: SampleStream
) -> None:
    dataset = SampleDataset(stream, ack_on_next=False)
    ahead = iter(DataLoader(dataset, batch_size=None))
    next(ahead), next(ahead), next(ahead)
    assert dataset.ack(1, num_batches=2) == 2
    assert dataset.state_dict() == {"run": "run", "queue": "samples", "step": 1, "seen": ["p-0", "p-1"]}
    assert run.samples.stats().tentative == 2
    with pytest.raises(ConfigError, match="at most 1"):
        dataset.ack(2, num_batches=2)


def test_a_state_goes_on_with_what_it_has_not_seen(run: pipeline.Run) -> None:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        dataset = SampleDataset(stream, samples_per_batch=2, ack_on_next=False)
        batches = iter(dataset)
        next(batches)
        dataset.ack(1)
        state = dataset.state_dict()
        next(batches)
        dataset.ack(2)  # its checkpoint is never written
    with SampleStream(run.samples, run.store, consumer="t2", clock=run.clock) as stream:
        dataset = SampleDataset(stream, samples_per_batch=2)
        dataset.load_state_dict(state)
        assert [who(inputs) for inputs in dataset] == [[2, 3], [4, 5]]


def _produce(run: pipeline.Run, indices: range, *, close: bool) -> None:
    """Also prompts that stay open: more may come."""
    run.feed(*(pipeline.prompt(index) for index in indices), close=close)
    stop = threading.Event()
    run.target.before = lambda ids: stop.set() if not close and ids[0, 0] == indices[-1] + 1 else None
    run.worker().run(stop)


def test_an_iteration_ends_where_the_queue_waits_for_a_commit_and_the_next_goes_on() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    _produce(run, range(4), close=False)
    run.samples.configure(QueueLimits(high_count=2, low_count=1))
    seen, step, iterations = [], 0, 0
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        dataset = SampleDataset(stream, ack_on_next=False)
        while not stream.ended:
            for inputs in dataset:
                seen += who(inputs)
                step += 1
                dataset.ack(step)
            stream.commit(step)
            iterations += 1
            if iterations == 1:
                assert seen == [0, 1, 2, 3]
                _produce(run, range(4, NUM_SAMPLES), close=True)
    assert seen == list(range(NUM_SAMPLES))


def test_a_loop_that_acknowledges_for_good_outlasts_another_trainers_commit() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    _produce(run, range(3), close=False)
    with SampleStream(run.samples, run.store, consumer="other", lease_batch=1, prefetch=1, clock=run.clock) as other:
        other.take(1)
        other.ack(1)
    run.samples.configure(QueueLimits(high_count=1, low_count=0))
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:

        def commit() -> None:
            while not stream.commit_due:
                SYSTEM_CLOCK.sleep(0.01)
            run.samples.commit(1)
            _produce(run, range(3, 5), close=True)

        committing = threading.Thread(target=commit)
        committing.start()
        seen = [who(inputs) for inputs in SampleDataset(stream)]
        committing.join(10)
    assert seen == [[1], [2], [3], [4]]
