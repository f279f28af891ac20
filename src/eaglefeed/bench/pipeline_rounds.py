"""The same samples, from memory and from a stream, through the same steps."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eaglefeed.bench.bed import ROOMY, Bed
from eaglefeed.bench.partners import Partner
from eaglefeed.bench.pipeline_plan import Load, PipelinePlan
from eaglefeed.bench.pipeline_samples import Training, contract_of, make_batch, prompts_of
from eaglefeed.bench.plan import Reading
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.storage.base import FeatureStore, open_store

__all__ = ["Observe", "measure_pipeline"]

Observe = Callable[[QueueClient, str, StreamStats], AbstractContextManager[None]]
"""Of a run's client, its name and its stream's counts."""

_COMMIT_EVERY = 10
_PREFETCH = 4
"""What `eaglefeed train` reads ahead by default."""
_PRODUCE_S, _POLL_S = 300.0, 0.05


class _Timed(NamedTuple):
    """Seconds of all timed steps, those of them in which no sample was there, and the digest of what was learned."""

    took_s: float
    wait_s: float
    digest: str


def measure_pipeline(
    bed: Bed, root: Path, plan: PipelinePlan, observe: Observe, tell: Callable[[str], None]
) -> Iterator[Reading]:
    """Readings of every load: the stream's time over the memory's, the share of it that was waited, and the ceiling.

    On the device's load, whose step leaves the processor free, also the time of an observed stream over a plain one.

    Raises:
        EaglefeedError: the stream did not give what it should, or a process failed.
    """
    for number in range(plan.rounds):
        tell(f"round {number + 1} of {plan.rounds}")
        streamed = partial(_from_stream, bed, root, high_count=plan.high_count)
        ways: dict[str, Callable[[Load], _Timed]] = {"memory": _from_memory, "stream": streamed}
        yield from _compared("draft", plan.draft, ways, backwards=number % 2 == 1)
        ways["observed"] = partial(streamed, observe=observe)
        yield from _compared("device", plan.device, ways, backwards=number % 2 == 1)
        free = replace(plan.device, step_s=0.0)
        timed = streamed(free)
        sample_bytes = sum(tensor.nbytes for tensor in make_batch(free).tensors().values())
        yield Reading("device.ceiling", "MB/s", sample_bytes * free.steps / timed.took_s / 1e6)


def _compared(
    name: str, load: Load, ways: Mapping[str, Callable[[Load], _Timed]], *, backwards: bool
) -> Iterator[Reading]:
    """Readings of a load that is timed in several ways, one after the other."""
    timed = {way: ways[way](load) for way in (list(ways)[::-1] if backwards else ways)}
    memory, stream = timed["memory"], timed["stream"]
    if stream.digest != memory.digest:
        what = "other weights came of the stream than of the same batches in memory"
        raise EaglefeedError(what, subject=f"bench pipeline, {name}", wanted=memory.digest, got=stream.digest)
    for way, each in timed.items():
        yield Reading(f"{name}.{way}", "ms a step", each.took_s / load.steps * 1e3)
    yield Reading(f"{name}.stream_over_memory", "ratio", stream.took_s / memory.took_s)
    if "observed" in timed:
        yield Reading(f"{name}.observed_over_plain", "ratio", timed["observed"].took_s / stream.took_s)
    yield Reading(f"{name}.wait_share", "of the time", stream.wait_s / stream.took_s)


def _from_memory(load: Load) -> _Timed:
    batch, training = make_batch(load), Training(load)
    for _ in range(load.warm_up):
        training.step(batch)
    start_s = SYSTEM_CLOCK.monotonic()
    for _ in range(load.steps):
        training.step(batch)
    return _Timed(SYSTEM_CLOCK.monotonic() - start_s, 0.0, training.digest())


def _from_stream(bed: Bed, root: Path, load: Load, *, high_count: int, observe: Observe | None = None) -> _Timed:
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
        timed = _train(samples, store, load, observe and partial(observe, bed.client, run))
        if not load.produced_ahead:
            producer.line(_PRODUCE_S)
    bed.clear()
    shutil.rmtree(folder)
    return timed


def _train(
    samples: LeaseQueue, store: FeatureStore, load: Load, observe: Callable[[StreamStats], Any] | None
) -> _Timed:
    training, start_s, waited_s = Training(load), 0.0, 0.0
    with _opened(samples, store, load) as stream, ExitStack() as watching:
        for number in range(1, load.num_samples + 1):
            if number == load.warm_up + 1:
                if observe is not None:
                    watching.enter_context(observe(stream.stats))
                start_s, waited_s = SYSTEM_CLOCK.monotonic(), stream.stats.wait_s
            training.step(_taken(stream, number))
            stream.ack(number)
            if number % _COMMIT_EVERY == 0:
                stream.commit(number)
        took_s, wait_s = SYSTEM_CLOCK.monotonic() - start_s, stream.stats.wait_s - waited_s
        stream.commit(load.num_samples)
    return _Timed(took_s, wait_s, training.digest())


def _opened(samples: LeaseQueue, store: FeatureStore, load: Load) -> RoundStream:
    return RoundStream(
        samples,
        store,
        ranks=Ranks.alone(),
        samples_per_step=1,
        contract=contract_of(load),
        draft_vocab_size=load.draft_vocab,
        consumer="bench",
        prefetch=_PREFETCH,
    )


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
