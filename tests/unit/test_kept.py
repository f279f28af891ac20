"""What a producer keeps of its samples: the tensors alone, and within its bound."""

import threading
from dataclasses import replace

import pytest
import torch

import samples
from eaglefeed.clock import SYSTEM_CLOCK, ManualClock
from eaglefeed.errors import SchemaError, StorageError, StoreFull
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import key_of
from eaglefeed.storage.kept import KeptSamples, own_tensors

FEATURES = samples.tensors()


def _ref(index: int) -> SampleRef:
    return replace(samples.ref(FEATURES, sample_id=f"a-{index}"), store_uri="nccl://h:1/0123456789abcdef")


def _table(num_samples: float, clock: object = SYSTEM_CLOCK) -> KeptSamples:
    size = KeptSamples("nccl://h:1", 2**20, SYSTEM_CLOCK).add(_ref(0), FEATURES, wait_s=0).stored_bytes
    return KeptSamples("nccl://h:1", int(num_samples * size), clock)  # type: ignore[arg-type]


def test_a_dense_tensor_is_kept_itself_and_a_part_of_something_is_copied() -> None:
    whole, big = torch.arange(12.0).reshape(3, 4), torch.zeros(1000)
    given = {"whole": whole, "part": big[:10], "strided": whole.t(), "empty": torch.empty(0, 3)}
    own = own_tensors(given, pinned=False)
    assert own["whole"].data_ptr() == whole.data_ptr()
    assert all(torch.equal(own[name], tensor) for name, tensor in given.items())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own.values())
    assert all(tensor.is_contiguous() for tensor in own.values())


def test_a_sample_is_kept_until_it_is_popped_and_its_room_comes_back() -> None:
    table = _table(1.5)
    stored = table.add(_ref(0), FEATURES, wait_s=0)
    assert table.free_bytes == table.capacity_bytes - stored.stored_bytes
    assert not table.wait_for_room(0)
    kept = table.get(key_of(stored))
    assert kept is not None
    assert kept.ref == stored
    assert [each.ref for each in table.all()] == [stored]
    assert table.pop(key_of(stored)) is True
    assert table.pop(key_of(stored)) is False
    assert (table.get(key_of(stored)), table.all(), table.free_bytes) == (None, [], table.capacity_bytes)
    assert table.wait_for_room(0)


def test_without_room_a_put_waits_and_then_says_that_the_store_is_full() -> None:
    clock = ManualClock()
    table = _table(1.5, clock)
    table.add(_ref(0), FEATURES, wait_s=0)
    started_s = clock.monotonic()
    with pytest.raises(StoreFull, match=r"store\.peer_bytes reached") as caught:
        table.add(_ref(1), FEATURES, wait_s=30)
    assert 30 <= clock.monotonic() - started_s < 31
    assert caught.value.retryable
    assert len(table.all()) == 1


def test_a_put_that_waits_goes_on_when_room_comes() -> None:
    table = _table(1.5)
    first = table.add(_ref(0), FEATURES, wait_s=0)
    timer = threading.Timer(0.05, table.pop, [key_of(first)])
    timer.start()
    assert table.add(_ref(1), FEATURES, wait_s=20).sample_id == "a-1"
    timer.join()


def test_a_sample_larger_than_the_bound_is_refused_at_once() -> None:
    clock = ManualClock()
    table = _table(0.5, clock)
    started_s = clock.monotonic()
    with pytest.raises(SchemaError, match=r"raise store\.peer_bytes") as caught:
        table.add(_ref(0), FEATURES, wait_s=30)
    assert clock.monotonic() == started_s
    assert not caught.value.retryable  # each attempt would cost a forward, for ever
    assert table.free_bytes == table.capacity_bytes


def test_a_sample_that_cannot_be_hashed_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table(1.5)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("eaglefeed.storage.kept.ShardWriter.chunks", fail)
        with pytest.raises(RuntimeError):
            table.add(_ref(0), FEATURES, wait_s=0)
    assert table.free_bytes == table.capacity_bytes
    table.add(_ref(0), FEATURES, wait_s=0)


def test_a_key_is_taken_once_also_while_its_sample_is_on_its_way() -> None:
    table = _table(3)
    table.add(_ref(0), FEATURES, wait_s=0)
    with pytest.raises(StorageError, match="written before"):
        table.add(_ref(0), FEATURES, wait_s=0)


def test_of_many_puts_at_once_no_more_are_kept_than_have_room() -> None:
    table, kept, full = _table(4.5), list[str](), list[str]()

    def add(index: int) -> None:
        try:
            kept.append(table.add(_ref(index), FEATURES, wait_s=0).sample_id)
        except StoreFull:
            full.append(f"a-{index}")

    threads = [threading.Thread(target=add, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(kept), len(full)) == (4, 8)
    assert sorted(each.ref.sample_id for each in table.all()) == sorted(kept)
