"""An S3 server that is busy, full, slow, silent or wrong: retried where it heals, one clear error where it does not."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import s3_server
import samples
from eaglefeed.errors import SampleCorrupt, SampleMissing, StorageError, StoreFull
from eaglefeed.storage import bucket as bucket_module
from eaglefeed.storage.bucket import NUM_PARALLEL, Bucket
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.object_store import ObjectStore
from s3_server import Fault

PART_BYTES = 5 * 2**20  # the least that S3 takes: three parts are made quickly
STALLS = {Fault.STALL, Fault.STALL_HALFWAY}
MAX_RETRIES = 2
KEY = samples.ref().feature_keys["input_ids"]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr("eaglefeed.storage.object_store.PART_BYTES", PART_BYTES)


@pytest.fixture
def bucket(s3: s3_server.S3Server) -> str:
    return s3.new_bucket()


@pytest.fixture
def proxy(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.FaultyProxy]:
    with s3_server.proxied(s3) as made:
        s3_server.use(monkeypatch, made.address)
        yield made


Opened = Callable[[Fault], ObjectStore]


@pytest.fixture
def opened(bucket: str, proxy: s3_server.FaultyProxy) -> Iterator[Opened]:
    stores: list[ObjectStore] = []

    def make(fault: Fault) -> ObjectStore:
        # Against a server that hangs, short; else never reached.
        limits = {"request_timeout_s": 0.8, "deadline_s": 1.0} if fault in STALLS else {}
        stores.append(ObjectStore(f"s3://{bucket}/{s3_server.PREFIX}", max_retries=MAX_RETRIES, **limits))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def _first(kind: str, fault: Fault) -> s3_server.Plan:
    return lambda request: fault if request.kind == kind and request.nth == 1 else None


def _each(kind: str, fault: Fault) -> s3_server.Plan:
    return lambda request: fault if request.kind == kind else None


def _features(*, parts: int) -> dict[str, Tensor]:
    """Of a shard that fits one request, or takes three parts."""
    return samples.tensors() if parts == 1 else {"input_ids": torch.arange((2 * PART_BYTES + 100_000) // 8)}


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


WRITES = [
    (1, "put", Fault.BUSY),
    (1, "put", Fault.CUT),
    (3, "begin", Fault.BUSY),
    (3, "part", Fault.BUSY),
    (3, "part", Fault.CUT),
    (3, "part", Fault.STALL),
    (3, "complete", Fault.BUSY),
]
READS = [
    (1, "get", Fault.BUSY),
    (1, "get", Fault.TRUNCATE),
    (1, "get", Fault.SHORTEN),
    (1, "get", Fault.STALL),
    (3, "get", Fault.CUT),
    (3, "get", Fault.TRUNCATE),
    (3, "get", Fault.SHORTEN),
    (3, "get", Fault.STALL_HALFWAY),
]


@pytest.mark.parametrize(
    ("parts", "kind", "fault"),
    [
        *WRITES,
        (1, "put", Fault.LOSE_REPLY),
        (3, "head", Fault.BUSY),
        (3, "part", Fault.LOSE_REPLY),
        (3, "complete", Fault.LOSE_REPLY),
    ],
)
def test_a_write_that_fails_once_is_tried_again(
    opened: Opened, proxy: s3_server.FaultyProxy, parts: int, kind: str, fault: Fault
) -> None:
    store, features = opened(fault), _features(parts=parts)
    proxy.plan = _first(kind, fault)
    ref = store.put(samples.ref(features), features)
    assert proxy.failed[kind] == 1
    assert _same(store.get(ref), features)


@pytest.mark.parametrize(("parts", "kind", "fault"), READS)
def test_a_read_that_fails_once_is_tried_again(
    opened: Opened, proxy: s3_server.FaultyProxy, parts: int, kind: str, fault: Fault
) -> None:
    store, features = opened(fault), _features(parts=parts)
    ref = store.put(samples.ref(features), features)
    proxy.plan = _first(kind, fault)
    assert _same(store.get(ref), features)
    assert proxy.failed[kind] == 1


def test_one_answer_of_many_that_is_cut_short_is_fetched_again(opened: Opened, proxy: s3_server.FaultyProxy) -> None:
    store, features = opened(Fault.SHORTEN), _features(parts=3)
    ref = store.put(samples.ref(features), features)
    proxy.plan = lambda request: Fault.SHORTEN if request.kind == "get" and request.nth in {2, 3} else None
    assert _same(store.get(ref), features)
    assert proxy.failed["get"] == 2


@pytest.mark.parametrize(("parts", "kind", "fault"), WRITES)
def test_a_write_that_never_goes_well_is_given_up_and_leaves_nothing(
    opened: Opened,
    proxy: s3_server.FaultyProxy,
    s3: s3_server.S3Server,
    bucket: str,
    parts: int,
    kind: str,
    fault: Fault,
) -> None:
    store, features = opened(fault), _features(parts=parts)
    proxy.plan = _each(kind, fault)
    with pytest.raises(StorageError, match="a-1") as caught:
        store.put(samples.ref(features), features)
    assert caught.value.retryable
    assert not isinstance(caught.value, SampleMissing | StoreFull)
    assert proxy.failed[kind] <= parts * (MAX_RETRIES + 1)
    assert s3.keys(bucket) == []
    assert s3.unfinished(bucket) == []
    proxy.plan = lambda _: None
    assert _same(store.get(store.put(samples.ref(features), features)), features)


@pytest.mark.parametrize(("parts", "kind", "fault"), READS)
def test_a_read_that_never_goes_well_is_given_up(
    opened: Opened, proxy: s3_server.FaultyProxy, parts: int, kind: str, fault: Fault
) -> None:
    store, features = opened(fault), _features(parts=parts)
    ref = store.put(samples.ref(features), features)
    ring = BufferRing(1, deadline_s=0.1)
    proxy.plan = lambda request: fault if request.kind == kind and request.nth >= parts else None
    with pytest.raises(StorageError, match="a-1") as kept:
        store.get(ref, ring)
    assert type(kept.value) is StorageError
    assert kept.value.retryable
    assert ring.held() == []
    proxy.plan = lambda _: None
    assert _same(store.get(ref, ring), features)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_shard_whose_every_answer_is_lost_is_whole_or_not_there(
    opened: Opened, proxy: s3_server.FaultyProxy, s3: s3_server.S3Server, bucket: str, parts: int
) -> None:
    store, features = opened(Fault.LOSE_REPLY), _features(parts=parts)
    kind = "put" if parts == 1 else "complete"
    proxy.plan = _each(kind, Fault.LOSE_REPLY)
    with pytest.raises(StorageError, match="a-1"):
        store.put(samples.ref(features), features)
    proxy.plan = lambda _: None
    assert s3.unfinished(bucket) == []
    (shard,) = store.scan()
    assert _same(store.get(store.read_ref(shard.key)), features)


@pytest.mark.parametrize("parts", [1, 3])
def test_wrong_bytes_are_found_by_their_digest(opened: Opened, proxy: s3_server.FaultyProxy, parts: int) -> None:
    store, features = opened(Fault.FLIP), _features(parts=parts)
    ref = store.put(samples.ref(features), features)
    ring = BufferRing(1)
    for nth in range(1, parts + 1):
        proxy.seen.clear()
        proxy.plan = lambda request, nth=nth: Fault.FLIP if (request.kind, request.nth) == ("get", nth) else None
        with pytest.raises(SampleCorrupt, match="checksum of") as kept:
            store.get(ref, ring)
        assert not kept.value.retryable
        assert ring.held() == []
    proxy.plan = lambda _: None
    assert _same(store.get(ref, ring), features)


@pytest.mark.parametrize(("parts", "kind"), [(1, "put"), (3, "begin"), (3, "part"), (3, "complete")])
def test_a_full_store_is_named_as_such(
    opened: Opened, proxy: s3_server.FaultyProxy, s3: s3_server.S3Server, bucket: str, parts: int, kind: str
) -> None:
    store, features = opened(Fault.FULL), _features(parts=parts)
    proxy.plan = _each(kind, Fault.FULL)
    with pytest.raises(StoreFull, match=f"s3://{bucket}") as caught:
        store.put(samples.ref(features), features)
    assert caught.value.retryable
    assert s3.keys(bucket) == []
    assert s3.unfinished(bucket) == []


@pytest.mark.parametrize("kind", ["put", "get", "head", "list", "delete"])
def test_a_denied_request_says_which_rights_it_takes(
    opened: Opened, proxy: s3_server.FaultyProxy, bucket: str, kind: str
) -> None:
    store, features = opened(Fault.DENIED), _features(parts=1)
    ref = samples.ref(features, sample_id="a-2")
    if kind == "delete":
        store.put(ref, features)
    use: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(ref, features),
        "get": lambda: store.get(ref),
        "head": lambda: store.has_document("contract.json"),
        "list": lambda: list(store.scan()),
        "delete": lambda: store.delete(ref),
    }
    proxy.plan = _each(kind, Fault.DENIED)
    with pytest.raises(StorageError, match=rf"s3://{bucket}.*access is denied.*s3:GetObject") as caught:
        use[kind]()
    assert type(caught.value) is StorageError
    assert proxy.failed[kind] == 1


def test_a_first_writer_whose_answer_was_lost_knows_that_it_won(opened: Opened, proxy: s3_server.FaultyProxy) -> None:
    store = opened(Fault.LOSE_REPLY)
    proxy.plan = _first("put", Fault.LOSE_REPLY)
    assert store.put_document("contract.json", b"one") is True
    assert proxy.failed["put"] == 1
    assert store.put_document("contract.json", b"one") is False
    assert store.put_document("contract.json", b"two") is False
    assert store.get_document("contract.json") == b"one"


def test_a_writer_killed_in_the_middle_leaves_nothing_to_be_seen(
    opened: Opened, proxy: s3_server.FaultyProxy, s3: s3_server.S3Server, bucket: str
) -> None:
    code = (
        "import sys; from eaglefeed.storage.bucket import Bucket; "
        "there = Bucket(sys.argv[1], 'team/run', request_timeout_s=60, deadline_s=60, max_retries=0); "
        "there.upload(sys.argv[2], (memoryview(bytes(2**20)) for _ in range(24)), 24 * 2**20, 'a-1')"
    )
    reached = threading.Event()

    def plan(request: s3_server.Request) -> Fault | None:
        if request.kind != "part" or request.nth == 1:
            return None
        reached.set()
        return Fault.STALL

    proxy.plan = plan
    process = subprocess.Popen([sys.executable, "-c", code, bucket, KEY])
    try:
        assert reached.wait(30)
    finally:
        process.kill()
        process.wait(timeout=10)
    proxy.plan = lambda _: None
    assert s3.keys(bucket) == []
    assert s3.unfinished(bucket) == [f"{s3_server.PREFIX}/{KEY}"]  # for the lifecycle rule, as sweep() says
    store, features = opened(Fault.BUSY), _features(parts=3)
    assert list(store.scan()) == []
    assert _same(store.get(store.put(samples.ref(features), features)), features)


def test_an_upload_holds_a_bounded_number_of_parts(
    proxy: s3_server.FaultyProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PART_BYTES", 2**16)
    there = Bucket(bucket, "run", request_timeout_s=1.0, deadline_s=0.5, max_retries=0)
    taken = 0

    def chunks() -> Iterator[memoryview]:
        nonlocal taken
        for _ in range(10 * NUM_PARALLEL):
            taken += 1
            yield memoryview(bytes(2**16))

    proxy.plan = _each("part", Fault.STALL)
    with pytest.raises(StorageError):
        there.upload(KEY, chunks(), 10 * NUM_PARALLEL * 2**16, "a-1")
    there.close()
    assert NUM_PARALLEL <= taken <= NUM_PARALLEL + 2
    assert proxy.seen["part"] <= NUM_PARALLEL + 1


def test_reads_run_a_bounded_number_of_pieces_ahead(
    proxy: s3_server.FaultyProxy, s3: s3_server.S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PART_BYTES", 1000)
    there = Bucket(bucket, "run", request_timeout_s=20.0, deadline_s=20.0, max_retries=0)
    data = bytes(index % 251 for index in range(40_500))
    s3.request("PUT", f"/{bucket}/run/{KEY}", data)
    pieces = there.pieces(KEY, 0, len(data), "a-1")
    first = bytes(next(pieces))
    pieces.close()
    there.close()
    assert first == data[:1000]
    assert proxy.seen["get"] <= NUM_PARALLEL + 1


def test_a_shard_that_another_shard_replaced_halfway_is_not_taken_for_whole(
    opened: Opened, proxy: s3_server.FaultyProxy, s3: s3_server.S3Server, bucket: str
) -> None:
    store, features = opened(Fault.BUSY), _features(parts=3)
    ref = store.put(samples.ref(features), features)

    def plan(request: s3_server.Request) -> None:
        if request.kind == "get" and request.nth == 2:
            s3.request("PUT", request.key, b"x" * 2000)

    proxy.plan = plan
    with pytest.raises(SampleCorrupt, match="cut short while it was read"):
        store.get(ref)
