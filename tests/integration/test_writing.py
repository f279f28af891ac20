"""What can go wrong while a sample is written and the next one made: every outcome is counted, and nothing is lost."""

import threading
from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

import pipeline
from eaglefeed.errors import QueueUnavailable, SampleCorrupt, StorageError, StoreFull
from eaglefeed.producer import worker as worker_module
from eaglefeed.queue.base import Lease
from eaglefeed.schema.refs import SampleRef
from watched import PATIENCE_S, Watched, id_of


@pytest.fixture
def run() -> Watched:
    return Watched()


def _fail_once(sample_id: str, error: Exception) -> Callable[[str], None]:
    left = [error]

    def fail(put: str) -> None:
        if put == sample_id and left:
            raise left.pop()

    return fail


@pytest.mark.parametrize("error", [StorageError("EIO"), RuntimeError("out of pinned memory")], ids=["storage", "torch"])
def test_a_write_that_fails_is_tried_again(run: Watched, error: Exception) -> None:
    run.store.during = _fail_once("p-1", error)
    stats = run.produce()
    assert (stats.produced, stats.retried, stats.dead) == (4, 1, 0)
    assert run.diary.lines.count("make p-1") == 2
    assert len(list(run.store.scan())) == 4


def test_a_write_that_always_fails_ends_in_a_dead_letter_and_the_others_go_on(run: Watched) -> None:
    def fail(sample_id: str) -> None:
        if sample_id == "p-2":
            raise StorageError("EIO", subject=sample_id)

    run.store.during = fail
    stats = run.produce()
    assert (stats.produced, stats.retried, stats.dead) == (3, 4, 1)
    (letter,) = run.prompts.dead_letters()
    assert (letter.id, letter.delivery_count, "EIO" in letter.reason) == ("p-2", 5, True)


def test_what_no_other_try_can_mend_is_a_dead_letter_at_once(run: Watched) -> None:
    run.store.during = _fail_once("p-2", SampleCorrupt("p-2", "impossible key"))
    stats = run.produce()
    assert (stats.produced, stats.retried, stats.dead) == (3, 0, 1)


def test_a_full_store_gets_its_prompts_back_in_the_queue_uncounted(run: Watched) -> None:
    run.store.during = _fail_once("p-1", StoreFull("store", num_bytes=9, free_bytes=0, reason="quota"))
    stats = run.produce()
    assert (stats.produced, stats.returned, stats.retried, stats.dead) == (4, 3, 0, 0)
    assert stats.paused_s == 5
    assert run.prompts.stats().redelivered == 0
    assert run.diary.lines.count("make p-0") == 1


def test_a_store_that_is_full_at_the_end_gives_the_last_sample_back(run: Watched) -> None:
    stop = threading.Event()

    def fill(sample_id: str) -> None:
        if sample_id == "p-3":
            stop.set()
            raise StoreFull("store", num_bytes=9, free_bytes=0, reason="quota")

    run.store.during = fill
    stats = run.worker().run(stop)
    assert (stats.produced, stats.returned, stats.paused_s) == (3, 1, 0)
    assert (run.prompts.stats().ready, run.prompts.stats().leased) == (1, 0)


@pytest.fixture
def robbed(run: Watched) -> Watched:
    """While p-0 is written and p-1 made, somebody else gets both, and settles them."""

    def rob(ids: Tensor) -> None:
        if id_of(ids) == "p-1":
            run.diary.wait_for("put p-0")
            run.clock.advance(61)
            for stolen in ("p-0", "p-1"):  # each alone: a crash may be its fault
                lease = run.prompts.lease(1, visibility_timeout_s=1e6, consumer="thief")
                assert isinstance(lease, Lease)
                assert run.prompts.ack(lease.token, [stolen]).ok == (stolen,)
            run.diary.write("robbed")

    run.target.before = rob
    run.store.during = lambda _sample_id: run.diary.wait_for("robbed")
    return run


def _shards(run: pipeline.Run) -> list[str]:
    return sorted(shard.key.split("/")[1].split(".")[0] for shard in run.store.scan())


def test_a_lease_that_is_lost_while_its_sample_is_written_leaves_no_shard(robbed: Watched) -> None:
    stats = robbed.worker(lease_batch=2).run(threading.Event())
    assert (stats.produced, stats.stale, stats.retried, stats.dead) == (2, 2, 0, 0)
    assert _shards(robbed) == ["p-2", "p-3"]


def test_a_stale_shard_that_cannot_be_deleted_is_left_behind_and_the_run_goes_on(
    robbed: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ref: SampleRef) -> bool:
        raise StorageError("ESTALE", subject=ref.sample_id)

    monkeypatch.setattr(robbed.store, "delete", fail)
    stats = robbed.worker(lease_batch=2).run(threading.Event())
    assert (stats.produced, stats.stale, stats.retried, stats.dead) == (2, 2, 0, 0)
    assert _shards(robbed) == ["p-0", "p-1", "p-2", "p-3"]


@pytest.mark.parametrize("error", [QueueUnavailable("server", "away"), KeyError("bug"), KeyboardInterrupt()], ids=repr)
def test_an_outage_or_a_bug_in_the_writer_ends_the_run_with_it(run: Watched, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    run.prompts.handoff = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(type(error)) as caught:
        run.produce()
    assert caught.value is error


def test_the_error_of_a_writer_still_says_where_it_came_from(run: Watched) -> None:
    run.store.during = _fail_once("p-0", ZeroDivisionError("here"))
    with pytest.raises(ZeroDivisionError) as caught:
        run.produce()
    assert [entry.name for entry in caught.traceback][-2:] == ["put", "fail"]


# a store that hangs


@pytest.fixture
def hanging(run: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Puts hang until it is set."""
    monkeypatch.setattr(worker_module, "_LAST_WRITE_S", 0.01)
    end = threading.Event()

    def hang(_sample_id: str) -> None:
        assert end.wait(PATIENCE_S)

    run.store.during = hang
    yield end
    end.set()


def test_a_store_that_hangs_ends_the_run_and_its_prompts_go_to_others(run: Watched, hanging: threading.Event) -> None:
    worker = run.worker(stall_timeout_s=0.2)
    with pytest.raises(StorageError, match=r"p-0: not written in 0\.2 s"):
        worker.run(threading.Event())
    assert worker.stats.returned == 4
    run.store.during = lambda _sample_id: None
    assert run.produce(name="other").produced == 4
    before = {shard.key for shard in run.store.scan()}
    hanging.set()  # and the first one wakes up
    worker._writer._thread.join(PATIENCE_S)
    assert {shard.key for shard in run.store.scan()} == before
    assert len(before) == run.samples.stats().ready == 4


def test_only_a_sample_that_is_finished_counts_as_progress(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = run.worker()
    monkeypatch.setattr(worker._renewer, "progress", lambda: run.diary.write("progress"))
    run.store.during = lambda sample_id: run.diary.wait_for("make p-1") if sample_id == "p-0" else None
    worker.run(threading.Event())
    lines = [line for line in run.diary.lines if "handing" not in line]
    before = lines[: lines.index("progress")]
    assert (set(before[:-1]), before[-1]) == ({"make p-0", "put p-0", "make p-1"}, "stored p-0")
    assert lines.count("progress") == 4
