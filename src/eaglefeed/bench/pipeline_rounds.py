"""The same samples, from memory and from a stream, through the same steps."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from eaglefeed.bench.bed import ROOMY, Bed
from eaglefeed.bench.partners import Partner
from eaglefeed.bench.pipeline_plan import Load, PipelinePlan
from eaglefeed.bench.pipeline_samples import Training, contract_of, make_batch, prompts_of
from eaglefeed.bench.plan import Reading
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.storage.base import FeatureStore, open_store

__all__ = ["measure_pipeline"]

_COMMIT_EVERY = 10
_PREFETCH = 4
"""What `eaglefeed train` reads ahead by default."""
_PRODUCE_S, _POLL_S = 300.0, 0.05


class _Timed(NamedTuple):
    """Seconds of all timed steps, those of them in which no sample was there, and the digest of what was learned."""

    took_s: float
    wait_s: float
    digest: str


def measure_pipeline(bed: Bed, root: Path, plan: PipelinePlan, tell: Callable[[str], None]) -> Iterator[Reading]:
    """Readings of every load: the stream's time over the memory's, the share of it that was waited, and the ceiling.

    Raises:
        EaglefeedError: the stream did not give what it should, or a process failed.
    """
    for number in range(plan.rounds):
        tell(f"round {number + 1} of {plan.rounds}")
        for name, load in (("draft", plan.draft), ("device", plan.device)):
            yield from _both(bed, root, name, load, plan.high_count, stream_first=number % 2 == 1)
        free = replace(plan.device, step_s=0.0)
        timed = _from_stream(bed, root, free, plan.high_count)
        sample_bytes = sum(tensor.nbytes for tensor in make_batch(free).tensors().values())
        yield Reading("device.ceiling", "MB/s", sample_bytes * free.steps / timed.took_s / 1e6)


def _both(bed: Bed, root: Path, name: str, load: Load, high_count: int, *, stream_first: bool) -> Iterator[Reading]:
    if stream_first:
        stream, memory = _from_stream(bed, root, load, high_count), _from_memory(load)
    else:
        memory, stream = _from_memory(load), _from_stream(bed, root, load, high_count)
    if stream.digest != memory.digest:
        what = "other weights came of the stream than of the same batches in memory"
        raise EaglefeedError(what, subject=f"bench pipeline, {name}", wanted=memory.digest, got=stream.digest)
    yield Reading(f"{name}.memory", "ms a step", memory.took_s / load.steps * 1e3)
    yield Reading(f"{name}.stream", "ms a step", stream.took_s / load.steps * 1e3)
    yield Reading(f"{name}.stream_over_memory", "ratio", stream.took_s / memory.took_s)
    yield Reading(f"{name}.wait_share", "of the time", stream.wait_s / stream.took_s)


def _from_memory(load: Load) -> _Timed:
    batch, training = make_batch(load), Training(load)
    for _ in range(load.warm_up):
        training.step(batch)
    start_s = SYSTEM_CLOCK.monotonic()
    for _ in range(load.steps):
        training.step(batch)
    return _Timed(SYSTEM_CLOCK.monotonic() - start_s, 0.0, training.digest())


def _from_stream(bed: Bed, root: Path, load: Load, high_count: int) -> _Timed:
    run = bed.new_name()
    folder = root / run
    prompts, samples = (open_queue(bed.client, run, name) for name in ("prompts", "samples"))
    room = load.num_samples + 1 if load.produced_ahead else high_count
    samples.configure(replace(ROOMY, high_count=room, low_count=room // 2))
    prompts.configure(ROOMY)
    prompts.put(prompts_of(load))
    prompts.close()
    task = {"load": asdict(load), "run": run, "url": bed.url, "store": str(folder)}
    command = [sys.executable, "-m", "eaglefeed.bench.pipeline_producer"]
    with Partner("bench pipeline_producer", command, task) as producer, closing(open_store(str(folder))) as store:
        if load.produced_ahead:
            producer.line(_PRODUCE_S)
        else:
            _wait_until(lambda: samples.stats().ready >= min(room, load.num_samples))
        timed = _train(samples, store, load)
        if not load.produced_ahead:
            producer.line(_PRODUCE_S)
    bed.clear()
    shutil.rmtree(folder)
    return timed


def _train(samples: LeaseQueue, store: FeatureStore, load: Load) -> _Timed:
    training, start_s, waited_s = Training(load), 0.0, 0.0
    with RoundStream(
        samples,
        store,
        ranks=Ranks.alone(),
        samples_per_step=1,
        contract=contract_of(load),
        draft_vocab_size=load.draft_vocab,
        consumer="bench",
        prefetch=_PREFETCH,
    ) as stream:
        for number in range(1, load.num_samples + 1):
            if number == load.warm_up + 1:
                start_s, waited_s = SYSTEM_CLOCK.monotonic(), stream.stats.wait_s
            training.step(_taken(stream, number))
            stream.ack(number)
            if number % _COMMIT_EVERY == 0:
                stream.commit(number)
        took_s, wait_s = SYSTEM_CLOCK.monotonic() - start_s, stream.stats.wait_s - waited_s
        stream.commit(load.num_samples)
    return _Timed(took_s, wait_s, training.digest())


def _taken(stream: RoundStream, number: int) -> Eagle3TargetBatch:
    """The sample of a step; where the queue has no room before it, what was learned is committed, as `train` does."""
    while not stream.ended:
        for batch in stream.take(1):
            return batch
        if stream.commit_due:
            stream.commit(number - 1)
    raise EaglefeedError("samples are missing", subject="bench pipeline", got=stream.stats.delivered)


def _wait_until(there: Callable[[], bool]) -> None:
    end_s = SYSTEM_CLOCK.monotonic() + _PRODUCE_S
    while not there():
        if SYSTEM_CLOCK.monotonic() > end_s:
            raise EaglefeedError(f"the producer filled no queue in {_PRODUCE_S:g} s", subject="bench pipeline")
        SYSTEM_CLOCK.sleep(_POLL_S)
