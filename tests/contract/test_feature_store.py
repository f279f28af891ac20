"""What every store promises, over each of them."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import samples
from eaglefeed.errors import SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.eagle3 import validate_eagle3_ref
from eaglefeed.storage.base import FeatureStore, open_store
from eaglefeed.storage.header import check_header, ref_of


@pytest.fixture(params=["mem", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FeatureStore]:
    uri = f"mem://{request.node.name}" if request.param == "mem" else f"file://{tmp_path}/store"
    opened = open_store(uri)
    yield opened
    opened.close()


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
    ref = replace(samples.ref(), stored_bytes=10)
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


def test_assets_keep_tensors_and_metadata(store: FeatureStore) -> None:
    assert store.get_assets("target_assets.safetensors") is None
    assert store.put_assets("target_assets.safetensors", {"w": torch.arange(6).reshape(2, 3)}, {"config": "{}"})
    found = store.get_assets("target_assets.safetensors")
    assert found is not None
    assert torch.equal(found[0]["w"], torch.arange(6).reshape(2, 3))
    assert found[1] == {"config": "{}"}


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
