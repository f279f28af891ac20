"""What a trainer gets from a stream, whatever happens to samples, leases and producers."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import pipeline
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import NoProducers, QueueUnavailable
from eaglefeed.queue.base import AckResult, Lease, QueueItem
from eaglefeed.schema.refs import decode_ref, encode_ref
from eaglefeed.storage.memory import MemoryStore


@pytest.fixture
def run() -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(6)))
    made.produce()
    return made


@pytest.fixture
def streams() -> Iterator[list[SampleStream]]:
    opened: list[SampleStream] = []
    yield opened
    for stream in opened:
        stream.close()


def _stream(run: pipeline.Run, opened: list[SampleStream] | None = None, **options: object) -> SampleStream:
    stream = SampleStream(run.samples, run.store, consumer="t", **options)  # type: ignore[arg-type]
    if opened is not None:
        opened.append(stream)
    return stream


def _ids(batches: list[object]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]  # type: ignore[attr-defined]


def test_a_plain_loop_sees_every_sample_once_and_settles_all(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        seen = [batch.sample_ids[0] for batch in stream]
    assert sorted(seen) == [f"p-{index}" for index in range(6)]
    assert run.samples.stats().done == 6
    assert stream.stats.acked == 6
    assert stream.stats.returned == 0


def test_a_trainer_begins_while_what_an_earlier_one_had_committed_is_still_being_deleted(
    run: pipeline.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = run.samples.lease(2, visibility_timeout_s=60, consumer="killed")
    assert isinstance(lease, Lease)
    run.samples.ack(lease.token, [item.id for item in lease.items])
    may_go, delete = threading.Event(), run.store.delete

    def slowly(ref: Any) -> bool:
        assert may_go.wait(60)
        return delete(ref)

    monkeypatch.setattr(run.store, "delete", slowly)
    with _stream(run) as stream:
        assert len(stream.take(1)) == 1
        assert run.samples.stats().released == 2
        may_go.set()
    assert run.samples.stats().released == 0


def test_shards_go_after_their_ack(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        list(stream)
    assert list(run.store.scan()) == []


def test_retained_shards_stay(run: pipeline.Run) -> None:
    with _stream(run, retain=True) as stream:
        list(stream)
    assert len(list(run.store.scan())) == 6


def test_a_plain_loop_acks_a_batch_only_when_it_asks_for_the_next(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        for number, _ in enumerate(stream):
            assert run.samples.stats().done == number
            if number == 2:
                break
        assert run.samples.stats().done == 2
    assert run.samples.stats().ready == 4


def test_a_body_that_raises_leaves_its_batch_unsettled(run: pipeline.Run) -> None:
    def train(stream: SampleStream) -> None:
        for _ in stream:
            raise ZeroDivisionError

    with _stream(run) as stream, pytest.raises(ZeroDivisionError):
        train(stream)
    assert run.samples.stats().done == 0
    assert run.samples.stats().ready == 6


def test_take_never_acks_by_itself(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        assert len(stream.take(4)) == 4
        assert len(stream.take(9, linger_s=0.2)) == 2
        assert run.samples.stats().done == 0
        assert stream.ack() == 6
        assert run.samples.stats().done == 6
        assert stream.take(1) == []
        assert stream.ended


def test_take_comes_back_empty_handed_while_its_own_samples_keep_the_queue_open(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        stream.take(6)
        assert stream.take(1, wait_s=0.1) == []
        assert not stream.ended


def test_what_is_not_acked_goes_back_in_order_without_counting_a_delivery(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        first = _ids(stream.take(3))
    assert stream.stats.returned >= 3
    with _stream(run) as stream:
        assert _ids(stream.take(3)) == first
        assert stream.stats.redelivered == 0


def test_a_tensor_kept_past_its_ack_does_not_change(run: pipeline.Run) -> None:
    with _stream(run) as stream:
        kept = stream.take(1)[0].aux_hidden_states
        before = kept.clone()
        stream.ack()
        list(stream)
    assert torch.equal(kept, before)


def test_a_corrupt_sample_is_a_dead_letter_with_its_reason_and_the_rest_goes_on(run: pipeline.Run) -> None:
    store = run.store
    assert isinstance(store, MemoryStore)
    key = next(shard.key for shard in store.scan() if "p-2." in shard.key)
    data, modified_s = store._shards[key]
    store._shards[key] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)
    with _stream(run) as stream:
        seen = [batch.sample_ids[0] for batch in stream]
    assert sorted(seen) == ["p-0", "p-1", "p-3", "p-4", "p-5"]
    (letter,) = run.samples.dead_letters()
    assert letter.id == "p-2"
    assert "SampleCorrupt" in letter.reason
    assert "checksum" in letter.reason
    assert stream.stats.dead == 1
    assert [shard.key for shard in store.scan()] == [key]


def test_a_sample_of_another_contract_is_set_aside(run: pipeline.Run) -> None:
    with _stream(run, contract="another") as stream:
        assert list(stream) == []
    assert run.samples.stats().dead == 6
    assert all("ContractMismatch" in letter.reason for letter in run.samples.dead_letters())


def test_a_ref_of_another_schema_version_is_set_aside() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*(pipeline.prompt(index) for index in range(2)), close=False)
    stop = threading.Event()
    run.target.before = lambda ids: stop.set() if ids[0, 0] == 2 else None
    run.worker().run(stop)
    ref = decode_ref(next(iter(run.samples.payloads())).payload)
    run.samples.put([QueueItem("p-9", encode_ref(replace(ref, sample_id="p-9", schema_version=9)))])
    run.samples.close()
    with _stream(run) as stream:
        assert len(list(stream)) == 2
    (letter,) = run.samples.dead_letters()
    assert "SchemaVersionError" in letter.reason


def test_garbage_instead_of_a_ref_is_set_aside() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.samples.put([QueueItem("junk", b"\xc1")])
    run.samples.close()
    with _stream(run) as stream:
        assert list(stream) == []
    assert "SchemaError" in next(run.samples.dead_letters()).reason


def test_a_shard_that_is_not_there_is_tried_again_and_then_set_aside(run: pipeline.Run) -> None:
    ref = decode_ref(next(iter(run.samples.payloads())).payload)
    run.store.delete(ref)
    with _stream(run, visibility_timeout_s=1e6) as stream:
        seen: list[str] = []
        while not stream.ended:
            seen += _ids(stream.take(1, wait_s=0.05))
            stream.ack()
            run.clock.advance(30)
    assert len(seen) == 5
    assert stream.stats.retried == 4
    (letter,) = run.samples.dead_letters()
    assert (letter.id, letter.delivery_count) == (ref.sample_id, 5)
    assert "SampleMissing" in letter.reason


def test_an_ack_after_the_lease_was_lost_is_stale_and_never_silent(run: pipeline.Run) -> None:
    with _stream(run, lease_batch=6, prefetch=6) as stream:
        taken = _ids(stream.take(6))
        run.clock.advance(61)
        other = run.samples.lease(1, visibility_timeout_s=60, consumer="other")
        assert isinstance(other, Lease)
        assert stream.ack() == 0
        assert stream.stats.stale == len(taken) == 6
        assert len(list(run.store.scan())) == 6
        assert run.samples.stats().done == 0


def _failing_acks(run: pipeline.Run, failures: int) -> None:
    plain, left = run.samples.ack, [failures]

    def ack(token: int, ids: list[str], **options: Any) -> AckResult:
        if left[0]:
            left[0] -= 1
            raise QueueUnavailable("server", "away")
        return plain(token, ids, **options)

    run.samples.ack = ack  # type: ignore[method-assign,assignment]


def test_an_ack_bears_a_short_outage(run: pipeline.Run) -> None:
    _failing_acks(run, 2)
    with _stream(run) as stream:
        stream.take(3)
        assert stream.ack() == 3
        assert stream.stats.stale == 0


def test_an_ack_that_does_not_reach_the_queue_can_be_repeated(run: pipeline.Run) -> None:
    _failing_acks(run, 1)
    with _stream(run, outage_s=-1.0) as stream:
        stream.take(3)
        with pytest.raises(QueueUnavailable):
            stream.ack()
        assert stream.ack() == 3


def test_an_outage_shorter_than_the_limit_is_survived(run: pipeline.Run) -> None:
    plain = run.samples.lease
    failures = [3]

    def lease(n: int, **options: object) -> object:
        if failures[0]:
            failures[0] -= 1
            raise QueueUnavailable("server", "away")
        return plain(n, **options)  # type: ignore[arg-type]

    run.samples.lease = lease  # type: ignore[method-assign,assignment]
    with _stream(run, clock=run.clock) as stream:
        assert len(list(stream)) == 6


def test_an_outage_beyond_the_limit_ends_the_loop_with_its_error(run: pipeline.Run) -> None:
    def lease(n: int, **options: object) -> object:
        raise QueueUnavailable("server", "away")

    run.samples.lease = lease  # type: ignore[method-assign,assignment]
    with _stream(run, clock=run.clock, outage_s=0.5) as stream, pytest.raises(QueueUnavailable):
        list(stream)


def test_a_bug_in_the_background_ends_the_loop_instead_of_hanging_it(run: pipeline.Run) -> None:
    def lease(n: int, **options: object) -> object:
        raise KeyError("bug")

    run.samples.lease = lease  # type: ignore[method-assign,assignment]
    threading.excepthook, before = lambda _args: None, threading.excepthook
    try:
        with _stream(run) as stream, pytest.raises(Exception, match="this is a bug"):
            list(stream)
    finally:
        threading.excepthook = before


def test_a_trainer_can_be_told_to_stop_while_it_waits(streams: list[SampleStream]) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    stream = _stream(run, streams)
    timer = threading.Timer(0.2, stream.stop)
    timer.start()
    assert stream.take(1) == []
    assert stream.ended


def test_a_trainer_without_producers_fails_if_it_is_told_to() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(pipeline.prompt(0))
    with (
        _stream(run, prompts=run.prompts, fail_without_producers=True, producer_grace_s=1, clock=run.clock) as stream,
        pytest.raises(NoProducers, match="1 prompts remain"),
    ):
        list(stream)


def test_a_living_producer_is_waited_for() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(pipeline.prompt(0))
    clock = run.clock
    stop = threading.Event()

    def live() -> None:
        while not stop.is_set():
            run.prompts.beat("producer", "slow")
            SYSTEM_CLOCK.sleep(0.001)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with _stream(run, prompts=run.prompts, fail_without_producers=True, producer_grace_s=30, clock=clock) as stream:
            for _ in range(20):
                assert stream.take(1, wait_s=0.02) == []
                clock.advance(5)
            assert not stream.ended
    finally:
        stop.set()
        thread.join(10)


def test_the_buffer_is_bounded() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*(pipeline.prompt(index) for index in range(40)))
    run.produce()
    with _stream(run, lease_batch=4, prefetch=4) as stream:
        stream.take(1)
        SYSTEM_CLOCK.sleep(0.3)
        assert run.samples.stats().leased <= 1 + 4 + 2 * 4
