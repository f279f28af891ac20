"""How a stream ends: drained to the last sample, or since nobody produces any more; the two are told apart."""

import threading
from typing import Any

import pytest

import pipeline
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.consumer import leasing
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import NoProducers, TargetUnavailable
from eaglefeed.producer import opening
from faults.processes import wait_until

NUM_SAMPLES, BATCH = 11, 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)


def run_of(num_prompts: int) -> pipeline.Run:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*(pipeline.prompt(index) for index in range(num_prompts)))
    return run


def stream_of(run: pipeline.Run, **options: Any) -> SampleStream:
    return SampleStream(run.samples, run.store, consumer="t", prompts=run.prompts, clock=run.clock, **options)


# the tail


@pytest.mark.parametrize("num_consumers", [1, 2])
@pytest.mark.parametrize("drops_last", [False, True])
def test_a_tail_that_fills_no_batch_is_delivered_or_settled_and_every_consumer_ends(
    num_consumers: int, drops_last: bool
) -> None:
    """11 samples in batches of 4. Whoever drops incomplete ones acknowledges them, and their shards go."""
    run = run_of(NUM_SAMPLES)
    run.produce()
    trained, dropped, lock = list[str](), list[str](), threading.Lock()

    def consume() -> None:
        with SampleStream(run.samples, run.store, consumer=threading.current_thread().name, lease_batch=2) as stream:
            while batches := stream.take(BATCH, linger_s=0.2):
                ids = [sample_id for batch in batches for sample_id in batch.sample_ids]
                with lock:
                    (dropped if drops_last and len(ids) < BATCH else trained).extend(ids)
                stream.ack()
            assert (stream.drained, stream.stats.returned) == (True, 0)

    consumers = [threading.Thread(target=consume) for _ in range(num_consumers)]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join(30)
    assert not any(consumer.is_alive() for consumer in consumers)
    assert sorted(trained + dropped) == sorted(f"p-{index}" for index in range(NUM_SAMPLES))
    if num_consumers == 1 or not drops_last:
        assert len(dropped) == (3 if drops_last else 0)
    stats = run.samples.stats()
    assert (stats.done, stats.unsettled, stats.released, stats.stored_bytes) == (NUM_SAMPLES, 0, 0, 0)
    assert list(run.store.scan()) == []


def test_a_tail_that_is_dropped_without_a_word_goes_to_the_next_consumer_at_once() -> None:
    run = run_of(NUM_SAMPLES)
    run.produce()
    with stream_of(run) as stream:
        for _ in range(2):
            assert len(stream.take(BATCH)) == BATCH
            stream.ack()
        assert len(stream.take(BATCH, linger_s=0.2)) == 3
    assert (stream.stats.acked, stream.stats.returned, run.samples.stats().ready) == (8, 3, 3)
    with stream_of(run) as other:
        assert [batch.sample_ids for batch in other] == [("p-8",), ("p-9",), ("p-10",)]
    assert list(run.store.scan()) == []


# producers that are gone


def dies_at(run: pipeline.Run, number: int, error: Exception) -> None:
    """A producer that makes the samples before that one, and ends with `error`."""

    def fail(ids: Any) -> None:
        if ids[0, 0] == number + 1:
            raise error

    run.target.before = fail
    with pytest.raises(type(error)):
        run.produce(name="host7-12", lease_batch=1)


def test_a_trainer_is_told_how_many_prompts_remain_and_what_ended_the_last_producer() -> None:
    run = run_of(NUM_SAMPLES)
    dies_at(run, 2, TargetUnavailable("the engine is gone", subject="http://v:8000"))
    wanted = (
        r"1 s and 9 prompts remain; a producer's last error: host7-12: TargetUnavailable: http://v:8000: the engine"
    )
    with stream_of(run, fail_without_producers=True, producer_grace_s=1) as stream:
        assert [batch.sample_ids for batch in stream.take(2)] == [("p-0",), ("p-1",)]
        stream.ack()
        with pytest.raises(NoProducers, match=wanted) as caught:
            stream.take(1)
    assert (caught.value.num_prompts, caught.value.retryable) == (9, True)


def test_producers_that_were_killed_left_no_word_and_the_trainer_says_so() -> None:
    run = run_of(1)
    run.prompts.beat("producer", "killed")
    with stream_of(run, fail_without_producers=True, producer_grace_s=1) as stream:
        assert stream.take(1, wait_s=0.1) == []  # as far as anybody knows, it lives
        run.clock.advance(31)
        with pytest.raises(NoProducers, match="1 prompts remain, and none said why it ended"):
            stream.take(1)


def test_while_one_producer_of_two_lives_a_trainer_goes_on_to_the_end() -> None:
    run = run_of(NUM_SAMPLES)
    dies_at(run, 2, TargetUnavailable("the engine is gone"))
    run.target.before = lambda _ids: None
    run.prompts.beat("producer", "other")
    survivor = threading.Thread(target=lambda: (wait_until(lambda: run.samples.stats().done == 2), run.produce()))
    survivor.start()
    with stream_of(run, fail_without_producers=True, producer_grace_s=20) as stream:
        assert len([batch for batch in stream]) == NUM_SAMPLES  # noqa: C416  acknowledges each
        assert stream.drained
    survivor.join(30)


def test_a_closed_queue_whose_producers_left_cleanly_is_an_end_and_no_error() -> None:
    run = run_of(2)
    run.produce()
    assert run.prompts.stats().workers == {}
    with stream_of(run, fail_without_producers=True, producer_grace_s=0) as stream:
        assert len(list(stream)) == 2
        assert stream.drained


def test_a_target_that_cannot_be_loaded_is_what_the_trainer_says_it_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target, rows = save_tiny_target(tmp_path / "target"), write_rows(tmp_path / "rows.jsonl", [conversation(0)])
    shell = Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=128")

    def load(*_args: object, **_options: object) -> None:
        raise TargetUnavailable("CUDA out of memory", subject="it")

    assert shell.run("feed", rows).code == 0
    monkeypatch.setattr(opening, "open_target", load)
    assert shell.run("produce").code == 4
    ended = shell.run("train", "train.start_timeout_s=0.2")
    assert ended.code == 4
    assert "no producer wrote the run's contract in 0.2 s, got" in ended.err.splitlines()[-1]
    assert "TargetUnavailable: it: CUDA out of memory" in ended.err.splitlines()[-1]
