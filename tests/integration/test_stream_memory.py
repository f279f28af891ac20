"""The memory of a stream: bounded, used again, and never while somebody still looks at it. And its policies."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import draft_samples
import pipeline
import samples
from eaglefeed.cli import common
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import load_settings
from eaglefeed.consumer import stream as stream_module
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.run import TrainingRun
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import BuffersHeld, ConfigError, StorageError
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from eaglefeed.storage.base import is_verified, shard_key
from eaglefeed.storage.buffers import BufferRing


def _run(num_samples: int) -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(num_samples)))
    made.produce()
    return made


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each buffer that a ring ever made."""
    made: list[int] = []
    plain = BufferRing._make

    def make(ring: BufferRing, num_bytes: int) -> object:
        made.append(num_bytes)
        return plain(ring, num_bytes)

    monkeypatch.setattr(BufferRing, "_make", make)
    return made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that keeps too much is found out at once."""
    monkeypatch.setattr(stream_module, "BufferRing", functools.partial(BufferRing, deadline_s=0.3))


def _first_id(batch: Any) -> float:
    """What EchoTarget wrote into the sample's states: 1 + the prompt's number."""
    return float(batch.aux_hidden_states[0, 0, 0])


def test_memory_is_bounded_by_prefetch_and_what_the_loop_may_hold(allocations: list[int]) -> None:
    run = _run(45)
    with SampleStream(run.samples, run.store, consumer="t", prefetch=2, held=3) as stream:
        seen = [_first_id(batch) for batch in stream]
    assert sorted(seen) == [1.0 + index for index in range(45)]
    assert 2 <= len(allocations) <= 2 + 3 + 1


@pytest.mark.usefixtures("impatient")
def test_the_stream_itself_keeps_nothing_of_what_the_loop_has_dropped() -> None:
    run = _run(30)
    with SampleStream(run.samples, run.store, consumer="t", prefetch=1, held=1) as stream:
        assert sum(1 for _ in stream) == 30
    run = _run(30)
    taken = 0
    with SampleStream(run.samples, run.store, consumer="t", prefetch=1, held=1, lease_batch=1) as stream:
        while not stream.ended:
            taken += len(stream.take(1))  # acknowledged only now and then
            if taken % 10 == 0:
                stream.ack(taken)
    assert taken == 30


def test_a_batch_that_the_loop_drops_is_free_at_once() -> None:
    run = _run(5)
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        for batch in stream:
            tensor = weakref.ref(batch.aux_hidden_states)
            del batch
            assert tensor() is None


def test_tensors_and_views_kept_past_their_ack_keep_their_values_over_many_later_samples(
    allocations: list[int],
) -> None:
    run = _run(45)
    kept: list[tuple[Tensor, Tensor]] = []
    with SampleStream(run.samples, run.store, consumer="t", prefetch=2, held=8) as stream:
        for number, batch in enumerate(stream):
            if number < 3:
                kept.append((batch.aux_hidden_states, batch.aux_hidden_states.clone()))
            elif number < 6:
                view = batch.logits[:, 1:, ::7]  # type: ignore[index]
                kept.append((view, view.clone()))
            del batch
    assert all(torch.equal(tensor, before) for tensor, before in kept)
    assert len({float(tensor.sum()) for tensor, _ in kept[:3]}) == 3
    assert len(allocations) <= 2 + 8 + 1


@pytest.mark.parametrize("keep", [lambda batch: batch, lambda batch: batch.logits[:, :1]], ids=["batches", "views"])
def test_a_loop_that_keeps_more_than_it_said_is_told_which(keep: Callable[[Any], object]) -> None:
    run, clock = _run(12), pipeline.TurnableClock()
    kept, names = [], set[str]()

    def learn(stream: SampleStream) -> None:
        while not stream.drained:
            for batch in stream.take(1, wait_s=0.05):
                kept.append(keep(batch))
                names.update(batch.sample_ids)
                del batch
            clock.advance(30)

    with SampleStream(run.samples, run.store, consumer="t", prefetch=1, held=2, clock=clock) as stream:
        with pytest.raises(BuffersHeld, match="raise held") as caught:
            learn(stream)
        with pytest.raises(BuffersHeld):
            stream.take(1)
        assert len(kept) == 4
        assert caught.value.holders == sorted(names)
        assert f"held by tensors of {', '.join(sorted(names))};" in str(caught.value)
    stats = run.samples.stats()
    assert (stats.ready, stats.dead, stats.redelivered) == (12, 0, 0)
    assert stream.stats.retried == 0


@contextlib.contextmanager
def _exhausted(run: pipeline.Run) -> Iterator[tuple[SampleStream, list[object]]]:
    """A stream whose background waits for a buffer, and what holds them all."""
    kept: list[object] = []
    with SampleStream(run.samples, run.store, consumer="t", prefetch=1, held=1) as stream:
        while len(kept) < 3:
            kept += stream.take(1)
        assert stream.take(1, wait_s=0.1) == []
        yield stream, kept


def test_a_stop_ends_the_wait_for_a_buffer() -> None:
    run = _run(8)
    with _exhausted(run) as (stream, _kept):
        threading.Timer(0.1, stream.stop).start()
        assert stream.take(1) == []
    assert (run.samples.stats().ready, run.samples.stats().dead, stream.stats.retried) == (8, 0, 0)


def test_a_close_ends_the_wait_for_a_buffer_and_gives_everything_back() -> None:
    run = _run(8)
    with _exhausted(run) as (stream, _kept):
        stream.close()
        assert not stream._taker._prefetcher._thread.is_alive()
    assert (run.samples.stats().ready, run.samples.stats().dead, stream.stats.retried) == (8, 0, 0)


def test_a_buffer_that_comes_back_ends_the_wait() -> None:
    run = _run(8)
    with _exhausted(run) as (stream, kept):
        kept.pop(0)
        assert len(stream.take(1)) == 1


def test_a_take_of_more_than_may_be_held_is_refused_at_once() -> None:
    run = _run(1)
    with (
        SampleStream(run.samples, run.store, consumer="t", held=3) as stream,
        pytest.raises(ConfigError, match=r"wanted held 3, got 4; pass held=4"),
    ):
        stream.take(4)


@pytest.mark.usefixtures("impatient")
def test_a_training_run_keeps_nothing_of_the_step_before(tmp_path: Path) -> None:
    run = _run(20)
    sizes = {"hidden_size": samples.H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    config = replace(draft_samples.CONFIG, **sizes, vocab_size=pipeline.VOCAB, draft_vocab_size=pipeline.VOCAB)
    trainer = DraftTrainer(Eagle3Draft(config, seed=0))
    with SampleStream(run.samples, run.store, consumer="t", prefetch=1, held=4) as stream:
        assert TrainingRun(trainer, stream, tmp_path, contract="c", samples_per_step=4).train() == 5


# policies


def _put_with_a_nan(run: pipeline.Run, numbers: range) -> None:
    """Whole shards of wrong values, as no producer writes them."""
    model = decode_ref(next(iter(run.samples.payloads())).payload)
    tensors = run.store.get(model)
    tensors["aux_hidden_states"][0, 1, 2] = float("nan")
    for number in numbers:
        name = f"bad-{number}"
        keys = dict.fromkeys(tensors, shard_key(name, 7))
        ref = run.store.put(replace(model, sample_id=name, feature_keys=keys), tensors)
        run.samples.put([QueueItem(name, encode_ref(ref), ref.stored_bytes)])


def _open_run() -> pipeline.Run:
    """One good sample in a queue that is open, then forty whose values are wrong."""
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(pipeline.prompt(0), close=False)
    stop = threading.Event()
    run.target.before = lambda _ids: stop.set()
    run.worker().run(stop)
    _put_with_a_nan(run, range(40))
    run.samples.close()
    return run


@pytest.mark.parametrize("values", ["always", "sample", "never"])
def test_values_are_checked_by_policy(values: Any) -> None:
    run = _open_run()
    refused = {"always": 40, "sample": sum(is_verified("sample", f"bad-{n}") for n in range(40)), "never": 0}[values]
    with SampleStream(run.samples, run.store, consumer="t", values=values, retain=True) as stream:
        assert sum(1 for _ in stream) == 41 - refused
    letters = {letter.id: letter for letter in run.samples.dead_letters()}
    assert len(letters) == refused
    assert values != "sample" or 0 < refused < 40
    for name, letter in letters.items():
        assert f"SampleCorrupt: {name} ({shard_key(name, 7)}): aux_hidden_states: not finite" in letter.reason
        assert letter.delivery_count == 1
    assert {shard_key(name, 7) for name in letters} <= {shard.key for shard in run.store.scan()}


@pytest.mark.parametrize(("failures", "dead"), [(4, 0), (5, 1)])
def test_a_read_that_fails_is_tried_again_so_often(failures: int, dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(3)
    plain, left = run.store.get, [failures]

    def get(ref: SampleRef, ring: BufferRing | None = None) -> dict[str, Tensor]:
        if ref.sample_id == "p-1" and left[0]:
            left[0] -= 1
            raise StorageError("EIO", subject=ref.sample_id)
        return plain(ref, ring)

    monkeypatch.setattr(run.store, "get", get)
    with SampleStream(run.samples, run.store, consumer="t", visibility_timeout_s=1e6) as stream:
        seen = 0
        while not stream.ended:
            seen += len(stream.take(1, wait_s=0.02))
            stream.ack()
            run.clock.advance(30)
            SYSTEM_CLOCK.sleep(0.001)
    assert (seen, stream.stats.retried, stream.stats.dead) == (3 - dead, 4, dead)
    assert [(letter.id, letter.delivery_count) for letter in run.samples.dead_letters()] == [("p-1", 5)] * dead


def test_the_stores_policies_come_from_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    plain = common.open_store

    def opened(uri: str, **policies: Any) -> object:
        asked.append(policies)
        return plain(uri, **policies)

    monkeypatch.setattr(common, "open_store", opened)
    words = [f"store.uri=file://{tmp_path}", "store.durability=none", "store.verify=sample", "store.values=never"]
    settings = load_settings(None, words)
    with common.opened_store(settings):
        pass
    assert asked == [{"durability": "none", "verify": "sample"}]
    assert settings.store.values == "never"
    for word in ("store.durability=some", "store.verify=often", "store.values=maybe"):
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            load_settings(None, [word])
