"""What every store promises, over each of them."""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

import s3_server
import samples
from eaglefeed.errors import ConfigError, SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.eagle3 import validate_eagle3_ref
from eaglefeed.schema.eagle3_compact import encode_compact
from eaglefeed.storage.base import FeatureStore, is_verified, key_of, open_store
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.header import check_header, ref_of
from eaglefeed.storage.options import PeerOptions


@pytest.fixture(params=["mem", "file", "shm", "s3", "nccl", "gloo"])
def open_one(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FeatureStore]]:
    """Opens the test's store, each time with other options if wanted."""
    name = f"test-{secrets.token_hex(8)}"
    if request.param == "shm" and not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        s3_server.use(monkeypatch, server.address)
        name = f"{server.new_bucket()}/{s3_server.PREFIX}"
    opened: list[FeatureStore] = []

    def open_it(**options: object) -> FeatureStore:
        uris = {"file": f"file://{tmp_path}/store"} | dict.fromkeys(["nccl", "gloo"], "nccl://127.0.0.1:0")
        uri = uris.get(request.param, f"{request.param}://{name}")
        peer = PeerOptions(data_plane="gloo" if request.param == "gloo" else "auto")
        opened.append(open_store(uri, peer=peer, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()
    shutil.rmtree(Path("/dev/shm/eaglefeed") / name, ignore_errors=True)


@pytest.fixture
def store(open_one: Callable[..., FeatureStore]) -> FeatureStore:
    return open_one()


@pytest.mark.parametrize("supervision", ["logits", "target_probs"])
def test_what_was_put_is_what_comes_back(store: FeatureStore, supervision: str) -> None:
    features = samples.tensors(supervision=supervision)
    ref = store.put(samples.ref(features), features)
    validate_eagle3_ref(ref)
    assert ref.store_uri == store.uri
    assert set(ref.checksums) == set(features)
    found = store.get(ref)
    assert list(found) == list(features)
    assert all(torch.equal(found[name], features[name]) for name in features)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in features.items()}


def test_views_and_strides_do_not_matter(store: FeatureStore) -> None:
    features = samples.tensors()
    strided = features | {
        "aux_hidden_states": features["aux_hidden_states"].transpose(0, 1).contiguous().transpose(0, 1)
    }
    assert not strided["aux_hidden_states"].is_contiguous()
    found = store.get(store.put(samples.ref(features), strided))
    assert torch.equal(found["aux_hidden_states"], features["aux_hidden_states"])


def test_a_tensor_that_was_read_is_the_readers_own(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    store.get(ref)["input_ids"].zero_()
    assert torch.equal(store.get(ref)["input_ids"], features["input_ids"])


def test_a_missing_sample_is_retryable_and_named(store: FeatureStore) -> None:
    ref = replace(samples.ref(), stored_bytes=10, store_uri=store.uri)
    for read in (store.get, store.header):
        with pytest.raises(SampleMissing, match="a-1") as caught:
            read(ref)
        assert caught.value.retryable


def test_deleting_twice_is_no_error(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    assert store.delete(ref) is True
    assert store.delete(ref) is False
    with pytest.raises(SampleMissing):
        store.get(ref)


def test_another_checksum_is_corruption(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    with pytest.raises(SampleCorrupt, match="checksum of input_ids"):
        store.get(replace(ref, checksums=ref.checksums | {"input_ids": "0" * 32}))


def test_other_specs_than_the_refs_are_corruption(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    specs = dict(ref.feature_specs)
    specs["input_ids"] = specs["target_probs"]
    with pytest.raises(SampleCorrupt, match="input_ids has another spec"):
        store.get(replace(ref, feature_specs=specs))


def test_a_shard_describes_itself_without_its_stores_path(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    header = store.header(ref)
    check_header(header, ref)
    assert store.uri not in "".join(header.metadata.values())
    assert ref_of(header, store.uri, "name") == ref
    assert store.read_ref(key_of(ref)) == ref


def test_a_key_without_a_shard_is_missing_and_one_that_cannot_be_is_refused(store: FeatureStore) -> None:
    with pytest.raises(SampleMissing):
        store.read_ref("00/a.1.safetensors")
    with pytest.raises(StorageError):
        store.read_ref("../a.1.safetensors")


def test_the_digests_are_those_of_the_tensors_bytes(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    for name, tensor in features.items():
        data = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        assert ref.checksums[name] == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("rows", ["all", "supervised"])
@pytest.mark.parametrize("aux", ["same", "fp8"])
def test_the_compact_form_comes_back_as_it_was_stored(store: FeatureStore, rows: str, aux: str) -> None:
    features = samples.tensors(supervision="last_hidden_states")
    stored = encode_compact(features, fp8_aux=aux == "fp8", supervised_rows=rows == "supervised")
    ref = store.put(samples.ref(features), stored)
    assert list(ref.checksums) == list(stored)
    assert store.read_ref(key_of(ref)) == ref
    found = store.get(ref)
    assert set(found) == set(stored)
    for name, tensor in stored.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_every_tensor_is_aligned(store: FeatureStore) -> None:
    features = samples.tensors(batch=1, length=3)
    ref = store.put(samples.ref(features), features)
    for found in (store.get(ref), store.get(ref, BufferRing(1))):
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())


def test_samples_read_into_a_ring_stay_as_they_are_as_long_as_anyone_holds_a_piece(store: FeatureStore) -> None:
    refs = []
    for number in range(4):
        features = samples.tensors(seed=number)
        refs.append(store.put(samples.ref(features, sample_id=f"a-{number}"), features))
    ring = BufferRing(3)
    held = [store.get(refs[0], ring)["aux_hidden_states"][:, 1:3], store.get(refs[1], ring)["loss_mask"][0]]
    wanted = [tensor.clone() for tensor in held]
    for turn in range(20):
        number = turn % len(refs)
        found = store.get(refs[number], ring)
        assert torch.equal(found["aux_hidden_states"], samples.tensors(seed=number)["aux_hidden_states"])
        del found
        assert all(torch.equal(tensor, before) for tensor, before in zip(held, wanted, strict=True))
    assert ring.held() == ["a-0", "a-1"]


def test_a_sample_that_fails_keeps_no_buffer_even_while_its_error_is_kept(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    ring = BufferRing(1, deadline_s=0)
    errors = []
    for name in features:
        with pytest.raises(SampleCorrupt) as caught:
            store.get(replace(ref, checksums=ref.checksums | {name: "0" * 32}), ring)
        errors.append(caught.value)
    assert ring.held() == []
    assert store.get(ref, ring).keys() == features.keys()


@pytest.mark.parametrize("verify", ["sample", "never"])
def test_what_is_not_verified_is_still_checked_against_its_header(
    open_one: Callable[..., FeatureStore], verify: str
) -> None:
    store = open_one(verify=verify)
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    other = store.put(samples.ref(features, token=8), samples.tensors(seed=1))
    with pytest.raises(SampleCorrupt, match="checksum of aux_hidden_states"):
        store.get(replace(ref, feature_keys=other.feature_keys))
    assert torch.equal(store.get(ref)["aux_hidden_states"], features["aux_hidden_states"])


def test_nothing_is_left_to_sweep_after_whole_writes(store: FeatureStore) -> None:
    features = samples.tensors()
    store.put(samples.ref(features), features)
    store.put_document("contract.json", b"{}")
    assert store.sweep(0) == (0, 0)
    assert len(list(store.scan())) == 1


def test_a_scan_finds_whole_shards_and_nothing_else(store: FeatureStore) -> None:
    features = samples.tensors()
    refs = [store.put(samples.ref(features, sample_id=f"a-{index}"), features) for index in range(5)]
    store.put_document("contract.json", b"{}")
    assert {shard.key for shard in store.scan()} == {ref.feature_keys["input_ids"] for ref in refs}
    assert {shard.num_bytes for shard in store.scan()} == {ref.stored_bytes for ref in refs}


def test_files_of_the_run_are_written_once(store: FeatureStore) -> None:
    assert store.get_document("contract.json") is None
    assert store.has_document("contract.json") is False
    assert store.put_document("contract.json", b"one") is True
    assert store.put_document("contract.json", b"two") is False
    assert store.get_document("contract.json") == b"one"
    assert store.has_document("contract.json") is True


def test_a_file_of_the_run_that_was_deleted_is_gone_and_can_be_written_anew(store: FeatureStore) -> None:
    assert store.delete_document("contract.json") is False
    store.put_document("contract.json", b"one")
    assert store.delete_document("contract.json") is True
    assert store.get_document("contract.json") is None
    assert store.put_document("contract.json", b"two") is True
    assert store.get_document("contract.json") == b"two"


def test_assets_keep_tensors_and_metadata(store: FeatureStore) -> None:
    assert store.get_assets("target_assets.safetensors") is None
    assert store.put_assets("target_assets.safetensors", {"w": torch.arange(6).reshape(2, 3)}, {"config": "{}"})
    found = store.get_assets("target_assets.safetensors")
    assert found is not None
    assert torch.equal(found[0]["w"], torch.arange(6).reshape(2, 3))
    assert found[1] == {"config": "{}"}
    assert store.put_assets("target_assets.safetensors", {"w": torch.zeros(1)}, {}) is False


def test_of_many_first_writers_exactly_one_wins(store: FeatureStore) -> None:
    won: list[bytes] = []

    def write(data: bytes) -> None:
        if store.put_document("contract.json", data):
            won.append(data)

    threads = [threading.Thread(target=write, args=(b"%d" % index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get_document("contract.json") == won[0]


def test_a_store_says_how_much_is_free(store: FeatureStore) -> None:
    health = store.health()
    assert 0 < health.free_bytes <= health.total_bytes


def test_a_shard_is_never_replaced(store: FeatureStore) -> None:
    features = samples.tensors()
    ref = store.put(samples.ref(features), features)
    with pytest.raises(StorageError):
        store.put(samples.ref(features), samples.tensors(seed=1))
    assert torch.equal(store.get(ref)["aux_hidden_states"], features["aux_hidden_states"])


@pytest.mark.parametrize("durability", ["full", "data", "none"])
def test_every_durability_stores_the_same(open_one: Callable[..., FeatureStore], durability: str) -> None:
    store = open_one(durability=durability)
    features = samples.tensors()
    assert torch.equal(store.get(store.put(samples.ref(features), features))["input_ids"], features["input_ids"])


def test_one_sample_in_sixteen_is_verified_by_the_middle_policy() -> None:
    ids = [f"a-{number}" for number in range(16_000)]
    assert 900 < sum(is_verified("sample", each) for each in ids) < 1100
    assert all(is_verified("always", each) and not is_verified("never", each) for each in ids[:20])


_MISTYPED = ["ftp://x", "file://", "file://host/x", "file:relative", "s3:/buck/x", "S3://x", "File:///x", ""]


@pytest.mark.parametrize("uri", ["shm://", "shm://../x", "shm://a/b", "shm://.hidden", *_MISTYPED])
def test_an_impossible_address_is_a_configuration_error(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_store(uri)
