"""Producers that are much faster than their trainer: what waits for it is bounded, and nobody starves or hangs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pipeline
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer import leasing
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue.base import QueueLimits
from eaglefeed.storage.memory import MemoryStore

PRODUCERS, BATCH, HIGH, LOW, NUM = 3, 4, 16, 8, 160
PATIENCE_S = 30.0

pytestmark = pytest.mark.usefixtures("deletes_in_place")


class Gauged(MemoryStore):
    """Notes what lies in it after each shard."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.bytes = [0], [0]

    def put(self, ref: Any, tensors: Any) -> Any:
        stored = super().put(ref, tensors)
        shards = list(self.scan())
        self.counts.append(len(shards))
        self.bytes.append(sum(shard.num_bytes for shard in shards))
        return stored


@contextmanager
def _producing(run: pipeline.Run, stop: threading.Event) -> Iterator[list[ProducerWorker]]:
    workers = [run.worker(name=f"w{number}", lease_batch=BATCH) for number in range(PRODUCERS)]
    threads = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield workers
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)


def _run(limits: QueueLimits) -> pipeline.Run:
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=Gauged())
    run.samples.configure(limits)
    run.feed(*(pipeline.prompt(at, rows=(pipeline.PromptRow((1 + at % 40, 2), (0, 1)),)) for at in range(NUM)))
    return run


def _wait_for(there: Any) -> None:
    deadline_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while not there():
        assert SYSTEM_CLOCK.monotonic() < deadline_s, "it does not come"
        SYSTEM_CLOCK.sleep(0.005)


def _sample_bytes() -> int:
    run = pipeline.Run(store=Gauged())
    run.feed(pipeline.prompt(0, rows=(pipeline.PromptRow((1, 2), (0, 1)),)))
    run.produce()
    return max(run.store.bytes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", ["count", "bytes"])
def test_what_waits_for_a_slow_trainer_is_bounded_and_a_fast_one_gets_the_rest(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)
    size, seen = _sample_bytes(), []
    by_bytes = QueueLimits(high_bytes=HIGH * size, low_bytes=LOW * size)
    run = _run(QueueLimits(high_count=HIGH, low_count=LOW) if by == "count" else by_bytes)
    with (
        _producing(run, threading.Event()),
        SampleStream(run.samples, run.store, consumer="t", prompts=run.prompts, clock=run.clock) as stream,
    ):
        for batch in stream:
            if len(seen) < NUM // 2:  # it is slower than all producers together
                _wait_for(lambda: run.samples.stats().full)
            seen += batch.sample_ids
    assert sorted(seen) == sorted(f"p-{at}" for at in range(NUM))
    # Each has leased a batch when the mark is reached; one shard is just being deleted.
    most = HIGH + PRODUCERS * BATCH + 1
    assert HIGH <= max(run.store.counts) <= most  # type: ignore[attr-defined]
    assert max(run.store.bytes) <= most * (size + 64)  # type: ignore[attr-defined]
    assert list(run.store.scan()) == []


def test_producers_that_wait_for_room_end_when_they_are_told_to_and_hold_nothing() -> None:
    run, stop = _run(QueueLimits(high_count=HIGH, low_count=LOW)), threading.Event()
    with _producing(run, stop) as workers:
        _wait_for(lambda: all(worker.stats.paused_s for worker in workers))
        stop.set()
    stats = run.prompts.stats()
    made = run.samples.stats().ready
    assert HIGH <= made <= HIGH + PRODUCERS * BATCH
    assert (stats.leased, stats.ready, stats.done) == (0, NUM - made, made)
