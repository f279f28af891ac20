"""s3:// against a real server: sizes, many at once, addresses, variables, and a whole run."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import pipeline
import s3_server
import samples
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError, SampleCorrupt, StorageError
from eaglefeed.storage.base import open_store, shard_key
from eaglefeed.storage.bucket import PART_BYTES
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.object_store import ObjectStore
from eaglefeed.storage.shard import ShardWriter


@pytest.fixture
def bucket(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    s3_server.use(monkeypatch, s3.address)
    return s3.new_bucket()


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    opened = open_store(f"s3://{bucket}/{s3_server.PREFIX}")
    assert isinstance(opened, ObjectStore)
    return opened


def _shard_of(num_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors whose shard is just that long."""
    torch.set_num_threads(1)
    header_bytes = ShardWriter(samples.ref(_filled(num_bytes)), _filled(num_bytes)).data_start
    return _filled(num_bytes - header_bytes)


def _filled(num_bytes: int) -> dict[str, torch.Tensor]:
    rest = num_bytes % 8
    return {"input_ids": torch.arange(num_bytes // 8), "loss_mask": torch.arange(rest, dtype=torch.uint8)}


@pytest.mark.parametrize(
    "num_bytes",
    [2_000, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 2 * PART_BYTES + 12_345],
)
def test_shards_of_any_number_of_parts_come_back(
    store: ObjectStore, bucket: str, s3: s3_server.S3Server, num_bytes: int
) -> None:
    features = _shard_of(num_bytes)
    ref = store.put(samples.ref(features), features)
    assert ref.stored_bytes == num_bytes
    found = store.get(ref)
    assert all(torch.equal(found[name], features[name]) for name in features)
    key = f"{s3_server.PREFIX}/{ref.feature_keys['input_ids']}"
    other_program = safetensors.torch.load(s3.request("GET", f"/{bucket}/{key}")[1])
    assert all(torch.equal(other_program[name], features[name]) for name in features)
    assert store.read_ref(ref.feature_keys["input_ids"]) == ref
    with pytest.raises(StorageError, match="never replaced"):
        store.put(samples.ref(features), features)


def test_every_kind_of_layout_survives_an_upload_in_parts(store: ObjectStore) -> None:
    features = samples.tensors(batch=2, length=90_000)
    strided = features | {"input_ids": features["input_ids"].t().contiguous().t()}
    ref = store.put(samples.ref(features), strided)
    assert ref.stored_bytes > PART_BYTES
    found = store.get(ref)
    assert all(torch.equal(found[name], features[name]) for name in features)


def test_samples_are_read_into_the_rings_buffers(store: ObjectStore) -> None:
    features = _shard_of(2 * PART_BYTES)
    ref = store.put(samples.ref(features), features)
    ring = BufferRing(1)
    found = store.get(ref, ring)
    address = found["input_ids"].data_ptr()
    assert ring.held() == ["a-1"]
    del found
    again = store.get(ref, ring)
    assert again["input_ids"].data_ptr() == address
    assert torch.equal(again["input_ids"], features["input_ids"])


def test_a_damaged_sample_gives_its_buffer_back(store: ObjectStore, bucket: str, s3: s3_server.S3Server) -> None:
    features = _shard_of(2_000)
    ref = store.put(samples.ref(features), features)
    path = f"/{bucket}/{s3_server.PREFIX}/{ref.feature_keys['input_ids']}"
    data = s3.request("GET", path)[1]
    s3.request("PUT", path, data[:-1] + bytes([data[-1] ^ 1]))
    ring = BufferRing(1, deadline_s=0.1)
    with pytest.raises(SampleCorrupt, match="checksum") as kept:
        store.get(ref, ring)
    assert ring.held() == []
    assert not kept.value.retryable


@pytest.mark.parametrize("data", [b"", b"short"])
def test_an_object_without_a_header_is_corrupt(
    store: ObjectStore, bucket: str, s3: s3_server.S3Server, data: bytes
) -> None:
    features = _shard_of(2_000)
    ref = store.put(samples.ref(features), features)
    s3.request("PUT", f"/{bucket}/{s3_server.PREFIX}/{ref.feature_keys['input_ids']}", data)
    for read in (store.get, store.header):
        with pytest.raises(SampleCorrupt, match="cut short before its header"):
            read(ref)


def test_many_threads_share_a_store(store: ObjectStore) -> None:
    def work(index: int) -> bool:
        features = samples.tensors(length=20_000 if index % 4 else 70_000, seed=index)
        ref = store.put(samples.ref(features, sample_id=f"a-{index}"), features)
        found = store.get(ref)
        return all(torch.equal(found[name], features[name]) for name in features)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(12)))
    assert len(list(store.scan())) == 12


def test_a_store_sees_its_own_prefix_alone(bucket: str) -> None:
    one, other, whole = (open_store(f"s3://{bucket}{prefix}") for prefix in ("/run", "/run-2/", ""))
    ref = other.put(samples.ref(), samples.tensors())
    whole.put_document("contract.json", b"{}")
    assert ref.store_uri == f"s3://{bucket}/run-2"
    assert list(one.scan()) == []
    assert not one.has_document("contract.json")
    assert [shard.key for shard in other.scan()] == [ref.feature_keys["input_ids"]]
    assert one.delete(ref) is False
    assert other.delete(ref) is True


def test_a_scan_goes_on_after_the_servers_first_page(store: ObjectStore, bucket: str, s3: s3_server.S3Server) -> None:
    keys = {shard_key(f"a-{index}", 1) for index in range(2 * s3_server.LIST_PAGE + 3)}
    for key in keys:
        s3.request("PUT", f"/{bucket}/{s3_server.PREFIX}/{key}", b"1")
    assert {shard.key for shard in store.scan()} == keys


def test_a_large_file_of_the_run_goes_in_parts(store: ObjectStore, bucket: str, s3: s3_server.S3Server) -> None:
    weight = torch.arange(2 * PART_BYTES // 4, dtype=torch.int32)
    assert store.put_assets("target_assets.safetensors", {"w": weight}, {"config": "{}"}) is True
    assert store.put_assets("target_assets.safetensors", {"w": weight}, {"config": "{}"}) is False
    found = store.get_assets("target_assets.safetensors")
    assert found is not None
    assert torch.equal(found[0]["w"], weight)
    assert found[1] == {"config": "{}"}
    assert s3.unfinished(bucket) == []


def test_it_has_no_end(store: ObjectStore) -> None:
    assert store.health().free_bytes > 10**18
    assert store.sweep(0.0) == (0, 0)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///run",
        "s3://Bucket/run",
        "s3://xy",
        "s3://bucket/../other",
        "s3://bucket//run",
        "s3://bucket/run//",
        "s3://bucket/.hidden",
        "s3://bucket/a b",
        "s3://bucket/a%2e",
        "s3://bucket/run?x=1",
        "s3://bucket/run\n",
    ],
)
def test_impossible_addresses_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="impossible address"):
        open_store(uri)


def test_keys_and_names_outside_the_prefix_are_refused(store: ObjectStore) -> None:
    features = samples.tensors()
    for key in ("../a-1.7.safetensors", "a0/../../a-1.7.safetensors", "/a0/a-1.7.safetensors", "contract.json"):
        ref = replace(samples.ref(features), feature_keys=dict.fromkeys(features, key))
        for use in (store.get, store.delete, store.header, lambda ref: store.put(ref, features)):
            with pytest.raises(SampleCorrupt, match="impossible key"):
                use(ref)
    for name in ("../contract.json", "a/contract.json", "a0/a-1.7.safetensors"):
        with pytest.raises(StorageError, match="impossible name"):
            store.put_document(name, b"1")


def test_a_bucket_that_is_not_there_is_a_configuration_error(bucket: str) -> None:
    features = samples.tensors()
    store = open_store("s3://no-such-bucket-here/run")
    for use in (
        lambda: store.get(samples.ref(features)),
        lambda: store.put(samples.ref(features), features),
        lambda: store.put_assets("target_assets.safetensors", {"w": torch.zeros(PART_BYTES // 4)}, {}),
        lambda: store.get_document("contract.json"),
        lambda: list(store.scan()),
    ):
        with pytest.raises(ConfigError, match=r"s3://no-such-bucket-here/run: no such bucket.*create it"):
            use()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"AWS_ALLOW_HTTP": "false"}, "AWS_ALLOW_HTTP=true"),
        ({"AWS_ALLOW_HTTP": "perhaps"}, "variable that cannot be used"),
        ({"AWS_ENDPOINT_URL": "minio:9000"}, "https://host:port"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "no credentials found.*AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no credentials found.*AWS_ACCESS_KEY_ID"),
    ],
)
def test_variables_that_cannot_work_are_configuration_errors(
    bucket: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], says: str
) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        ObjectStore(f"s3://{bucket}/run", max_retries=0).get_document("contract.json")


def test_an_error_names_its_subject_once(monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    store = ObjectStore("s3://away/run", max_retries=0)
    features = {"input_ids": torch.arange(4)}
    ref = samples.ref(features)
    key = ref.feature_keys["input_ids"]
    for use, says in (
        (lambda: store.has_document("contract.json"), "contract.json: cannot be looked up in s3://away/run, got "),
        (lambda: list(store.scan()), "s3://away/run: cannot be listed, got "),
        (lambda: store.get(ref), f"{ref.sample_id}: {key} cannot be read in s3://away/run, got "),
    ):
        with pytest.raises(StorageError) as caught:
            use()
        assert str(caught.value).startswith(says)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("eaglefeed.storage.object_store", "eaglefeed.storage.bucket"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(ConfigError, match=r"eaglefeed\[object\]"):
        open_store("s3://bucket/run")


def test_headers_and_refs_are_read_without_torch(store: ObjectStore) -> None:
    ref = store.put(samples.ref(), samples.tensors())
    code = (
        "import sys; from eaglefeed.storage.base import open_store; store = open_store(sys.argv[1]); "
        "print(store.read_ref(sys.argv[2]).sample_id, [shard.num_bytes for shard in store.scan()], "
        "'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, store.uri, ref.feature_keys["input_ids"]]
    told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    assert told.split("\n")[0] == f"a-1 [{ref.stored_bytes}] False"


def test_the_reading_threads_end_with_the_store(store: ObjectStore) -> None:
    features = _shard_of(2 * PART_BYTES)
    store.get(store.put(samples.ref(features), features))
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("eaglefeed-s3")]
    store.close()
    for thread in mine:
        thread.join(timeout=10)
    assert mine
    assert not any(thread.is_alive() for thread in mine)


def test_a_whole_run_goes_through_a_bucket(store: ObjectStore, bucket: str, s3: s3_server.S3Server) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=store)
    run.feed(*(pipeline.prompt(index) for index in range(6)))
    assert run.produce().produced == 6
    assert f"{s3_server.PREFIX}/contract.json" in s3.keys(bucket)
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        seen = {batch.sample_ids[0]: batch.input_ids.tolist() for batch in stream}
    # prompt i is [1 + i, 2, 3], shifted left by one
    assert seen == {f"p-{index}": [[2, 3, 0]] for index in range(6)}
    assert run.samples.stats().done == 6
    assert list(store.scan()) == []
