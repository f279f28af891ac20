"""Reads of files that change, vanish, hide or fail meanwhile: the right tensors or one clear error, and no crash."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from os_faults import calls_of, fail_call, instead_of
from torch import Tensor

import samples
from eaglefeed.errors import EaglefeedError, SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage import files
from eaglefeed.storage.base import is_verified, key_of
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.shared_dir import SharedDirStore

FEATURES = samples.tensors(length=40)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedDirStore]:
    opened = SharedDirStore(tmp_path / "store", durability="none")
    yield opened
    opened.close()


@pytest.fixture
def stored(store: SharedDirStore) -> tuple[SampleRef, Path]:
    ref = store.put(samples.ref(FEATURES), FEATURES)
    return ref, store.root / key_of(ref)


def _is_right(found: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in FEATURES.items())


def _before_read(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Read in small pieces, and act before the `number`-th."""
    monkeypatch.setattr(files, "_READ_BYTES", 512)
    reads: list[int] = []

    def read(real: Callable[..., int], *args: object) -> int:
        reads.append(1)
        if len(reads) == number:
            act()
        return real(*args)

    instead_of(monkeypatch, "preadv", read)


@pytest.mark.parametrize("keep", [0, 100, 2000, 3000])
def test_a_file_that_is_cut_while_it_is_read_is_corrupt(
    store: SharedDirStore, stored: tuple[SampleRef, Path], monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    _before_read(monkeypatch, 3, lambda: os.truncate(stored[1], keep))
    ring = BufferRing(1, deadline_s=0)
    with pytest.raises(SampleCorrupt, match="cut short while it was read"):
        store.get(stored[0], ring)
    assert ring.held() == []


def test_a_file_that_is_overwritten_while_it_is_read_is_corrupt(
    store: SharedDirStore, stored: tuple[SampleRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = stored[1].stat().st_size
    _before_read(monkeypatch, 3, lambda: stored[1].write_bytes(bytes(size)))
    with pytest.raises(SampleCorrupt, match=f"checksum of .* differs in {stored[1]}"):
        store.get(stored[0])


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(
    store: SharedDirStore, stored: tuple[SampleRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _before_read(monkeypatch, 2, lambda: store.delete(stored[0]))
    assert _is_right(store.get(stored[0]))
    with pytest.raises(SampleMissing):
        store.get(stored[0])


def test_short_reads_are_continued(
    store: SharedDirStore, stored: tuple[SampleRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of(monkeypatch, "preadv", lambda real, fd, parts, place: real(fd, [parts[0][:7]], place))
    assert _is_right(store.get(stored[0]))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize(("call", "at"), [("open", 1), ("open", 2), ("pread", 1), ("preadv", 1)])
def test_a_read_that_the_system_fails_may_go_well_later(
    store: SharedDirStore,
    stored: tuple[SampleRef, Path],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    at: int,
    code: int,
) -> None:
    ring = BufferRing(1, deadline_s=0)
    with monkeypatch.context() as patched:
        fail_call(patched, call, code, at=at)
        with pytest.raises(StorageError, match=os.strerror(code)) as caught:
            store.get(stored[0], ring)
    assert caught.value.retryable
    assert not isinstance(caught.value, SampleMissing)
    del caught  # the injected fault's own frame holds a piece of the buffer
    assert ring.held() == []
    assert _is_right(store.get(stored[0], ring))


def test_a_shard_of_64_mib_takes_few_large_reads(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    features = samples.tensors(batch=1, length=1_118_000, supervision="last_hidden_states")  # 60 bytes each
    ref = store.put(samples.ref(features, num_tokens=1_118_000), features)
    assert 63.9 * 2**20 < ref.stored_bytes <= 64 * 2**20
    seen = calls_of(monkeypatch, "read", "pread", "preadv", "readv")
    assert torch.equal(store.get(ref)["last_hidden_states"], features["last_hidden_states"])
    assert 1 < len(seen) <= 64
    del seen[:]
    path = store.root / key_of(ref)
    with path.open("rb") as file:  # as `eaglefeed validate` reads it
        files.check_digests(file.fileno(), files.read_header(file.fileno(), ref.stored_bytes, "x"), "x")
    assert 1 < len(seen) <= 64


def test_a_file_that_is_listed_and_cannot_be_found_is_missing_for_now(
    store: SharedDirStore, stored: tuple[SampleRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [found.key for found in store.scan()] == [key_of(stored[0])]
    with monkeypatch.context() as patched:
        fail_call(patched, "open", errno.ENOENT, at=2)
        with pytest.raises(SampleMissing) as caught:
            store.get(stored[0])
    assert caught.value.retryable
    assert _is_right(store.get(stored[0]))


def test_no_mapping_of_a_file_is_kept(store: SharedDirStore, stored: tuple[SampleRef, Path]) -> None:
    kept = [store.get(stored[0]), store.get(stored[0], BufferRing(1))]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    assert str(store.root) not in maps.read_text()
    assert not [name for name in Path("/proc/self/fd").iterdir() if _target(name).endswith(".safetensors")]
    assert all(_is_right(found) for found in kept)


def _target(handle: Path) -> str:
    try:
        return str(handle.readlink())
    except OSError:
        return ""


def test_put_get_and_delete_list_no_folder_and_cost_the_same_calls_among_many(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(token: int) -> list[str]:
        with monkeypatch.context() as patched:
            names = ["open", "stat", "fstat", "listdir", "scandir", "statvfs", "pread", "preadv", "pwrite", "link"]
            seen = calls_of(patched, *names, "unlink", "mkdir", "fsync")
            ref = store.put(samples.ref(FEATURES, token=token), FEATURES)
            store.header(ref)
            assert _is_right(store.get(ref))
            store.delete(ref)
        return seen

    once(1)
    among_few = once(2)
    folder = store.root / key_of(samples.ref(FEATURES)).partition("/")[0]
    for token in range(10_000):
        (folder / f"a-1.{token + 100}.safetensors").touch()
    assert once(3) == among_few
    assert not {"listdir", "scandir"} & set(among_few)
    shutil.rmtree(folder)


def test_one_flipped_bit_is_found_or_not_as_the_policy_says(tmp_path: Path) -> None:
    ids = [f"a-{number}" for number in range(200)]
    checked = next(each for each in ids if is_verified("sample", each))
    unchecked = next(each for each in ids if not is_verified("sample", each))
    for verify, sample_id, found in [
        ("always", unchecked, True),
        ("sample", checked, True),
        ("sample", unchecked, False),
        ("never", checked, False),
    ]:
        store = SharedDirStore(tmp_path / f"{verify}-{sample_id}", verify=verify)  # type: ignore[arg-type]
        ref = store.put(samples.ref(FEATURES, sample_id=sample_id), FEATURES)
        path = store.root / key_of(ref)
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
        ring = BufferRing(1)
        if found:
            with pytest.raises(
                SampleCorrupt, match=rf"{sample_id}: checksum of position_mask .*\.7\.safetensors, want"
            ):
                store.get(ref, ring)
            assert ring.held() == []
        else:
            store.get(ref, ring)
        store.close()


def test_a_shard_under_anothers_name_is_refused(store: SharedDirStore, stored: tuple[SampleRef, Path]) -> None:
    ref, path = stored
    other = samples.ref(FEATURES, token=8)
    path.rename(store.root / key_of(other))
    with pytest.raises(SampleCorrupt, match="another's name"):
        store.read_ref(key_of(other))
    features = samples.tensors(length=40, seed=3)
    changed = store.put(samples.ref(features), features)
    with pytest.raises(SampleCorrupt, match="checksum of aux_hidden_states"):
        store.get(replace(changed, checksums=ref.checksums))


def test_a_tensor_kept_past_its_ack_does_not_change_while_threads_read_on(store: SharedDirStore) -> None:
    torch.set_num_threads(1)
    shards = []
    for number in range(8):
        features = samples.tensors(length=64, seed=number)
        shards.append((store.put(samples.ref(features, sample_id=f"a-{number}"), features), features))
    ring = BufferRing(7, deadline_s=60)
    kept = [(store.get(ref, ring)["aux_hidden_states"][0, 5:9].t(), features) for ref, features in shards[:2]]
    faults: list[str] = []

    def read(first: int) -> None:
        last: Tensor | None = None
        wanted = torch.empty(0)
        for turn in range(120):
            ref, features = shards[(first + turn) % len(shards)]
            try:
                found = store.get(ref, ring)
            except EaglefeedError as error:
                faults.append(str(error))
                return
            if last is not None and not torch.equal(last, wanted):
                faults.append(ref.sample_id)
            last, wanted = found["target_probs"][1:], features["target_probs"][1:]
            del found

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert all(torch.equal(tensor, features["aux_hidden_states"][0, 5:9].t()) for tensor, features in kept)
    assert ring.held() == ["a-0", "a-1"]
