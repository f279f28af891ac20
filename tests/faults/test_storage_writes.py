"""Writes that fail: one clear error each, and nothing left behind."""

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from os_faults import calls_of, fail_call, instead_of, left_over

import samples
from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError, StorageError, StoreFull
from eaglefeed.producer.room import Room
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.storage import files, folder, shard
from eaglefeed.storage.base import key_of
from eaglefeed.storage.shared_dir import SharedDirStore

EXT4, TMPFS, NFS = 0xEF53, 0x01021994, 0x6969


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedDirStore]:
    opened = SharedDirStore(tmp_path / "store")
    yield opened
    opened.close()


def _fill_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small sample take many writes, on a file system that preallocates."""
    monkeypatch.setattr(shard, "CHUNK_BYTES", 64)
    monkeypatch.setattr(files, "file_system", lambda _fd: EXT4)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(
    ("call", "at"),
    [("open", 2), ("mkdir", 1), ("posix_fallocate", 1), ("pwrite", 1), ("pwrite", 2), ("pwrite", 9), ("link", 1)]
    + [("fsync", number) for number in (1, 2, 3)],
)
def test_no_room_at_any_call_is_named_and_leaves_nothing_behind(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch, call: str, at: int, code: int
) -> None:
    _fill_the_chunks(monkeypatch)
    with monkeypatch.context() as patched:
        seen = fail_call(patched, call, code, at=at)
        with pytest.raises(StoreFull, match="no room for a shard") as caught:
            store.put(samples.ref(), samples.tensors())
    assert len(seen) == at
    assert caught.value.retryable
    assert os.strerror(code) in str(caught.value)
    assert left_over(store) == []
    store.get(store.put(samples.ref(), samples.tensors()))


@pytest.mark.parametrize("durability", ["full", "data"])
def test_an_io_error_of_a_sync_is_no_full_disk_and_the_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    store = SharedDirStore(tmp_path / "store", durability=durability)  # type: ignore[arg-type]
    store.put(samples.ref(token=1), samples.tensors())
    with monkeypatch.context() as patched:
        seen = fail_call(patched, {"full": "fsync", "data": "fdatasync"}[durability], errno.EIO)
        with pytest.raises(StorageError, match=r"a-1\.7.*Input/output error") as caught:
            store.put(samples.ref(), samples.tensors())
    assert not isinstance(caught.value, StoreFull)
    assert caught.value.retryable
    assert len(seen) >= 1
    assert len(left_over(store)) == 1
    store.close()


def test_a_folder_that_cannot_be_synced_keeps_no_shard(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(samples.ref(), samples.tensors())
    with monkeypatch.context() as patched:
        fail_call(patched, "fsync", errno.EIO, at=2)
        with pytest.raises(StorageError, match="Input/output error"):
            store.put(samples.ref(token=8), samples.tensors())
    assert left_over(store) == [key_of(samples.ref())]


@pytest.mark.parametrize(("durability", "syncs"), [("full", ["fsync"] * 3), ("data", ["fdatasync"]), ("none", [])])
def test_what_is_synced_is_what_the_policy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, syncs: list[str]
) -> None:
    store = SharedDirStore(tmp_path / "store", durability=durability)  # type: ignore[arg-type]
    seen = calls_of(monkeypatch, "fsync", "fdatasync")
    store.put(samples.ref(), samples.tensors())
    assert seen == syncs  # full: the new folder's name, the file, the file's name
    store.put(samples.ref(token=8), samples.tensors())
    assert seen[len(syncs) :] == syncs[-2:]
    store.close()


def test_a_folder_that_another_process_made_is_synced_too(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = samples.ref()
    (store.root / key_of(ref)).parent.mkdir()  # and died before it synced the folder's name
    seen = calls_of(monkeypatch, "fsync")
    store.put(ref, samples.tensors())
    assert len(seen) == 3


@pytest.mark.parametrize("kind", [EXT4, TMPFS, NFS, 0])
def test_space_is_reserved_only_where_that_is_no_emulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setattr(files, "file_system", lambda _fd: kind)
    store = SharedDirStore(tmp_path / "store")
    seen = calls_of(monkeypatch, "posix_fallocate")
    ref = store.put(samples.ref(), samples.tensors())
    assert seen == (["posix_fallocate"] if kind == EXT4 else [])
    store.get(ref)
    store.close()


def test_a_short_write_is_continued(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of(monkeypatch, "pwrite", lambda real, fd, data, place: real(fd, bytes(data)[:13], place))
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    monkeypatch.undo()
    assert all(torch.equal(tensor, features[name]) for name, tensor in store.get(ref).items())


def test_a_link_across_file_systems_is_an_error_and_leaves_nothing(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_call(monkeypatch, "link", errno.EXDEV)
    with pytest.raises(StorageError, match=os.strerror(errno.EXDEV)):
        store.put(samples.ref(), samples.tensors())
    assert left_over(store) == []


def test_a_limit_on_file_sizes_is_a_full_store(store: SharedDirStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    features = samples.tensors(length=2000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(StoreFull, match="File too large"):
            store.put(samples.ref(features, num_tokens=4000), features)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_over(store) == []


def test_a_shard_that_does_not_fit_into_memory_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "file_system", lambda _fd: TMPFS)
    instead_of(monkeypatch, "statvfs", lambda real, fd: _with_free(real(fd), num_blocks=0))
    store = SharedDirStore(tmp_path / "store")
    seen = calls_of(monkeypatch, "pwrite")
    with pytest.raises(StoreFull, match="shm_size"):
        store.put(samples.ref(), samples.tensors())
    assert seen == []
    assert left_over(store) == []
    store.close()


def test_a_file_system_that_does_not_say_what_is_free_is_a_failure_of_the_store_and_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_real: object, _fd: int) -> os.statvfs_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with closing(SharedDirStore(tmp_path / "store")) as store:
        room = Room(MemoryLeaseQueue(MemoryServer(ManualClock()), "run", "samples"), store)
        room.was_missing(StoreFull(store.uri, num_bytes=10, free_bytes=5, reason="full"))
        with monkeypatch.context() as patch:
            instead_of(patch, "statvfs", stale)
            with pytest.raises(StorageError, match=r"room cannot be asked for in .*Stale file handle"):
                store.health()
            assert not room.is_there()
        assert room.is_there()


def _with_free(info: os.statvfs_result, num_blocks: int) -> os.statvfs_result:
    fields = list(info)
    fields[4] = num_blocks  # f_bavail
    return os.statvfs_result(fields)


@pytest.mark.parametrize("checked", [True, False])
def test_a_really_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        store = SharedDirStore(mounted / "store")
        features = samples.tensors(length=400, batch=4)
        if not checked:  # as when another process takes the room after the check
            monkeypatch.setattr(folder.RootFolder, "_check_room", lambda *_: None)
        with pytest.raises(StoreFull, match=r"No space left on device.*shm_size"):
            store.put(samples.ref(features, num_tokens=1600), features)
        assert left_over(store) == []
        small = samples.tensors()
        store.get(store.put(samples.ref(small), small))
        store.close()
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_shm_without_a_memory_file_system_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eaglefeed.storage.shared_dir._SHM_ROOT", tmp_path / "eaglefeed")
    monkeypatch.setattr(files, "file_system", lambda _fd: EXT4)
    with pytest.raises(ConfigError, match="no memory file system"):
        SharedDirStore.in_memory("x")


def test_the_next_put_of_a_sample_is_under_another_name(store: SharedDirStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    with pytest.raises(StorageError, match="never replaced"):
        store.put(samples.ref(features), features)
    assert key_of(store.put(samples.ref(features, token=8), features)) != key_of(ref)
    assert len(left_over(store)) == 2


def test_a_second_signal_in_a_write_leaves_nothing(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(real: Callable[..., int], *args: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    instead_of(monkeypatch, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(samples.ref(), samples.tensors())
    assert left_over(store) == []


def test_documents_and_assets_are_whole_or_absent(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for write in (
        lambda: store.put_document("contract.json", b"{}" * 100),
        lambda: store.put_assets("target_assets.safetensors", {"w": torch.ones(9, 9)}, {}),
    ):
        with monkeypatch.context() as patched:
            fail_call(patched, "pwrite", errno.ENOSPC)
            with pytest.raises(StoreFull):
                write()
        assert left_over(store) == []
    assert store.put_assets("target_assets.safetensors", {"w": torch.ones(9, 9)}, {"a": "b"})
    path = store.root / "target_assets.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="checksum of w differs"):
        store.get_assets("target_assets.safetensors")
