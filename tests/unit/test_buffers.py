"""The ring of read buffers: one is used again when the last view of it has died, and never before."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from eaglefeed.clock import ManualClock
from eaglefeed.errors import BuffersHeld, StorageError
from eaglefeed.storage import buffers
from eaglefeed.storage.buffers import BufferRing, fresh_memory, memory_for


def _ring(num_buffers: int = 1, **options: object) -> BufferRing:
    return BufferRing(num_buffers, clock=ManualClock(), **options)  # type: ignore[arg-type]


KEEPERS: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda buffer: buffer,
    "a slice": lambda buffer: buffer[8:16],
    "one number": lambda buffer: buffer[0],
    "a view of another dtype": lambda buffer: buffer.view(torch.bfloat16).reshape(4, 8),
    "a transposed view": lambda buffer: buffer.view(8, 8).t(),
    "what to() returns where nothing changes": lambda buffer: buffer.to(torch.uint8),
    "a numpy array": lambda buffer: buffer.numpy()[::2],
    "a memoryview": lambda buffer: memoryview(buffer.numpy()),
    "a tensor over that": lambda buffer: torch.frombuffer(memoryview(buffer.numpy()), dtype=torch.int64, count=1),
    "the storage": lambda buffer: buffer.untyped_storage(),
    "a parameter": lambda buffer: torch.nn.Parameter(buffer[:4].view(torch.float32), requires_grad=False),
    "a dict in a list": lambda buffer: [{"loss_mask": buffer.view(torch.int64)[:2]}],
    "an unpacked batch": lambda buffer: buffer.view(8, 8).unbind(0)[7:],
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_whatever_keeps_a_view_keeps_the_buffer(keeper: str) -> None:
    ring = _ring()
    kept = KEEPERS[keeper](ring.take(64, "a"))
    with pytest.raises(BuffersHeld):
        ring.take(64, "b")
    del kept
    assert ring.held() == []
    assert ring.take(64, "b").shape == (64,)


@pytest.mark.parametrize("copy", [Tensor.clone, Tensor.float, Tensor.tolist, Tensor.sum])
def test_a_copy_keeps_no_buffer(copy: Callable[[Tensor], object]) -> None:
    ring = _ring()
    kept = copy(ring.take(64, "a"))
    assert ring.held() == []
    assert kept is not None


def test_the_same_memory_is_used_again() -> None:
    ring = _ring(2)
    first, second = ring.take(64, "a"), ring.take(64, "b")
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first
    assert ring.take(60, "c").data_ptr() in places - {second.data_ptr()}


def test_a_cycle_gives_its_buffer_back_when_it_is_collected() -> None:
    ring = _ring()
    cycle: list[object] = [ring.take(64, "a")]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert ring.held() == []


def test_a_buffer_may_come_back_while_the_ring_is_at_work() -> None:
    ring = _ring()
    buffer = ring.take(64, "a")
    with ring._lock:  # as when a garbage collection begins in the middle of take
        del buffer
    assert ring.held() == []


def test_an_exhausted_ring_names_its_holders_after_the_deadline() -> None:
    clock = ManualClock()
    ring = BufferRing(2, deadline_s=30, clock=clock)
    kept = [ring.take(64, name) for name in ("a-1", "a-2")]
    began_s = clock.monotonic()
    with capture_logs() as told, pytest.raises(BuffersHeld, match=r"a-1, a-2; .*clone") as caught:
        ring.take(64, "a-3")
    assert [(line["event"], line["held_by"]) for line in told] == [("waiting_for_a_read_buffer", ["a-1", "a-2"])]
    assert caught.value.holders == ["a-1", "a-2"] == ring.held()
    assert not caught.value.retryable
    assert 30 <= clock.monotonic() - began_s < 31
    del kept
    assert ring.held() == []


def test_a_waiting_reader_gets_the_buffer_that_comes_back() -> None:
    ring = BufferRing(1, deadline_s=60)
    kept = [ring.take(64, "a")]
    found: list[Tensor] = []
    reader = threading.Thread(target=lambda: found.append(ring.take(64, "b")))
    reader.start()
    place = kept.pop().data_ptr()
    reader.join(60)
    assert found[0].data_ptr() == place


def test_stopping_ends_the_wait() -> None:
    stop = threading.Event()
    ring = _ring(stop=stop)
    kept = ring.take(64, "a")
    stop.set()
    with pytest.raises(StorageError, match="stopped"):
        ring.take(64, "b")
    assert len(kept) == 64


def test_a_buffer_that_is_too_small_is_replaced_and_never_kept_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    make, most = buffers._pages, 0

    def count(num_bytes: int) -> object:
        nonlocal most
        pages = make(num_bytes)
        alive.add(pages)
        most = max(most, len(alive))
        return pages

    monkeypatch.setattr(buffers, "_pages", count)
    ring = _ring(2)
    sizes = [10, 3 * 2**20, 5 * 2**20, 1, 2**20, 5 * 2**20]
    for size in sizes:
        kept = [ring.take(size, "a"), ring.take(size, "b")]
        assert [len(buffer) for buffer in kept] == [size, size]
        kept[0].fill_(1)
        assert int(kept[0].sum()) == size
        kept.clear()
    assert most == 2


def test_an_allocation_that_fails_costs_no_place_in_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = _ring()

    def fail(_num_bytes: int) -> object:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(buffers, "_pages", fail)
        for _ in range(3):
            with pytest.raises(MemoryError):
                ring.take(64, "a")
    assert ring.held() == []
    assert len(ring.take(64, "a")) == 64


def test_a_kept_tensor_never_changes_while_the_ring_goes_round_under_many_threads() -> None:
    ring = BufferRing(6, deadline_s=60)
    faults: list[str] = []

    def work(number: int) -> None:
        kept: list[tuple[int, Tensor]] = []
        for turn in range(200):
            value = (number * 200 + turn) % 251
            buffer = ring.take(256, f"{number}-{turn}")
            buffer.fill_(value)
            kept.append((value, buffer.view(torch.int32)[7:9]))
            del buffer
            if len(kept) > 1:  # past its own use, while others read into the buffers that came back
                wanted, view = kept.pop(0)
                if view.view(torch.uint8).tolist() != [wanted] * 8:
                    faults.append(f"{number}-{turn}")
                del view

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert ring.held() == []


@pytest.mark.parametrize("num_bytes", [1, 63, 4096, 3 * 2**20 + 1])
def test_memory_is_aligned_writable_and_as_large_as_asked_for(num_bytes: int) -> None:
    for memory in (fresh_memory(num_bytes), memory_for(num_bytes, _ring(), "a")):
        memory[-1] = 7
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        assert len(tensor) == num_bytes
        assert tensor.data_ptr() % 64 == 0
        assert int(tensor[-1]) == 7


def test_a_sample_of_empty_tensors_takes_no_buffer() -> None:
    ring = _ring()
    assert len(memory_for(0, ring, "a")) == 0
    assert ring.held() == []


def test_a_buffer_for_cuda_waits_for_the_copies_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Stream:
        def record_event(self) -> "Stream":
            return self

        def synchronize(self) -> None:
            asked.append("synchronized")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or Stream())
    monkeypatch.setattr(BufferRing, "_make", lambda _ring, num_bytes: memoryview(bytearray(num_bytes)))
    ring = _ring(device=torch.device("cuda", 1))
    ring.take(8, "a")
    assert asked == [torch.device("cuda", 1)]
    ring.take(8, "b")
    assert asked[:2] == [torch.device("cuda", 1), "synchronized"]
    ring = _ring(device=torch.device("cpu"))
    asked.clear()
    ring.take(8, "c")
    assert asked == []
