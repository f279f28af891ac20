"""Shards that are damaged in every way: each is named with its path and why, and the others are trained on."""

import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pipeline
import samples
from commands import Shell
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import SampleCorrupt
from eaglefeed.ops.reasons import reason_class
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.refs import SampleRef, encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.shared_dir import SharedDirStore

Damage = Callable[[Path, Path], object]


def _data_start(data: bytes) -> int:
    return 8 + int(struct.unpack("<Q", data[:8])[0])


def _changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path, _other: path.write_bytes(change(path.read_bytes()))


def _swapped(data: bytes) -> bytes:
    start = _data_start(data)
    header = json.loads(data[8:start])
    (a, b), (c, d) = (header[name]["data_offsets"] for name in ("attention_mask", "loss_mask"))
    body = bytearray(data[start:])
    body[a:b], body[c:d] = body[c:d], body[a:b]
    return data[:start] + bytes(body)


def _in_its_place(make: Callable[[Path, Path], object]) -> Damage:
    def damage(path: Path, other: Path) -> None:
        path.unlink()
        make(path, other)

    return damage


def _sparse(path: Path, other: Path) -> None:
    path.touch()
    os.truncate(path, other.stat().st_size)


_OTHERS = "(another size|checksum of aux_hidden_states differs in its header)"

DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte short": (_changed(lambda data: data[:-1]), "another size"),
    "header-only": (_changed(lambda data: data[: _data_start(data)]), "another size"),
    "four-bytes": (_changed(lambda data: data[:4]), "another size"),
    "empty": (_changed(lambda _data: b""), "another size"),
    "longer": (_changed(lambda data: data + bytes(16)), "another size"),
    "endless-header": (_changed(lambda data: struct.pack("<Q", 2**40) + data[8:]), "impossible header length"),
    "zeroed": (_changed(lambda data: data[: (at := _data_start(data))] + bytes(len(data) - at)), "checksum of"),
    "flipped": (_changed(lambda data: data[:-8] + bytes(each ^ 255 for each in data[-8:])), "checksum of"),
    "swapped": (_changed(_swapped), "checksum of attention_mask differs"),
    "damaged-header": (_changed(lambda data: data[:20] + b"}" + data[21:]), "unreadable header"),
    "others-header": (
        lambda path, other: path.write_bytes(
            other.read_bytes()[: _data_start(other.read_bytes())] + path.read_bytes()[_data_start(path.read_bytes()) :]
        ),
        _OTHERS,
    ),
    "another-sample": (lambda path, other: path.write_bytes(other.read_bytes()), _OTHERS),
    "hard-link": (_in_its_place(lambda path, other: path.hardlink_to(other)), _OTHERS),
    "symbolic-link": (_in_its_place(lambda path, other: path.symlink_to(other)), "a symbolic link"),
    "pipe": (_in_its_place(lambda path, _other: os.mkfifo(path)), "no regular file"),
    "folder": (_in_its_place(lambda path, _other: path.mkdir()), "no regular file"),
    "holes": (_in_its_place(_sparse), "unreadable header"),
}


def _features(seed: int) -> dict[str, Tensor]:
    features = samples.tensors(batch=1, length=40, supervision="logits", seed=seed)
    features["logits"][:, -1] = 0  # shifted
    return features


def _id(name: str) -> str:
    return name.replace(" ", "-")


@pytest.fixture
def store(tmp_path: Path) -> SharedDirStore:
    return SharedDirStore(tmp_path / "store", durability="none")


def _put(store: SharedDirStore, name: str, seed: int) -> SampleRef:
    features = _features(seed)
    return store.put(samples.ref(features, sample_id=_id(name), num_tokens=40), features)


@pytest.fixture
def refs(store: SharedDirStore) -> dict[str, SampleRef]:
    """One shard for each damage, done to it, between whole ones."""
    names = ["whole-1", *DAMAGES, "whole-2"]
    found = {name: _put(store, name, seed) for seed, name in enumerate(names)}
    for name, (damage, _) in DAMAGES.items():
        damage(store.root / key_of(found[name]), store.root / key_of(found["whole-1"]))
    return found


def test_every_damage_is_a_dead_letter_with_path_and_reason_and_the_others_are_delivered(
    store: SharedDirStore, refs: dict[str, SampleRef]
) -> None:
    run = pipeline.Run(store=store)
    run.samples.put([QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes) for ref in refs.values()])
    run.samples.close()
    with SampleStream(run.samples, store, consumer="t", clock=run.clock) as stream:
        delivered = [batch.sample_ids[0] for batch in stream]
    assert delivered == ["whole-1", "whole-2"]
    assert (stream.stats.dead, stream.stats.retried, stream.stats.acked) == (len(DAMAGES), 0, 2)
    letters = {letter.id: letter for letter in run.samples.dead_letters()}
    for name, (_, reason) in DAMAGES.items():
        letter = letters[_id(name)]
        assert letter.delivery_count == 1  # another try would find the same
        assert re.match(rf"SampleCorrupt: {_id(name)}: .*{reason}", letter.reason), letter.reason
        assert reason_class(letter.reason) == "SampleCorrupt"  # what the metric of dead letters is labelled with
        assert f"in {store.root / key_of(refs[name])}" in letter.reason


def test_validate_lists_all_of_them_and_nothing_else(
    store: SharedDirStore, refs: dict[str, SampleRef], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Shell(capsys).run("validate", store.root, "--json", "store.verify=never")
    assert ended.code == 3
    assert ended.document["checked"] == len(refs)
    bad = {str(store.root / key_of(refs[name])) for name in DAMAGES}
    assert {fault["name"] for fault in ended.document["faults"]} == bad
    assert all(fault["name"] in fault["fault"] for fault in ended.document["faults"])
    shown = Shell(capsys).run("validate", store.root)
    assert shown.code == 3
    assert all(f"\n{path}: " in f"\n{shown.out}" for path in bad)


def test_tensors_that_were_swapped_with_their_digests_are_found_by_the_refs_own(
    store: SharedDirStore, tmp_path: Path
) -> None:
    ref = _put(store, "whole", 1)
    swapped = _features(1)
    swapped["attention_mask"], swapped["loss_mask"] = swapped["loss_mask"], swapped["attention_mask"]
    other = SharedDirStore(tmp_path / "other", durability="none")
    forged = other.put(replace(ref, checksums={}), swapped)
    (store.root / key_of(ref)).write_bytes((other.root / key_of(forged)).read_bytes())
    with pytest.raises(SampleCorrupt, match=f"checksum of attention_mask differs in its header in {store.root}"):
        store.get(ref)
    assert torch.equal(other.get(forged)["loss_mask"], swapped["loss_mask"])  # by itself it is a whole shard


def test_a_shard_of_another_run_in_its_place_is_refused(store: SharedDirStore, tmp_path: Path) -> None:
    ref = _put(store, "whole", 1)
    other = SharedDirStore(tmp_path / "other", durability="none")
    features = _features(2)
    theirs = other.put(samples.ref(features, sample_id="whole", num_tokens=40, run_id="run-of-others"), features)
    (store.root / key_of(ref)).write_bytes((other.root / key_of(theirs)).read_bytes())
    with pytest.raises(SampleCorrupt, match=_OTHERS):
        store.get(ref)


def test_a_file_that_another_one_replaces_while_it_is_read_is_read_to_its_end(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = _put(store, "whole", 1), _put(store, "other", 2)
    real, path = os.preadv, store.root / key_of(ref)

    def read(*args: object) -> int:
        (store.root / key_of(other)).replace(path) if (store.root / key_of(other)).exists() else None
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", read)
    assert torch.equal(store.get(ref)["logits"], _features(1)["logits"])
    with pytest.raises(SampleCorrupt):
        store.get(ref)


def test_a_folder_of_shards_that_may_not_be_entered_is_a_fault_and_not_left_out(
    store: SharedDirStore, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    ref, folder = _put(store, "whole", 1), store.root / "zz"
    folder.mkdir(mode=0o700)
    for above in (store.root, *store.root.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        ended = Shell(capsys).run("validate", store.root, "--json")
    finally:
        os.seteuid(0)
    assert (ended.code, ended.document["checked"]) == (3, 2)
    assert [(fault["name"], fault["kind"]) for fault in ended.document["faults"]] == [(str(folder), "PermissionError")]
    assert (store.root / key_of(ref)).exists()
