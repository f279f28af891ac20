"""A queue without room and the trainers that hold it: commits that are due, and marks that are too low to work."""

import threading

import pytest

import pipeline
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer import leasing
from eaglefeed.consumer.room import check_room
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError
from eaglefeed.queue.base import Lease, QueueLimits
from eaglefeed.schema.batch import Eagle3TargetBatch

FULL_AT_TWO = QueueLimits(high_count=2, low_count=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)  # a stream's end waits for the lease call in hand


def _run(num_samples: int) -> pipeline.Run:
    """A run whose prompts stay open: more may come."""
    made = pipeline.Run(clock=pipeline.TurnableClock())
    _produce(made, range(num_samples), close=False)
    return made


def _produce(run: pipeline.Run, indices: range, *, close: bool) -> None:
    run.feed(*(pipeline.prompt(index) for index in indices), close=close)
    stop = threading.Event()
    run.target.before = lambda ids: stop.set() if not close and ids[0, 0] == indices[-1] + 1 else None
    run.worker().run(stop)


def _ids(batches: list[Eagle3TargetBatch]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def test_a_full_queue_asks_for_a_commit_and_take_waits_no_longer() -> None:
    run = _run(4)
    run.samples.configure(FULL_AT_TWO)
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        stream.take(4)
        stream.ack(1)
        assert stream.take(1, wait_s=100) == []
        assert stream.commit_due
        assert not stream.ended
        assert stream.take(1) == []
        assert stream.commit(1) == 4
        assert not stream.commit_due
        assert run.samples.has_room()
        run.samples.configure(QueueLimits())
        _produce(run, range(4, 6), close=True)
        assert _ids(stream.take(2)) == ["p-4", "p-5"]


def test_what_is_there_is_taken_before_a_commit_that_is_due() -> None:
    run = _run(4)
    run.samples.configure(FULL_AT_TWO)
    with SampleStream(run.samples, run.store, consumer="t", lease_batch=4, prefetch=8) as stream:
        stream.take(1)
        stream.ack(1)
        while not stream.commit_due:
            SYSTEM_CLOCK.sleep(0.01)
        assert _ids(stream.take(9, linger_s=100)) == ["p-1", "p-2", "p-3"]


def test_a_plain_loop_goes_on_where_another_loops_commit_is_due() -> None:
    run = _run(3)
    run.samples.configure(QueueLimits(high_count=1, low_count=0))
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        stream.take(1)
        stream.ack(1)

        def produce_more() -> None:
            while not stream.commit_due:
                SYSTEM_CLOCK.sleep(0.01)
            lease = run.samples.lease(1, visibility_timeout_s=60, consumer="t")
            assert not isinstance(lease, Lease)
            run.samples.configure(QueueLimits())
            _produce(run, range(3, 5), close=True)

        thread = threading.Thread(target=produce_more)
        thread.start()
        assert [batch.sample_ids[0] for batch in stream] == ["p-1", "p-2", "p-3", "p-4"]
        thread.join(10)


def test_a_loop_that_another_loops_commit_starved_waits_for_full_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_STARVED_S", 0.1)
    run = _run(1)
    lease = run.samples.lease(1, visibility_timeout_s=60, consumer="another")
    assert isinstance(lease, Lease)
    run.samples.ack(lease.token, ["p-0"], step=1)
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        assert stream.take(1) == []
        assert stream.commit_due
        monkeypatch.setattr(leasing, "_STARVED_S", 1e9)
        _produce(run, range(1, 3), close=False)
        while not (taken := stream.take(1)):
            SYSTEM_CLOCK.sleep(0.01)
        assert _ids(taken) == ["p-1"]
        assert not stream.commit_due


def test_a_high_mark_below_what_a_trainer_holds_is_refused_with_the_arithmetic() -> None:
    run = pipeline.Run()
    run.samples.configure(QueueLimits(high_count=9, low_count=1))
    with pytest.raises(ConfigError) as caught:
        check_room(run.samples, consumer="t", round_size=2, prefetch=4)
    assert "at least 10 = 1 trainers x (4 + 1 rounds of 2), got 9" in str(caught.value)
    assert "raise queue.high_count to at least 10, or lower train.prefetch" in caught.value.fix
    assert run.samples.stats().workers == {}
    run.samples.configure(QueueLimits(high_count=10, low_count=1))
    check_room(run.samples, consumer="t", round_size=2, prefetch=4)


def test_every_living_trainer_needs_its_room() -> None:
    run = pipeline.Run()  # its clock turns when somebody sleeps
    run.samples.configure(QueueLimits(high_count=10, low_count=1))
    plain = run.samples.stats

    def stats() -> object:
        run.samples.beat("trainer", "other")
        return plain()

    run.samples.stats = stats  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="at least 12 = 2 trainers x"):
        check_room(run.samples, consumer="t", round_size=2, prefetch=2, clock=run.clock)


def test_a_dead_trainers_room_is_waited_for() -> None:
    run = pipeline.Run()
    run.samples.configure(QueueLimits(high_count=10, low_count=1))
    run.samples.beat("trainer", "killed just now")
    before_s = run.clock.time()
    check_room(run.samples, consumer="t", round_size=2, prefetch=2, clock=run.clock)
    assert run.clock.time() - before_s >= 30
