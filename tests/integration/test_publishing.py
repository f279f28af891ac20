"""A shard is seen when it is whole, and not before: by name, by ref, by many readers and among many writers."""

import multiprocessing
import os
import stat
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import pipeline
import samples
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import StorageError
from eaglefeed.queue.base import Lease, QueueItem
from eaglefeed.schema.refs import decode_ref, encode_ref
from eaglefeed.storage.shared_dir import SharedDirStore

PATIENCE_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> SharedDirStore:
    return SharedDirStore(tmp_path / "store", durability="none")


@pytest.mark.parametrize("call", ["pwrite", "fsync", "link"])
def test_while_a_write_is_under_way_no_ref_is_queued_and_no_name_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    run = pipeline.Run(store=SharedDirStore(tmp_path / "store"))
    run.feed(pipeline.prompt(0))
    reached, go_on, real = threading.Event(), threading.Event(), getattr(os, call)

    def held(*args: object, **named: object) -> object:
        if threading.current_thread().name == "eaglefeed-writer":
            reached.set()
            assert go_on.wait(PATIENCE_S)
        return real(*args, **named)

    monkeypatch.setattr(os, call, held)
    producer = threading.Thread(target=run.produce)
    producer.start()
    try:
        assert reached.wait(PATIENCE_S)
        assert run.samples.stats().ready == 0
        assert list(run.store.scan()) == []
    finally:
        go_on.set()
        producer.join(PATIENCE_S)
    assert run.samples.stats().ready == 1
    (found,) = run.store.scan()
    assert run.store.read_ref(found.key).sample_id == "p-0"


def test_data_name_and_folder_are_on_the_device_before_a_ref_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pipeline.Run(store=SharedDirStore(tmp_path / "store"))
    run.feed(pipeline.prompt(0))
    done: list[str] = []

    def note(name: str, of: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            if threading.current_thread().name == "eaglefeed-writer":
                is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)  # type: ignore[arg-type]
                done.append("fsync of a folder" if is_folder else name)
            return of(*args, **named)

        return call

    for name in ("pwrite", "fsync", "link"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    monkeypatch.setattr(run.prompts, "handoff", note("handoff", run.prompts.handoff))
    assert run.produce().produced == 1
    in_order = [name for at, name in enumerate(done) if at == 0 or done[at - 1] != name]
    assert in_order == ["fsync of a folder", "pwrite", "fsync", "link", "fsync of a folder", "handoff"]


def test_readers_beside_writers_never_see_half_a_shard_nor_wait_for_one(store: SharedDirStore) -> None:
    run, num_writers, num_each = pipeline.Run(store=store), 4, 125
    faults: list[str] = []
    seen: list[str] = []

    def write(writer: int) -> None:
        for number in range(num_each):
            features = samples.tensors(length=30, seed=number)
            ref = samples.ref(features, sample_id=f"s-{writer}-{number}", token=number + 1, num_tokens=60)
            ref = store.put(ref, features)
            run.samples.put([QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)])

    def read(reader: int) -> None:
        while len(seen) + len(faults) < num_writers * num_each and any(each.is_alive() for each in threads):
            lease = run.samples.lease(4, visibility_timeout_s=1e6, consumer=f"r{reader}")
            for item in lease.items if isinstance(lease, Lease) else ():
                try:
                    found = store.get(decode_ref(item.payload))  # once: no second look, no sleep
                except StorageError as error:
                    faults.append(str(error))
                else:
                    wanted = samples.tensors(length=30, seed=int(item.id.rpartition("-")[2]))
                    assert torch.equal(found["aux_hidden_states"], wanted["aux_hidden_states"])
                    seen.append(item.id)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(num_writers)]
    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in (*threads, *readers):
        thread.start()
    for thread in (*threads, *readers):
        thread.join(60)
    read(9)
    assert faults == []
    assert len(seen) == len(set(seen)) == num_writers * num_each


def _begin_write(root: Path, rank: int, barrier: "multiprocessing.synchronize.Barrier", told: Connection) -> None:
    """A rank of a target that is spread over four, each of which takes itself for the one that publishes."""
    torch.set_num_threads(1)
    store = SharedDirStore(root, durability="none")
    features = samples.tensors(seed=3)
    barrier.wait(60)
    try:
        told.send(encode_ref(store.put(samples.ref(features), features)))
    except StorageError as error:
        told.send(f"{rank}: {error}")


def test_of_four_ranks_that_write_one_sample_one_does_and_its_ref_is_the_only_one(store: SharedDirStore) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["samples", "eaglefeed.storage.shard"])
    barrier, pipes = context.Barrier(4), [context.Pipe(duplex=False) for _ in range(4)]
    ranks = [
        context.Process(target=_begin_write, args=(store.root, rank, barrier, pipes[rank][1])) for rank in range(4)
    ]
    for process in ranks:
        process.start()
    told = [reader.recv() for reader, _ in pipes if reader.poll(60)]
    for process in ranks:
        process.join(60)
    (payload,) = [each for each in told if isinstance(each, bytes)]
    assert sum("written before, shards are never replaced" in each for each in told if isinstance(each, str)) == 3
    assert [path.name for path in store.root.rglob("*") if path.is_file()] == ["a-1.7.safetensors"]
    run = pipeline.Run(store=store)
    ref = decode_ref(payload)
    run.samples.put([QueueItem(ref.sample_id, payload, ref.stored_bytes)])
    lease = run.samples.lease(9, visibility_timeout_s=60, consumer="t")
    assert isinstance(lease, Lease)
    (item,) = lease.items
    assert torch.equal(store.get(decode_ref(item.payload))["input_ids"], samples.tensors(seed=3)["input_ids"])


def test_a_put_that_fails_is_no_ref_and_the_trainer_ends_with_what_there_is(store: SharedDirStore) -> None:
    run = pipeline.Run(store=store)
    run.feed(*(pipeline.prompt(index % 40, sample_id=f"p-{index}") for index in range(100)))
    put = store.put

    def failing(ref: object, tensors: object) -> object:
        if int(ref.sample_id[2:]) % 10 == 3:  # type: ignore[attr-defined]
            raise StorageError("the disk said no", subject=ref.sample_id)  # type: ignore[attr-defined]
        return put(ref, tensors)  # type: ignore[arg-type]

    store.put = failing  # type: ignore[method-assign,assignment]
    stats = run.produce(max_attempts=1)
    assert (stats.produced, stats.dead, stats.retried) == (90, 10, 0)
    assert run.samples.stats().ready == 90
    letters = {letter.id: letter for letter in run.prompts.dead_letters()}
    assert set(letters) == {f"p-{index}" for index in range(3, 100, 10)}
    assert all(letter.reason == f"StorageError: {name}: the disk said no" for name, letter in letters.items())
    with SampleStream(run.samples, store, consumer="t", prompts=run.prompts, fail_without_producers=True) as stream:
        delivered = [batch.sample_ids[0] for batch in stream]
    assert sorted(delivered) == sorted(f"p-{index}" for index in range(100) if index % 10 != 3)
    assert stream.drained


def test_a_prompt_whose_put_fails_now_and_then_is_delivered_once(store: SharedDirStore) -> None:
    run = pipeline.Run(store=store)
    run.feed(*(pipeline.prompt(index) for index in range(30)))
    put, tries = store.put, list[str]()

    def failing(ref: object, tensors: object) -> object:
        tries.append(ref.sample_id)  # type: ignore[attr-defined]
        if len(tries) % 10 == 0:
            raise StorageError("the disk said no")
        return put(ref, tensors)  # type: ignore[arg-type]

    store.put = failing  # type: ignore[method-assign,assignment]
    stats = run.produce()
    assert (stats.produced, stats.dead, stats.retried) == (30, 0, len(tries) - 30)
    assert stats.retried > 0
    assert len({item.id for item in run.samples.payloads()}) == 30
