"""The reference training run: checkpoints and commits, and its start. tests/integration/test_resume.py crashes it."""

import errno
import fcntl
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import draft_samples
import pipeline
import samples
from eaglefeed.clock import ManualClock
from eaglefeed.consumer.checkpoint import list_checkpoints
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.loss import DraftOutput
from eaglefeed.consumer.run import TrainingRun, load_run_assets, only_trainer_of, wait_for_run
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer, StepResult
from eaglefeed.errors import (
    ConfigError,
    SampleCorrupt,
    SampleMissing,
    StaleLease,
    StorageError,
    StoreFull,
    TargetUnavailable,
)
from eaglefeed.queue.base import AckResult, Lease, QueueLimits
from eaglefeed.storage.memory import MemoryStore


def _trainer() -> DraftTrainer:
    sizes = {"hidden_size": samples.H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    config = replace(draft_samples.CONFIG, **sizes, vocab_size=pipeline.VOCAB, draft_vocab_size=pipeline.VOCAB)
    return DraftTrainer(Eagle3Draft(config, seed=0))


@pytest.fixture
def run() -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(10)))
    made.produce()
    return made


def _train(run: pipeline.Run, folder: Path, trainer: DraftTrainer, **options: object) -> int:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        return TrainingRun(trainer, stream, folder, contract="c", **options).train()  # type: ignore[arg-type]


def test_a_run_trains_on_every_sample_and_settles_them(run: pipeline.Run, tmp_path: Path) -> None:
    assert _train(run, tmp_path, _trainer(), checkpoint_every=4) == 10
    assert run.samples.stats().done == 10
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == list(range(1, 11))


def test_several_samples_make_one_step(run: pipeline.Run, tmp_path: Path) -> None:
    assert _train(run, tmp_path, _trainer(), samples_per_step=4) == 3
    assert run.samples.stats().done == 10


def _counts(run: pipeline.Run, stats: list[tuple[int, int]]) -> Callable[[StepResult, object], None]:
    def look(_result: StepResult, _row: object) -> None:
        now = run.samples.stats()
        stats.append((now.tentative, now.done))

    return look


def test_only_what_the_oldest_kept_checkpoint_holds_is_settled(run: pipeline.Run, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    _train(run, tmp_path, _trainer(), checkpoint_every=2, keep_checkpoints=2, on_step=_counts(run, seen))
    # Checkpoints 2; 2 and 4; 4 and 6; 6 and 8: the older one of each is committed.
    assert seen == [(1, 0), (2, 0), (1, 2), (2, 2), (3, 2), (4, 2), (3, 4), (4, 4), (3, 6), (4, 6)]
    assert run.samples.stats().committed_step == 10
    assert list(run.store.scan()) == []


def test_a_drained_queue_gets_its_newest_checkpoint_committed(run: pipeline.Run, tmp_path: Path) -> None:
    _train(run, tmp_path, _trainer(), checkpoint_every=4, keep_checkpoints=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000004.safetensors",
        "step-000000008.safetensors",
        "step-000000010.safetensors",
    ]
    assert (run.samples.stats().committed_step, run.samples.stats().done) == (10, 10)


def test_a_stop_saves_what_was_trained_and_leaves_earlier_checkpoints_usable(run: pipeline.Run, tmp_path: Path) -> None:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        stop = {"on_step": lambda result, _row: stream.stop() if result.step == 5 else None}
        assert TrainingRun(_trainer(), stream, tmp_path, contract="c", checkpoint_every=3, **stop).train() == 5
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000003.safetensors",
        "step-000000005.safetensors",
    ]
    stats = run.samples.stats()
    assert (stats.committed_step, stats.done, stats.tentative, stats.ready) == (3, 3, 2, 5)


def test_a_stop_before_the_first_checkpoint_settles_what_was_trained(run: pipeline.Run, tmp_path: Path) -> None:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        training = TrainingRun(
            _trainer(),
            stream,
            tmp_path,
            contract="c",
            checkpoint_every=100,
            on_step=lambda result, _row: stream.stop() if result.step == 3 else None,
        )
        assert training.train() == 3
    assert (run.samples.stats().done, run.samples.stats().ready) == (3, 7)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000003.safetensors"]


def _open_run(num_samples: int) -> pipeline.Run:
    """A run whose prompts stay open: more may come."""
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(num_samples)), close=False)
    stop = threading.Event()
    made.target.before = lambda ids: stop.set() if ids[0, 0] == num_samples else None
    made.worker().run(stop)
    return made


def test_a_stop_while_it_waits_leaves_earlier_checkpoints_usable(tmp_path: Path) -> None:
    run = _open_run(4)
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:

        def stop_soon(result: StepResult, _row: object) -> None:
            if result.step == 4:
                threading.Timer(0.3, stream.stop).start()

        training = TrainingRun(_trainer(), stream, tmp_path, contract="c", checkpoint_every=2, on_step=stop_soon)
        assert training.train() == 4
    assert (run.samples.stats().committed_step, run.samples.stats().tentative) == (2, 2)


def test_a_queue_without_room_gets_a_checkpoint_and_its_commit_at_once(tmp_path: Path) -> None:
    run = _open_run(4)
    run.samples.configure(QueueLimits(high_count=4, low_count=2))
    counts: list[tuple[int, int]] = []
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:

        def go_on() -> None:
            assert run.samples.wait_for_room(100)
            run.samples.close()

        waiter = threading.Thread(target=go_on)
        waiter.start()
        training = TrainingRun(_trainer(), stream, tmp_path, contract="c", on_step=_counts(run, counts))
        assert training.train() == 4
        waiter.join(10)
    assert counts == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert stream.stats.wait_s < 100


def test_a_store_without_space_gets_it_from_a_trainer_that_holds_tentative_acks(tmp_path: Path) -> None:
    one = pipeline.Run()
    one.feed(pipeline.prompt(0))
    one.produce()
    (shard,) = one.store.scan()
    store = MemoryStore(capacity_bytes=3 * shard.num_bytes)
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=store)
    run.feed(*(pipeline.prompt(index) for index in range(9)))
    worker = run.worker(clock=ManualClock())
    producer = threading.Thread(target=worker.run, args=(threading.Event(),))
    producer.start()
    try:
        assert _train(run, tmp_path, _trainer(), checkpoint_every=1000, idle_s=0.1) == 9
    finally:
        producer.join(30)
    assert worker.stats.paused_s > 0  # it did find the store full
    assert (run.samples.stats().done, list(store.scan())) == (9, [])


def test_the_history_counts_what_came_again_and_what_was_stale(run: pipeline.Run, tmp_path: Path) -> None:
    lease = run.samples.lease(2, visibility_timeout_s=60, consumer="dies")
    assert isinstance(lease, Lease)
    run.clock.advance(61)
    plain = run.samples.ack

    def ack(token: int, ids: list[str], *, step: int | None = None, session: int = 0) -> AckResult:
        lost = step == 3  # as after a pause: somebody else has it now
        return AckResult((), tuple(ids)) if lost else plain(token, ids, step=step, session=session)

    run.samples.ack = ack  # type: ignore[method-assign,assignment]
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        stop = {"on_step": lambda result, _row: stream.stop() if result.step == 4 else None}
        TrainingRun(_trainer(), stream, tmp_path, contract="c", **stop).train()
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["redelivered"] for row in rows] == [1, 2, 2, 2]
    assert [row["stale"] for row in rows] == [0, 0, 1, 1]


def test_a_loss_that_is_no_number_stops_the_run_with_the_rounds_ids_and_settles_nothing_of_it(
    run: pipeline.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer()
    plain, calls = trainer.draft.forward, iter(range(100))

    def forward(**inputs: torch.Tensor) -> DraftOutput:
        output = plain(**inputs)
        return output._replace(loss_sum=output.loss_sum * float("nan")) if next(calls) == 5 else output

    monkeypatch.setattr(trainer.draft, "forward", forward)
    with pytest.raises(SampleCorrupt, match=r"^p-4, p-5: loss is not finite, no weight was changed.* nan in p-5"):
        _train(run, tmp_path, trainer, samples_per_step=2, checkpoint_every=1)
    stats = run.samples.stats()
    assert (stats.done + stats.tentative, stats.ready, trainer.step_count) == (4, 6, 2)
    assert all(bool(weight.isfinite().all()) for weight in trainer.draft.parameters())


def test_samples_of_a_step_are_padded_together_as_asked(run: pipeline.Run, tmp_path: Path) -> None:
    rows: list[int] = []
    trainer = _trainer()
    plain = trainer.draft.forward

    def forward(**inputs: torch.Tensor) -> DraftOutput:
        rows.append(len(inputs["input_ids"]))
        return plain(**inputs)

    trainer.draft.forward = forward  # type: ignore[method-assign,assignment]
    assert _train(run, tmp_path, trainer, samples_per_step=4, samples_per_batch=2) == 3
    assert rows == [2, 2, 2, 2, 2]


def test_who_acknowledges_each_step_for_good_writes_no_checkpoint(run: pipeline.Run, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert _train(run, tmp_path, _trainer(), ack_policy="step", checkpoint_every=2, on_step=_counts(run, seen)) == 10
    assert seen == [(0, step) for step in range(1, 11)]
    assert (list_checkpoints(tmp_path), list(run.store.scan())) == ([], [])


def test_a_trainer_ends_when_its_successor_has_restored_the_queue(run: pipeline.Run, tmp_path: Path) -> None:
    def restore(result: StepResult, _row: object) -> None:
        if result.step == 3:
            run.samples.restore(0)

    with pytest.raises(StaleLease, match="session is over"):
        _train(run, tmp_path, _trainer(), checkpoint_every=4, on_step=restore)
    assert (run.samples.stats().ready, run.samples.stats().done) == (10, 0)


def test_a_history_that_cannot_be_written_is_no_traceback(run: pipeline.Run, tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").symlink_to("/dev/full")
    with pytest.raises(StoreFull, match=r"history\.jsonl"):
        _train(run, tmp_path, _trainer())
    (tmp_path / "history.jsonl").unlink()
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"history\.jsonl"):
        _train(run, tmp_path, _trainer())


def test_what_a_killed_trainer_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-000000002.safetensors.0a1b2c3d.tmp").write_bytes(b"half")
    (tmp_path / ".export-000000002.0a1b2c3d.tmp").mkdir()
    (tmp_path / ".export-000000002.0a1b2c3d.tmp" / "model.safetensors").write_bytes(b"half")
    for name in ("step-000000001.safetensors", "damaged-step-000000003.safetensors", "notes.tmp"):
        (tmp_path / name).write_bytes(b"kept")
    with only_trainer_of(tmp_path):
        left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["damaged-step-000000003.safetensors", "notes.tmp", "step-000000001.safetensors", "trainer.lock"]


def test_a_file_system_without_locks_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="No locks available; pass --output"), only_trainer_of(tmp_path):
        pass


def _hold(folder: Path, ready: "multiprocessing.synchronize.Event", end: "multiprocessing.synchronize.Event") -> None:
    with only_trainer_of(folder):
        ready.set()
        end.wait(30)


def test_two_trainers_never_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, end))
    other.start()
    try:
        assert ready.wait(30)
        with pytest.raises(ConfigError, match="another trainer"), only_trainer_of(tmp_path):
            pass
    finally:
        end.set()
        other.join(30)
    with only_trainer_of(tmp_path):
        pass


def test_what_trainers_need_of_the_target_is_waited_for(run: pipeline.Run) -> None:
    assets = wait_for_run(run.store, timeout_s=1, stop=threading.Event())
    assert assets is not None
    assert assets.contract == pipeline.contract(max_length=16)
    empty = pipeline.Run()
    with pytest.raises(TargetUnavailable, match="eaglefeed produce"):
        wait_for_run(empty.store, timeout_s=5, stop=threading.Event(), clock=empty.clock)
    stopped = threading.Event()
    stopped.set()
    assert wait_for_run(empty.store, timeout_s=5, stop=stopped) is None

    with pytest.raises(SampleMissing):
        load_run_assets(empty.store)


def test_a_producer_that_ends_with_the_runs_files_before_they_are_read_is_waited_for_no_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = pipeline.Run()
    run.feed(pipeline.prompt(0))
    run.produce()
    read, gone = run.store.get_document, [True]
    monkeypatch.setattr(run.store, "get_document", lambda name: None if gone and gone.pop() else read(name))
    assets = wait_for_run(run.store, timeout_s=5, stop=threading.Event(), clock=run.clock)
    assert assets is not None
    assert gone == []
