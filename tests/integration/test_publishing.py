"""A shard is seen when it is whole, and not before: by name, by ref, by many readers and among many writers."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
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


NUM_WRITERS, NUM_EACH = 4, 125


def _write(run: pipeline.Run, writer: int) -> None:
    for number in range(NUM_EACH):
        features = samples.tensors(length=30, seed=number)
        ref = samples.ref(features, sample_id=f"s-{writer}-{number}", token=number + 1, num_tokens=60)
        ref = run.store.put(ref, features)
        run.samples.put([QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)])


def _read(run: pipeline.Run, reader: int, seen: list[tuple[str, str]]) -> None:
    pause = threading.Event()
    while len(seen) < NUM_WRITERS * NUM_EACH:
        lease = run.samples.lease(4, visibility_timeout_s=1e6, consumer=f"r{reader}")
        if not isinstance(lease, Lease):
            pause.wait(0.002)  # leaves the processor to the writers
            continue
        for item in lease.items:
            try:
                found = run.store.get(decode_ref(item.payload))  # once: no second look, no sleep
                wanted = samples.tensors(length=30, seed=int(item.id.rpartition("-")[2]))
                same = torch.equal(found["aux_hidden_states"], wanted["aux_hidden_states"])
                seen.append((item.id, "right" if same else "other values"))
            except StorageError as error:
                seen.append((item.id, str(error)))


def test_readers_beside_writers_never_see_half_a_shard_nor_wait_for_one(store: SharedDirStore) -> None:
    run, seen = pipeline.Run(store=store), list[tuple[str, str]]()
    threads = [threading.Thread(target=_write, args=(run, number)) for number in range(NUM_WRITERS)]
    threads += [threading.Thread(target=_read, args=(run, number, seen), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {what for _, what in seen} == {"right"}
    assert len(seen) == len(dict(seen)) == NUM_WRITERS * NUM_EACH


_FOUR_RANKS = """
import os, sys
sys.path.insert(0, sys.argv[2])
import torch
import samples
from eaglefeed.errors import StorageError
from eaglefeed.schema.refs import encode_ref
from eaglefeed.storage.shared_dir import SharedDirStore
torch.set_num_threads(1)
features = samples.tensors(seed=3)
wait, start = os.pipe()
for rank in range(4):
    if not os.fork():
        os.close(start)
        os.read(wait, 1)  # until all are there
        store = SharedDirStore(sys.argv[1], durability="none")
        try:
            told = encode_ref(store.put(samples.ref(features), features)).hex()
        except StorageError as error:
            told = str(error)
        os.write(1, told.encode() + b"\\n")  # at once, among the others'
        os._exit(0)
os.close(start)
for rank in range(4):
    os.wait()
"""


def test_of_four_ranks_that_write_one_sample_one_does_and_its_ref_is_the_only_one(store: SharedDirStore) -> None:
    """As of a target that is spread over four, each of which takes itself for the one that publishes."""
    command = [sys.executable, "-c", _FOUR_RANKS, str(store.root), str(Path(__file__).parents[1])]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert sum("written before, shards are never replaced" in each for each in told) == 3
    (payload,) = [bytes.fromhex(each) for each in told if "written before" not in each]
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
