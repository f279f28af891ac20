"""Hugging Face's own Trainer on a stream: the loss, the end, acknowledging, checkpoints and going on from them."""

import gc
import json
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import hf_training
import pipeline
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer import gathering, leasing
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError, QueueError, SampleCorrupt, StorageError
from eaglefeed.queue.base import QueueLimits
from hf_training import Learned, assert_close, hf_trainer, learned_by, reference, same, weights_of

NUM_SAMPLES = 12  # 6 steps of two


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)  # a stream's end waits for the lease call in hand
    monkeypatch.setattr(gathering, "_WAIT_S", 0.02)


@pytest.fixture(autouse=True, scope="module")
def _young() -> Iterator[None]:
    """Each training begins with a full garbage collection, most of whose time goes to imported modules."""
    gc.freeze()
    yield
    gc.unfreeze()


class KilledError(BaseException):
    """A SIGKILL: nothing is given back, nothing is saved."""


def _run(num_samples: int = NUM_SAMPLES, *, supervised: Callable[[int], bool] = lambda _: True) -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(hf_training.prompt(index, supervised=supervised(index)) for index in range(num_samples)))
    made.produce()
    return made


def _stream(run: pipeline.Run) -> RoundStream:
    return hf_training.round_stream(run.samples, run.store, Ranks.alone(), clock=run.clock)


def _train(run: pipeline.Run, folder: Path, *, resume: bool | str = True, **changes: Any) -> dict[str, Tensor]:
    """One life of a trainer; returns the weights."""
    return _learn(run, folder, resume=resume, **changes).weights


def _learn(run: pipeline.Run, folder: Path, *, resume: bool | str = True, **changes: Any) -> Learned:
    with _stream(run) as stream:
        trainer = hf_trainer(stream, folder, **changes)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except KilledError:
            stream.stop()
            assert stream._feeder is not None
            assert stream._queue is not None
            stream._feeder.join(10)
            stream._queue.holdings.drain()  # what a killed process holds stays leased
            raise
        return learned_by(trainer)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of a life without a death."""
    return _train(_run(), tmp_path_factory.mktemp("straight"))


def test_a_step_weighs_positions_alike_whichever_sample_and_forward_they_stand_in(
    tmp_path: Path,
) -> None:
    wanted = reference(_run(), [2] * 6)
    assert_close(_learn(_run(), tmp_path / "one"), wanted)
    padded = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    assert_close(_learn(_run(), tmp_path / "two", **padded), wanted)


def test_a_last_round_that_is_not_complete_is_trained_on_too(tmp_path: Path) -> None:
    run = _run(3)
    assert_close(_learn(run, tmp_path), reference(_run(3), [2, 1]))
    assert run.samples.stats().done == 3


def test_a_stream_that_does_not_fill_its_last_round_can_be_trained_on_by_one_process(tmp_path: Path) -> None:
    run = _run(3)
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        plain = stream.take
        stream.take = lambda n, **options: plain(n, linger_s=0.5, **options)  # type: ignore[method-assign]
        trainer = hf_trainer(stream, tmp_path)
        trainer.train()
    assert_close(learned_by(trainer), reference(_run(3), [2, 1]))
    assert run.samples.stats().done == 3


def test_training_ends_with_the_stream_and_all_is_saved_settled_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = _run(), []
    plain = hf_training.HFDraftTrainer.get_batch_samples
    monkeypatch.setattr(hf_training.HFDraftTrainer, "get_batch_samples", lambda *args: asked.append(1) or plain(*args))
    _train(run, tmp_path)
    assert len(asked) == 7, "six steps and the end: the Trainer does not go round until max_steps"
    stats = run.samples.stats()
    assert (stats.done, stats.unsettled, stats.released) == (NUM_SAMPLES, 0, 0)
    assert list(run.store.scan()) == []
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_training_ends_at_max_steps_and_the_rest_goes_back(tmp_path: Path) -> None:
    run = _run()
    _train(run, tmp_path, max_steps=3, save_steps=1)
    stats = run.samples.stats()
    assert (stats.done, stats.tentative, stats.ready, stats.committed_step) == (4, 2, NUM_SAMPLES - 6, 2)
    _train(run, tmp_path, max_steps=3)  # it is at its end already
    stats = run.samples.stats()
    assert (stats.done + stats.tentative, stats.ready) == (6, NUM_SAMPLES - 6)


def test_the_oldest_checkpoint_that_is_kept_is_committed(tmp_path: Path) -> None:
    run, committed = _run(), []

    class Watch(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            committed.append(run.samples.stats().committed_step)

    _train(run, tmp_path, save_steps=1, max_steps=5, callbacks=[Watch()])
    assert committed == [1, 1, 2, 3, 4]


# Checkpoints are written after steps 2, 4 and 6.
LINES = [
    ("_acknowledge", (1, 4)),  # before: after the update; after: before the checkpoint
    ("save_model", (1,)),  # before: only the stream's state is there; after: no optimizer's
    ("_save_rng_state", (2,)),  # after: all but the Trainer's state
    ("_oldest", (2,)),  # before: checkpoint whole, nothing committed
]
POINTS = [
    pytest.param(name, number, after, id=f"{'after' if after else 'before'} {name} {number}")
    for name, numbers in LINES
    for number in numbers
    for after in (False, True)
]


def _kill_at(patch: pytest.MonkeyPatch, name: str, number: int, *, after: bool) -> None:
    """Raise before or after call `number` of a method."""
    plain, calls = getattr(hf_training.HFDraftTrainer, name), [0]

    def killed(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            raise KilledError
        result = plain(*args, **options)
        if calls[0] == number:
            raise KilledError
        return result

    patch.setattr(hf_training.HFDraftTrainer, name, killed)


@pytest.mark.parametrize(("name", "number", "after"), POINTS)
def test_a_run_that_is_killed_at_any_line_ends_with_the_weights_of_one_that_is_not(
    name: str, number: int, after: bool, tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    run = _run()
    with pytest.MonkeyPatch.context() as patch:
        _kill_at(patch, name, number, after=after)
        with pytest.raises(KilledError):
            _train(run, tmp_path)
    assert same(_train(run, tmp_path), straight)
    stats = run.samples.stats()
    assert (stats.done, stats.dead, stats.unsettled, stats.released, stats.redelivered) == (NUM_SAMPLES, 0, 0, 0, 0)
    assert list(run.store.scan()) == []


def test_an_earlier_checkpoint_that_is_kept_can_be_gone_on_from(tmp_path: Path, straight: dict[str, Tensor]) -> None:
    run = _run()
    _train(run, tmp_path, max_steps=5)  # checkpoints 4 and 5, 4 is committed
    assert same(_train(run, tmp_path, resume=str(tmp_path / "checkpoint-4")), straight)
    assert run.samples.stats().done == NUM_SAMPLES


def test_going_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    run = _run()
    _train(run, tmp_path, max_steps=5)  # checkpoints 4 and 5
    (tmp_path / "checkpoint-7").mkdir()  # one that was being written at a death
    with pytest.MonkeyPatch.context() as patch:
        _kill_at(patch, "_acknowledge", 1, after=True)
        with pytest.raises(KilledError):
            _train(run, tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-4",
        "later-checkpoint-5",
        "later-checkpoint-7",
    ]


def test_the_best_checkpoint_holds_back_no_commit_and_an_evaluation_tells_the_mean_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 4}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    options |= {"output_dir": "./out", "per_device_eval_batch_size": 1, "data_collator": lambda rows: rows[0]}
    other, run = _run(2), _run()
    with SampleStream(other.samples, other.store, consumer="t", clock=run.clock) as stream:
        held_out = [batch.to_trainer_inputs() for batch in stream.take(2)]
    with _stream(run) as rounds:
        trainer = hf_trainer(rounds, Path("out"), eval_dataset=held_out, **options)
        trainer.train()  # the worst one was the first, which it has loaded again
        loss = trainer.evaluate()["eval_loss"]
        draft = trainer.model.draft
    assert sorted(path.name for path in Path("out").iterdir()) == ["checkpoint-1", "checkpoint-4"]
    assert run.samples.stats().committed_step == 4
    outputs = [draft(**inputs) for inputs in held_out]
    means = [float(output.loss_sum.detach() / output.num_supervised[0]) for output in outputs]
    assert loss == pytest.approx(sum(means) / 2)


def test_a_start_anew_is_refused_once_steps_are_committed(tmp_path: Path) -> None:
    run = _run()
    _train(run, tmp_path, max_steps=4)
    with pytest.raises(QueueError, match="committed"):
        _train(run, tmp_path / "new")


def test_a_checkpoint_without_a_streams_state_is_refused(tmp_path: Path) -> None:
    run = _run()
    _train(run, tmp_path, max_steps=2)
    (tmp_path / "checkpoint-2" / "eaglefeed_stream.json").unlink()
    with pytest.raises(StorageError, match=r"eaglefeed_stream\.json"):
        _train(run, tmp_path, resume=str(tmp_path / "checkpoint-2"))


def test_a_step_without_supervision_changes_no_weight(tmp_path: Path) -> None:
    # Samples 4 to 7: steps 3 and 4 have nothing to learn, and Adam has its momentum by then.
    run, weights = _run(supervised=lambda index: index not in range(4, 8)), []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **options: Any) -> None:
            weights.append({name: tensor.clone() for name, tensor in options["model"].state_dict().items()})

    _train(run, tmp_path, callbacks=[Watch()])
    same_as_before = [same(one, other) for one, other in pairwise(weights)]
    assert same_as_before == [False, True, True, False, False]
    assert run.samples.stats().done == NUM_SAMPLES


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_what_is_not_finite_stops_with_the_samples_of_the_round_and_no_weight_changed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = _run(), [0]

    class Spoil(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps[0] += 1

    plain = Eagle3Draft.forward

    def spoilt(self: Eagle3Draft, **inputs: Tensor) -> Any:
        output = plain(self, **inputs)
        if steps[0] < 3:
            return output
        # The square root's slope at 0 has no end, while its value is 0.
        extra = torch.nan if fault == "loss" else (self.fc.weight.sum() * 0.0).sqrt()
        return output._replace(loss_sum=output.loss_sum + extra)

    monkeypatch.setattr(Eagle3Draft, "forward", spoilt)
    with _stream(run) as stream:
        trainer = hf_trainer(stream, tmp_path, callbacks=[Spoil()])
        with pytest.raises(SampleCorrupt, match="p-4, p-5: loss or gradient is not finite"):
            trainer.train()
        weights = weights_of(trainer)
    assert run.samples.stats().tentative + run.samples.stats().done == 4
    monkeypatch.setattr(Eagle3Draft, "forward", plain)
    assert same(weights, _train(_run(), tmp_path / "two", max_steps=2))


def test_a_queue_that_waits_for_a_commit_gets_a_checkpoint(tmp_path: Path) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.samples.configure(QueueLimits(high_count=3, low_count=2))
    run.feed(*(hf_training.prompt(index) for index in range(NUM_SAMPLES)))
    producing = threading.Thread(target=run.worker(clock=SYSTEM_CLOCK).run, args=(threading.Event(),))
    producing.start()
    _train(run, tmp_path, save_steps=100)
    producing.join(10)
    assert run.samples.stats().done == NUM_SAMPLES
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def test_without_checkpoints_samples_are_settled_with_their_step(tmp_path: Path) -> None:
    run, done = _run(), []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            done.append(run.samples.stats().done)

    _train(run, tmp_path, save_strategy="no", callbacks=[Watch()])
    assert done == [0, 2, 4, 6, 8, 10]
    assert run.samples.stats().done == NUM_SAMPLES
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_reports_say_what_waits_and_what_became_of_samples(tmp_path: Path) -> None:
    _train(_run(), tmp_path)
    history = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    reports = [row for row in history if "loss" in row]
    assert [row["delivered"] for row in reports] == [2, 4, 6, 8, 10, NUM_SAMPLES]
    assert all(0 <= row["data_wait"] <= 1 and row["dead"] == row["stale"] == row["redelivered"] == 0 for row in reports)
    assert reports[0]["loss"] > reports[-1]["loss"] > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"max_steps": -1}, "max_steps", id="max_steps"),
        pytest.param({"auto_find_batch_size": True}, "auto_find_batch_size", id="auto_find_batch_size"),
    ],
)
def test_settings_that_a_stream_cannot_be_trained_with_are_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with _stream(_run()) as stream, pytest.raises(ConfigError, match=f"{named}: cannot train on a stream so"):
        hf_trainer(stream, tmp_path, **changes)


def test_a_stream_for_another_number_of_ranks_than_the_trainers_is_refused(tmp_path: Path) -> None:
    run = _run()
    with hf_training.round_stream(run.samples, run.store, Ranks(0, 2), clock=run.clock) as stream:
        said = "stream: cannot train on a stream so, wanted for 1 ranks, got a RoundStream for 2"
        with pytest.raises(ConfigError, match=said):
            hf_trainer(stream, tmp_path)
