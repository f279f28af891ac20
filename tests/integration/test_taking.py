"""A take that raises has given the loop nothing: no later ack is for what it had in hand."""

import pytest

import pipeline
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import QueueUnavailable
from eaglefeed.schema.batch import Eagle3TargetBatch


@pytest.fixture
def run() -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(6)))
    made.produce()
    return made


def _full_at_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no room for the third batch that is copied to it."""
    plain, calls = Eagle3TargetBatch.to, iter(range(100))

    def to(batch: Eagle3TargetBatch, device: object) -> Eagle3TargetBatch:
        if next(calls) == 2:
            raise MemoryError
        return plain(batch, device)  # type: ignore[arg-type]

    monkeypatch.setattr(Eagle3TargetBatch, "to", to)


def _gone_after_the_first_lease(run: pipeline.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is away for good after a lease of four; the stream has its error then."""
    plain, calls = run.samples.lease, iter(range(1000))

    def lease(n: int, **options: object) -> object:
        if next(calls):
            raise QueueUnavailable("server", "away")
        return plain(n, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run.samples, "lease", lease)


@pytest.mark.parametrize("step", [None, 7])
@pytest.mark.parametrize("fault", ["device", "queue"])
def test_what_a_take_that_raised_had_in_hand_is_never_settled_and_not_lost(
    run: pipeline.Run, monkeypatch: pytest.MonkeyPatch, fault: str, step: int | None
) -> None:
    if fault == "device":
        _full_at_the_third(monkeypatch)
    else:
        _gone_after_the_first_lease(run, monkeypatch)
    error = MemoryError if fault == "device" else QueueUnavailable
    with SampleStream(run.samples, run.store, consumer="t", outage_s=-1.0) as stream:
        learned = [batch.sample_ids[0] for batch in stream.take(1)]
        with pytest.raises(error):
            stream.take(5)
        assert stream.ack(step) == len(learned) == 1
        assert stream.stats.delivered == 1
        if step is not None:
            assert stream.state_dict() == {"run": "run", "queue": "samples", "step": step, "seen": learned}
            stream.commit(step)
    assert (run.samples.stats().done, run.samples.stats().ready) == (1, 5)
    monkeypatch.undo()
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        rest = [batch.sample_ids[0] for batch in stream]
    assert sorted(learned + rest) == [f"p-{index}" for index in range(6)]
    assert stream.stats.redelivered == 0
