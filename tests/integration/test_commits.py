"""Acknowledged with a step, committed later, released at last: what a stream settles, when, and in whose session."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import pipeline
from eaglefeed.consumer import leasing
from eaglefeed.consumer.state import StreamState
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import QueueUnavailable, StaleLease, StorageError
from eaglefeed.queue.base import Lease, QueueItem, QueueLimits
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage import janitor
from eaglefeed.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("deletes_in_place")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)  # a stream's end waits for the lease call in hand


def _run(num_samples: int = 6) -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    _produce(made, num_samples)
    return made


def _produce(run: pipeline.Run, num_samples: int) -> None:
    run.feed(*(pipeline.prompt(index) for index in range(num_samples)))
    run.produce()


@pytest.fixture
def run() -> pipeline.Run:
    return _run()


@pytest.fixture
def stream(run: pipeline.Run) -> Iterator[SampleStream]:
    with SampleStream(run.samples, run.store, consumer="t") as opened:
        yield opened


def _ids(batches: list[Eagle3TargetBatch]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def _shards(run: pipeline.Run) -> set[str]:
    return {shard.key.split("/")[1].split(".")[0] for shard in run.store.scan()}


def test_an_ack_with_a_step_settles_nothing_before_its_commit(run: pipeline.Run, stream: SampleStream) -> None:
    stream.take(2)
    assert stream.ack(1) == 2
    stream.take(3)
    assert stream.ack(2) == 3
    stats = run.samples.stats()
    assert (stats.done, stats.tentative, len(_shards(run))) == (0, 5, 6)
    assert stream.commit(1) == 2
    stats = run.samples.stats()
    assert (stats.done, stats.tentative, stats.released, stats.committed_step) == (2, 3, 0, 1)
    assert _shards(run) == {"p-2", "p-3", "p-4", "p-5"}


def test_a_commit_can_be_repeated(run: pipeline.Run, stream: SampleStream) -> None:
    stream.take(2)
    stream.ack(7)
    assert [stream.commit(7), stream.commit(7), stream.commit(3)] == [2, 0, 0]
    assert run.samples.stats().committed_step == 7


def test_the_state_holds_what_was_acknowledged_since_the_last_commit(stream: SampleStream) -> None:
    for step in (1, 2, 3):
        stream.take(2)
        stream.ack(step)
    seen = [f"p-{index}" for index in range(6)]
    assert stream.state_dict() == {"run": "run", "queue": "samples", "step": 3, "seen": seen}
    stream.commit(2)
    assert stream.state_dict()["seen"] == ["p-4", "p-5"]
    stream.commit(3)
    assert stream.state_dict()["seen"] == []


def test_the_state_leaves_out_what_was_stale(run: pipeline.Run) -> None:
    with SampleStream(run.samples, run.store, consumer="t", lease_batch=6, prefetch=6) as stream:
        stream.take(6)
        run.clock.advance(61)
        assert isinstance(run.samples.lease(1, visibility_timeout_s=60, consumer="other"), Lease)
        assert stream.ack(1) == 0
        assert stream.stats.stale == 6
        assert stream.state_dict()["seen"] == []


def test_what_is_drained_may_still_wait_for_its_commit(run: pipeline.Run, stream: SampleStream) -> None:
    stream.take(6)
    stream.ack(1)
    assert stream.take(1) == []
    assert stream.drained
    assert run.samples.stats().tentative == 6
    assert stream.commit(1) == 6
    assert _shards(run) == set()


def test_a_stopped_stream_is_not_drained(stream: SampleStream) -> None:
    stream.stop()
    assert stream.ended
    assert not stream.drained


def test_after_a_restore_the_later_acks_come_again_first_and_the_earlier_never(run: pipeline.Run) -> None:
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        for step in (1, 2):
            stream.take(2)
            stream.ack(step)
        stream.commit(1)
        state = stream.state_dict() | {"step": 1, "seen": []}
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        stream.load_state_dict(state)
        assert _ids(stream.take(9, linger_s=0.1)) == ["p-2", "p-3", "p-4", "p-5"]
        assert stream.stats.redelivered == 0


@pytest.mark.parametrize("call", ["take", "ack", "commit"])
def test_a_trainer_whose_successor_restored_the_queue_must_stop(run: pipeline.Run, call: str) -> None:
    with SampleStream(run.samples, run.store, consumer="paused", lease_batch=2, prefetch=2) as paused:
        paused.take(1)
        paused.ack(1)
        paused.take(1)
        successor = SampleStream(run.samples, run.store, consumer="successor")
        successor.load_state_dict(successor.state_dict())
        calls = {"take": lambda: [paused.take(1) for _ in range(9)], "ack": lambda: paused.ack(2)}
        with pytest.raises(StaleLease, match="session is over"):
            calls.get(call, lambda: paused.commit(1))()
        assert paused.ended
        with pytest.raises(StaleLease):
            paused.take(1)
        with successor:
            assert _ids(successor.take(6)) == [f"p-{index}" for index in range(6)]
            assert successor.ack(1) == 6
            with pytest.raises(StaleLease):
                paused.commit(99)
            assert run.samples.stats().tentative == 6
    assert len(_shards(run)) == 6


def test_a_shard_stays_until_every_group_is_done_with_it() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    server = MemoryServer(run.clock)
    run.prompts = MemoryLeaseQueue(server, "run", "prompts")
    run.samples = MemoryLeaseQueue(server, "run", "samples", "a")
    run.samples.configure(QueueLimits(), groups=["a", "b"])
    other = MemoryLeaseQueue(server, "run", "samples", "b")
    _produce(run, 4)
    with SampleStream(run.samples, run.store, consumer="a") as stream:
        stream.take(4)
        stream.ack(1)
        assert stream.commit(1) == 4
    assert len(_shards(run)) == 4
    with SampleStream(other, run.store, consumer="b") as stream:
        seen = [batch.sample_ids[0] for _, batch in zip(range(2), stream, strict=False)]
    assert seen == ["p-0", "p-1"]
    assert _shards(run) == {"p-1", "p-2", "p-3"}  # the second was never acknowledged


def _die(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("again", ["start", "commit"])
def test_shards_that_a_crash_left_after_the_commit_go_later(run: pipeline.Run, again: str) -> None:
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        stream.take(4)
        stream.ack(1)
        run.store.delete, delete = _die, run.store.delete  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyboardInterrupt):
            stream.commit(1)
        run.store.delete = delete  # type: ignore[method-assign]
        assert (run.samples.stats().released, len(_shards(run))) == (4, 6)
        if again == "commit":
            stream.commit(1)
    if again == "start":
        SampleStream(run.samples, run.store, consumer="t").close()
    assert (run.samples.stats().released, _shards(run)) == (0, {"p-4", "p-5"})


def test_a_crash_after_the_deletion_is_no_error_later(run: pipeline.Run, stream: SampleStream) -> None:
    stream.take(4)
    stream.ack(1)
    run.samples.forget, forget = _die, run.samples.forget  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        stream.commit(1)
    run.samples.forget = forget  # type: ignore[method-assign]
    assert (run.samples.stats().released, len(_shards(run))) == (4, 2)
    stream.commit(1)
    assert run.samples.stats().released == 0


def test_more_released_samples_than_a_page_all_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "_RELEASED_PAGE", 10)
    run = _run(45)
    with SampleStream(run.samples, run.store, consumer="t", lease_batch=100, prefetch=100, held=45) as stream:
        stream.take(45)
        stream.ack(1)
        assert stream.commit(1) == 45
    assert (run.samples.stats().released, _shards(run)) == (0, set())


def test_retained_shards_stay_and_their_samples_are_forgotten(run: pipeline.Run) -> None:
    with SampleStream(run.samples, run.store, consumer="t", retain=True) as stream:
        stream.take(6)
        stream.ack(1)
        stream.commit(1)
    assert (run.samples.stats().released, len(_shards(run))) == (0, 6)


def test_a_shard_that_cannot_be_deleted_is_tried_again_and_stops_nothing() -> None:
    class Stubborn(MemoryStore):
        refuses = True

        def delete(self, ref: SampleRef) -> bool:
            if self.refuses and ref.sample_id == "p-1":
                raise StorageError("read-only file system", subject=ref.sample_id)
            return super().delete(ref)

    store = Stubborn()
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=store)
    _produce(run, 3)
    with SampleStream(run.samples, store, consumer="t") as stream:
        stream.take(3)
        stream.ack(1)
        assert stream.commit(1) == 3
        assert (run.samples.stats().released, _shards(run)) == (1, {"p-1"})
        store.refuses = False
        stream.commit(1)
    assert (run.samples.stats().released, _shards(run)) == (0, set())


def test_a_released_ref_that_nobody_can_read_does_not_stay_forever(run: pipeline.Run, stream: SampleStream) -> None:
    other = pipeline.Run()
    other.samples.put([QueueItem("junk", b"\xc1", stored_bytes=5)])
    lease = other.samples.lease(1, visibility_timeout_s=60, consumer="t")
    assert isinstance(lease, Lease)
    other.samples.ack(lease.token, ["junk"])
    assert other.samples.stats().released == 1
    SampleStream(other.samples, run.store, consumer="t").close()
    assert other.samples.stats().released == 0
    assert len(_shards(run)) == 6


def test_a_commit_bears_a_short_outage(run: pipeline.Run, stream: SampleStream) -> None:
    plain, left = run.samples.commit, [2]

    def commit(step: int, *, session: int = 0) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise QueueUnavailable("server", "away")
        return plain(step, session=session)

    run.samples.commit = commit  # type: ignore[method-assign]
    stream.take(3)
    stream.ack(1)
    assert stream.commit(1) == 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "my_trainer.py"
    spec = importlib.util.spec_from_file_location("my_trainer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("killed_in", ["learn", "save", "commit"])
def test_a_loop_of_ones_own_learns_every_sample_once(
    run: pipeline.Run, example: ModuleType, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: list[str] = []
    saved: tuple[StreamState | None, list[str]] = (None, [])

    def learn(batches: list[Eagle3TargetBatch]) -> None:
        if killed_in == "learn" and model:
            _die()
        model.extend(_ids(batches))

    def save(state: StreamState) -> None:
        nonlocal saved
        if killed_in == "save":
            _die()
        saved = (state, list(model))

    take = SampleStream.take
    monkeypatch.setattr(SampleStream, "take", lambda stream, n, **_: take(stream, 4, linger_s=0.1))
    with monkeypatch.context() as patch, SampleStream(run.samples, run.store, consumer="t") as stream:
        if killed_in == "commit":
            patch.setattr(SampleStream, "commit", _die)
        with pytest.raises(KeyboardInterrupt):
            example.train_with_checkpoints(stream, learn, save)
    state, model = saved
    killed_in = "nowhere"
    with SampleStream(run.samples, run.store, consumer="t") as stream:
        stream.load_state_dict(state or stream.state_dict())
        example.train_with_checkpoints(stream, learn, save)
    assert saved[1] == [f"p-{index}" for index in range(6)]
    assert (run.samples.stats().done, _shards(run)) == (6, set())
