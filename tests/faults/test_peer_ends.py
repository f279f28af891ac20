"""When a producer that keeps its samples ends, and what of it is still there then."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

import pipeline
from eaglefeed.consumer import leasing
from eaglefeed.consumer.run import load_run_assets
from eaglefeed.errors import SampleMissing, StorageError
from eaglefeed.producer import worker
from eaglefeed.queue.base import Lease
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.prompt import PromptRow
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage import peers
from eaglefeed.storage.base import open_store
from eaglefeed.storage.peer import PeerStore
from faults.processes import in_thread, wait_until
from peers import PeerRun, keeping, make_and_vanish, pulling, put, stream_of

THREE = tuple(pipeline.prompt(index) for index in range(3))


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GONE_S", 0.05)
    monkeypatch.setattr(leasing, "_GONE_DELAY_S", 0.05)
    monkeypatch.setattr(leasing, "_RECALL_S", 0.05)
    monkeypatch.setattr(worker, "_RECALL_S", 0.2)


@pytest.fixture
def run() -> Iterator[PeerRun]:
    with keeping() as store:
        yield PeerRun(store=store)


def test_a_producer_that_is_told_to_stop_stays_until_its_samples_are_trained_on(run: PeerRun) -> None:
    run.feed(*THREE, close=False)
    stop = threading.Event()
    thread = in_thread(lambda: run.worker().run(stop))
    wait_until(lambda: run.held == 3)
    stop.set()
    run.feed(pipeline.prompt(3))
    thread.join(1.5)
    assert thread.is_alive()
    with pulling() as puller, stream_of(run, puller) as stream:
        assert [batch.sample_ids for batch in stream.take(3)] == [("p-0",), ("p-1",), ("p-2",)]
        stream.ack()
        thread.join(20)
    assert not thread.is_alive()
    assert (run.prompts.stats().ready, run.prompts.stats().done) == (1, 3)


def test_a_producer_that_stays_says_at_the_first_signal_what_a_second_one_costs(run: PeerRun) -> None:
    run.feed(*THREE)
    stop = threading.Event()
    with structlog.testing.capture_logs() as logs:
        thread = in_thread(lambda: run.worker().run(stop))
        wait_until(lambda: bool(_told(logs, "producer_stays_for_samples")))
        stop.set()
        wait_until(lambda: len(_told(logs, "producer_stays_for_samples")) == 2)
        thread.join(1.5)  # it is said once
        _bury(run, "p-0", "p-1", "p-2")
        thread.join(20)
    before, after = _told(logs, "producer_stays_for_samples")
    assert "note" not in before
    assert after["count"] == 3
    assert "a second signal drops them" in after["note"]


def _told(logs: Sequence[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [line for line in logs if line["event"] == event]


def test_a_producer_that_waits_for_room_says_so_once_a_minute_and_what_fills_its_store(
    little_room: PeerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_WAIT_S", 0.05)
    little_room.feed(THREE[0], close=False)
    doing, stop = little_room.worker(lease_batch=1), threading.Event()
    with structlog.testing.capture_logs() as logs:
        thread = in_thread(lambda: doing.run(stop))
        try:
            wait_until(lambda: little_room.held == 1)
            little_room.feed(THREE[1], close=False)
            wait_until(lambda: doing.stats.paused_s > 0.3)
            assert len(_told(logs, "producer_waits_for_room")) == 1
            little_room.clock.advance(61)
            wait_until(lambda: len(_told(logs, "producer_waits_for_room")) == 2)
        finally:
            stop.set()
            _bury(little_room, "p-0")
            thread.join(20)
    line, (free, total) = _told(logs, "producer_waits_for_room")[0], little_room.store.health()
    assert (line["held_bytes"], line["bound_bytes"]) == (total - free, total)
    assert line["held_bytes"] > 0


def test_a_producer_that_is_told_to_stop_does_not_stay_for_the_samples_of_others(run: PeerRun) -> None:
    with keeping() as other:
        make_and_vanish(run, other, THREE[0])
        run.feed(THREE[1], close=False)
        stop = threading.Event()
        thread = in_thread(lambda: run.worker().run(stop))
        wait_until(lambda: run.held == 2)
        _bury(run, "p-1")  # its tensors stay with it, and nobody needs them
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert run.prompts.held_for(run.samples) == 1


def _bury(run: PeerRun, *names: str) -> None:
    lease = run.samples.lease(9, visibility_timeout_s=60, consumer="t")
    assert isinstance(lease, Lease)
    run.samples.nack(lease.token, names, reason="bad", retryable=False)
    others = [item.id for item in lease.items if item.id not in names]
    if others:
        run.samples.nack(lease.token, others, reason="not mine", delay_s=0)


def test_a_producer_that_is_stopped_at_once_leaves_its_prompts_to_others_at_once(
    run: PeerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        if run.held == 3:
            raise KeyboardInterrupt

    run.feed(*THREE)
    with pytest.raises(KeyboardInterrupt):
        run.worker(tidy=interrupt).run(threading.Event())
    assert run.prompts.recall(run.samples) == 3
    assert (run.prompts.stats().ready, run.samples.stats().parked) == (3, 3)


def test_a_producer_stays_for_what_another_one_keeps_which_may_die(run: PeerRun) -> None:
    with keeping() as other:
        make_and_vanish(run, other, THREE[0])
        run.prompts.close()
        thread = in_thread(run.produce)
        thread.join(1.5)
        assert thread.is_alive()
    run.clock.advance(31)
    with pulling() as puller, stream_of(run, puller) as stream:
        assert [batch.sample_ids for batch in stream] == [("p-0",)]
    thread.join(20)
    assert not thread.is_alive()


def test_dead_letters_keep_no_producer_alive(run: PeerRun) -> None:
    run.feed(*THREE)
    thread = in_thread(run.produce)
    wait_until(lambda: run.held == 3)
    lease = run.samples.lease(3, visibility_timeout_s=60, consumer="t")
    assert isinstance(lease, Lease)
    run.samples.nack(lease.token, ["p-0"], reason="bad", retryable=False)
    run.samples.ack(lease.token, ["p-1", "p-2"])
    thread.join(20)
    assert not thread.is_alive()
    assert (run.held, run.samples.stats().dead) == (1, 1)


def test_a_producer_leases_no_more_than_it_can_keep() -> None:
    with keeping() as store:
        size = put(store).stored_bytes
    with keeping(capacity_bytes=int(2.5 * size)) as store, pulling() as puller:
        run = PeerRun(store=store)
        run.feed(*(pipeline.prompt(index) for index in range(12)))
        thread = in_thread(lambda: run.produce(lease_batch=4))
        most = 0
        with stream_of(run, puller, prefetch=1) as stream:
            for batch in stream:
                most = max(most, run.held)
                assert store.health().free_bytes >= 0
                del batch
        thread.join(20)
    assert not thread.is_alive()
    assert 1 <= most <= 2.5 * size / 1000
    assert run.target.calls <= 12 + 4


@pytest.fixture
def little_room() -> Iterator[PeerRun]:
    """A producer that can keep one sample."""
    with keeping() as store:
        size = put(store).stored_bytes
    with keeping(capacity_bytes=int(1.5 * size)) as store:
        yield PeerRun(store=store)


def test_dead_letters_that_fill_a_producers_room_do_not_keep_it_and_the_trainer_waiting(little_room: PeerRun) -> None:
    little_room.feed(THREE[0])
    thread = in_thread(little_room.produce)
    wait_until(lambda: little_room.held == 1)
    _bury(little_room, "p-0")
    thread.join(20)
    assert not thread.is_alive()
    assert little_room.samples.stats().drained


def test_a_producer_whose_listener_ended_does_not_go_on_as_if_it_lived(run: PeerRun) -> None:
    run.feed(*THREE, close=False)
    errors: list[BaseException] = []
    thread = in_thread(lambda: _run_into(errors, run.worker()))
    wait_until(lambda: run.held == 3)
    run.store._server.stop(0)
    thread.join(20)
    assert not thread.is_alive()
    assert "what serves its samples has ended" in str(errors)
    assert run.prompts.recall(run.samples) == 3


def test_a_producer_whose_room_is_full_of_dead_letters_says_so_and_ends(
    little_room: PeerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_WAIT_S", 0.1)
    little_room.feed(THREE[0], close=False)
    errors: list[BaseException] = []
    thread = in_thread(lambda: _run_into(errors, little_room.worker(outage_s=1.0)))
    wait_until(lambda: little_room.held == 1)
    _bury(little_room, "p-0")
    little_room.feed(THREE[1], close=False)
    thread.join(20)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [StorageError]
    assert "dead letters" in str(errors[0])
    assert little_room.prompts.stats().ready == 1


def _run_into(errors: list[BaseException], doing: worker.ProducerWorker) -> None:
    try:
        doing.run(threading.Event())
    except StorageError as error:
        errors.append(error)


def test_a_prompt_whose_sample_no_producer_can_keep_is_a_dead_letter_and_the_run_goes_on(little_room: PeerRun) -> None:
    tokens = tuple(range(1, 2000))
    long = pipeline.prompt(0, rows=(PromptRow(tokens, (0, *(1 for _ in tokens[1:]))),), max_length=2000)
    little_room.feed(long, pipeline.prompt(1, max_length=2000))
    thread = in_thread(little_room.produce)
    with pulling() as puller:
        assert [batch.sample_ids for batch in _batches(little_room, puller)] == [("p-1",)]
    thread.join(20)
    assert not thread.is_alive()
    assert [(letter.id, letter.delivery_count) for letter in little_room.prompts.dead_letters()] == [("p-0", 1)]


def test_the_files_of_a_run_that_were_read_are_there_when_its_producers_have_ended(
    run: PeerRun, tmp_path: Path
) -> None:
    run.feed(THREE[0])
    thread = in_thread(run.produce)
    wait_until(lambda: run.held == 1)
    uris = [decode_ref(item.payload).store_uri for item in run.samples.payloads()]
    dead = "nccl://127.0.0.1:1/0123456789abcdef"
    with pulling(discover=lambda: [dead, *uris], documents=open_store(str(tmp_path))) as puller:
        assets = load_run_assets(puller)
        assert [batch.sample_ids for batch in _batches(run, puller)] == [("p-0",)]
    thread.join(20)
    with pulling(documents=open_store(str(tmp_path))) as puller:
        again = load_run_assets(puller)
    assert (again.contract, again.metadata, again.config) == (assets.contract, assets.metadata, assets.config)
    assert again.tensors.keys() == assets.tensors.keys() == {"norm.weight"}
    with pulling() as puller, pytest.raises(SampleMissing):
        load_run_assets(puller)


def _batches(run: PeerRun, puller: PeerStore) -> Iterator[Eagle3TargetBatch]:
    with stream_of(run, puller) as stream:
        yield from stream
