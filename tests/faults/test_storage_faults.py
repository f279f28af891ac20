"""Files that are cut, changed, unreadable or out of room: one clear error each, and nothing half-written left."""

import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import samples
from eaglefeed.errors import ConfigError, SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.header import parse_header, ref_of
from eaglefeed.storage.shared_dir import SharedDirStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedDirStore]:
    opened = SharedDirStore(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def stored(store: SharedDirStore) -> tuple[SampleRef, Path]:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    return ref, store.root / ref.feature_keys["input_ids"]


def test_other_programs_read_our_shards(store: SharedDirStore, stored: tuple[SampleRef, Path]) -> None:
    found = safetensors.torch.load_file(stored[1])
    assert all(torch.equal(found[name], tensor) for name, tensor in samples.tensors().items())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o027, 0o640), (0o077, 0o600)])
def test_a_shard_is_as_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        store = SharedDirStore(tmp_path / "store")
        features = samples.tensors()
        key = store.put(samples.ref(features), features).feature_keys["input_ids"]
        store.put_document("contract.json", b"{}")
        store.close()
    finally:
        os.umask(before)
    for name in (key, "contract.json"):
        assert stat.S_IMODE((store.root / name).stat().st_mode) == mode
    assert stat.S_IMODE((store.root / key).parent.stat().st_mode) == 0o777 & ~umask


def test_in_a_setgid_folder_shards_are_of_its_group(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make a folder of another group")
    root = tmp_path / "store"
    root.mkdir()
    os.chown(root, 0, 4711)
    root.chmod(0o2775)
    store = SharedDirStore(root)
    path = root / store.put(samples.ref(), samples.tensors()).feature_keys["input_ids"]
    assert (path.stat().st_gid, path.parent.stat().st_gid) == (4711, 4711)
    assert path.parent.stat().st_mode & stat.S_ISGID


def test_a_trainer_of_another_user_reads_what_a_producer_of_umask_022_wrote(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    for above in (tmp_path, *list(tmp_path.parents)[:2]):
        above.chmod(above.stat().st_mode | 0o055)
    root, before = tmp_path / "store", os.umask(0o022)
    root.mkdir()
    os.chown(root, 1000, 1000)
    try:
        os.seteuid(1000)
        ref = SharedDirStore(root).put(samples.ref(), samples.tensors())
        os.seteuid(0)
        os.seteuid(2000)
        assert torch.equal(SharedDirStore(root).get(ref)["input_ids"], samples.tensors()["input_ids"])
    finally:
        os.seteuid(0)
        os.umask(before)
    assert (root / ref.feature_keys["input_ids"]).stat().st_uid == 1000


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_shard_cut_short_is_corrupt_and_says_both_sizes(
    store: SharedDirStore, stored: tuple[SampleRef, Path], keep: int
) -> None:
    ref, path = stored
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(SampleCorrupt, match=f"a-1: .* in {path}, wanted {len(data)} bytes, got {len(data[:keep])}"):
        store.get(ref)
    with pytest.raises(SampleCorrupt):
        ref_of(parse_header(path.read_bytes(), path.stat().st_size, path.name), store.uri, path.name)


def test_every_flipped_byte_of_the_tensors_is_found(store: SharedDirStore, stored: tuple[SampleRef, Path]) -> None:
    ref, path = stored
    data = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for position in range(start, len(data), 97):
        data[position] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(SampleCorrupt, match=r"checksum of \w+ differs"):
            store.get(ref)
        data[position] ^= 0x10
    path.write_bytes(data)
    store.get(ref)


def test_a_preallocated_file_of_zeros_is_corrupt(store: SharedDirStore, stored: tuple[SampleRef, Path]) -> None:
    ref, path = stored
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[:start] + bytes(len(data) - start))
    with pytest.raises(SampleCorrupt, match="checksum"):
        store.get(ref)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b"\xff" * 9,
    ],
)
def test_a_damaged_header_is_corrupt_and_never_a_crash(header: bytes) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(64)
    with pytest.raises(SampleCorrupt):
        ref_of(parse_header(data, len(data), "x"), "file:///s", "x")


@pytest.mark.parametrize("length", [2**63, 2**20 + 1, 57])
def test_an_impossible_header_length_is_refused_before_it_is_read(length: int) -> None:
    data = struct.pack("<Q", length) + bytes(48)
    with pytest.raises(SampleCorrupt, match="header length"):
        parse_header(data, len(data), "x")


def test_overlapping_tensors_are_refused() -> None:
    entry = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    with pytest.raises(SampleCorrupt, match="overlap"):
        parse_header(data, len(data), "x")


@pytest.mark.parametrize(
    "key",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "00/../../x.1.safetensors",
        "00/x.safetensors",
        "zz/x.1.safetensors",
        "",
        "00\n/x.1.safetensors",
    ],
)
def test_no_key_leaves_the_root(store: SharedDirStore, key: str) -> None:
    ref = replace(samples.ref(), feature_keys=dict.fromkeys(samples.tensors(), key), stored_bytes=1)
    for call in (store.get, store.header, store.delete, lambda each: store.put(each, samples.tensors())):
        with pytest.raises(SampleCorrupt, match="impossible key"):
            call(ref)


def test_symbolic_links_are_not_followed(store: SharedDirStore, stored: tuple[SampleRef, Path], tmp_path: Path) -> None:
    ref, path = stored
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(SampleCorrupt, match=f"a-1: a symbolic link in {path}"):
        store.get(ref)
    path.unlink()
    folder = path.parent
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(StorageError):
        store.put(samples.ref(sample_id="a-1", token=8), samples.tensors())
    assert not list(tmp_path.glob("a-1.8*"))


def test_a_pipe_in_place_of_a_shard_does_not_hang_the_reader(
    store: SharedDirStore, stored: tuple[SampleRef, Path]
) -> None:
    ref, path = stored
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SampleCorrupt, match="no regular file"):
        store.get(ref)


def test_a_root_that_is_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used as a store"):
        SharedDirStore(tmp_path / "file")


def test_a_missing_folder_is_a_missing_sample(store: SharedDirStore) -> None:
    with pytest.raises(SampleMissing):
        store.get(replace(samples.ref(), stored_bytes=5))
