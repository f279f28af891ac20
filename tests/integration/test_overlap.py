"""A producer writes a sample while it makes the next one: in order, and at most two at a time."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from torch import Tensor

import pipeline
import samples
from eaglefeed.errors import StorageError
from eaglefeed.producer.making import Made
from eaglefeed.producer.writing import SampleWriter
from eaglefeed.queue.base import Lease
from eaglefeed.schema.batch import Eagle3TargetBatch
from watched import PATIENCE_S, Diary, Watched, WatchedStore, id_of


@pytest.fixture
def run() -> Watched:
    return Watched()


@pytest.mark.parametrize("lease_batch", [1, 2, 4])
def test_a_sample_is_made_while_the_one_before_is_written_also_across_leases(run: Watched, lease_batch: int) -> None:
    def wait_for_next(sample_id: str) -> None:
        if sample_id != "p-3":
            run.diary.wait_for(f"make p-{int(sample_id[2:]) + 1}")

    run.store.during = wait_for_next
    assert run.worker(lease_batch=lease_batch).run(threading.Event()).produced == 4


@pytest.mark.parametrize("lease_batch", [1, 4])
def test_no_third_sample_is_begun_before_the_first_is_whole(run: Watched, lease_batch: int) -> None:
    def give_it_time(sample_id: str) -> None:
        threading.Event().wait(0.1)  # enough for a producer that would not wait

    run.store.during = give_it_time
    assert run.worker(lease_batch=lease_batch).run(threading.Event()).write_wait_s >= 0
    assert all(run.diary.is_before(f"stored p-{first}", f"make p-{first + 2}") for first in range(2))


def test_samples_are_handed_off_in_order_and_only_when_they_are_whole(run: Watched) -> None:
    assert run.produce().produced == 4
    steps = [line for line in run.diary.lines if not line.startswith("make")]
    assert steps == [f"{step} p-{index}" for index in range(4) for step in ("put", "stored", "handing off")]
    assert [item.id for item in run.samples.payloads()] == [f"p-{index}" for index in range(4)]


def test_a_stop_finishes_the_sample_that_is_written_and_the_one_that_is_made(run: Watched) -> None:
    stop = threading.Event()

    def stop_in_the_second(ids: Tensor) -> None:
        run.diary.write(f"make {id_of(ids)}")
        if id_of(ids) == "p-1":
            run.diary.wait_for("put p-0")
            stop.set()

    run.target.before = stop_in_the_second
    run.store.during = lambda sample_id: run.diary.wait_for("make p-1")
    stats = run.worker().run(stop)
    assert (stats.produced, stats.returned) == (2, 2)
    assert [item.id for item in run.samples.payloads()] == ["p-0", "p-1"]
    assert (run.prompts.stats().ready, run.prompts.stats().leased) == (2, 0)


# memory


class CountedTarget(pipeline.EchoTarget):
    """Counts how many of its samples live while it makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._living: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def generate_batch(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Eagle3TargetBatch:
        batch = super().generate_batch(input_ids, attention_mask, loss_mask)
        for tensor in batch.tensors().values():
            self._living.add(tensor)
        logits = [tensor for tensor in self._living if tensor.ndim == 3 and tensor.shape[-1] == pipeline.VOCAB]
        self.most = max(self.most, len(logits))
        return batch


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What only a garbage collection frees stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("failing", [(), ("p-2", "p-6")], ids=["all is well", "some fail"])
def test_at_most_two_samples_live(failing: tuple[str, ...]) -> None:
    run = pipeline.Run(store=WatchedStore(Diary()), target=CountedTarget())
    run.feed(*(pipeline.prompt(index) for index in range(12)))

    def fail(sample_id: str) -> None:
        threading.Event().wait(0.01)  # the next one is there meanwhile
        if sample_id in failing:
            raise StorageError("EIO", subject=sample_id)

    run.store.during = fail  # type: ignore[attr-defined]
    stats = run.produce()
    assert (stats.produced, stats.dead) == (12 - len(failing), len(failing))
    assert isinstance(run.target, CountedTarget)
    assert run.target.most == 2


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("error", [None, StorageError("EIO")], ids=["stored", "failed"])
def test_a_writer_that_is_done_with_a_sample_keeps_nothing_of_it(error: StorageError | None) -> None:
    run = pipeline.Run(store=WatchedStore(Diary()))
    run.feed(pipeline.prompt(0))
    lease = run.prompts.lease(1, visibility_timeout_s=60, consumer="w")
    assert isinstance(lease, Lease)

    def fail(_sample_id: str) -> None:
        if error is not None:
            raise error

    run.store.during = fail  # type: ignore[attr-defined]
    features = samples.tensors()
    tensor = weakref.ref(features["aux_hidden_states"])
    writer = SampleWriter(run.prompts, run.samples, run.store, lambda *_: None)
    writing = writer.write(lease.token, lease.items[0], Made(samples.ref(features), features))
    del features
    assert writing.wait(PATIENCE_S)
    assert tensor() is None
    writer.close(PATIENCE_S)
