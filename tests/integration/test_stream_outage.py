"""A store that a trainer cannot reach for a while costs no sample an attempt; one that stays away ends the stream."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs
from torch import Tensor

import pipeline
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.memory import MemoryStore

NUM = 12


class _Reading(MemoryStore):
    """Calls `before(sample_id)` ahead of each read."""

    before: Callable[[str], None] = staticmethod(lambda _sample_id: None)

    def get(self, ref: SampleRef, ring: BufferRing | None = None) -> dict[str, Tensor]:
        self.before(ref.sample_id)
        return super().get(ref, ring)


@pytest.fixture
def run() -> pipeline.Run:
    made = pipeline.Run(store=_Reading())
    made.feed(*(pipeline.prompt(index) for index in range(NUM)))
    assert made.produce().produced == NUM
    return made


def _away_until(run: pipeline.Run, end_s: float) -> Callable[[str], None]:
    def fail(sample_id: str) -> None:
        if run.clock.monotonic() < end_s:
            raise StorageError("Stale file handle", subject=sample_id)

    return fail


def test_an_outage_of_the_store_makes_no_dead_letter_and_is_told_once(run: pipeline.Run) -> None:
    run.store.before = _away_until(run, run.clock.monotonic() + 100)  # type: ignore[attr-defined]
    with capture_logs() as logs, SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        delivered = [batch.sample_ids[0] for batch in stream]
    assert sorted(delivered) == sorted(f"p-{index}" for index in range(NUM))
    assert (stream.stats.dead, stream.stats.acked) == (0, NUM)
    told = [entry["event"] for entry in logs if entry["event"] in ("store_away", "store_back")]
    assert told == ["store_away", "store_back"]


def test_a_store_that_stays_away_ends_the_stream_and_its_samples_stay(run: pipeline.Run) -> None:
    run.store.before = _away_until(run, float("inf"))  # type: ignore[attr-defined]
    began_s = run.clock.monotonic()
    stream = SampleStream(run.samples, run.store, consumer="t", clock=run.clock, outage_s=60)
    with stream, pytest.raises(StorageError, match=r"no sample could be read for 6\d s, got .*Stale file handle"):
        stream.take(1)
    assert run.clock.monotonic() - began_s < 200
    stats = run.samples.stats()
    assert (stats.ready + stats.delayed, stats.leased, stats.dead) == (NUM, 0, 0)


def test_one_sample_that_can_never_be_read_is_no_outage(run: pipeline.Run) -> None:
    def fail(sample_id: str) -> None:
        if sample_id == "p-4":
            raise StorageError("Input/output error", subject=sample_id)

    run.store.before = fail  # type: ignore[attr-defined]
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        delivered = {batch.sample_ids[0] for batch in stream}
    assert len(delivered) == NUM - 1
    assert (stream.stats.dead, stream.stats.retried) == (1, 4)
    (letter,) = run.samples.dead_letters()
    assert (letter.id, letter.delivery_count) == ("p-4", 5)
