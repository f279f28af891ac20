"""The reference training run: checkpoints before acknowledgements, and going on after a stop or a crash."""

import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import draft_samples
import pipeline
import samples
from eaglefeed.consumer.checkpoint import list_checkpoints
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.run import TrainingRun, load_run_assets, only_trainer_of, wait_for_run
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer, StepResult
from eaglefeed.errors import ConfigError, ContractMismatch, SampleMissing, TargetUnavailable


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
    folder.mkdir(exist_ok=True)
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        training = TrainingRun(trainer, stream, folder, contract="c", **options)  # type: ignore[arg-type]
        training.resume()
        return training.train()


def test_a_run_trains_on_every_sample_and_settles_them(run: pipeline.Run, tmp_path: Path) -> None:
    assert _train(run, tmp_path, _trainer(), checkpoint_every=4) == 10
    assert run.samples.stats().done == 10
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == list(range(1, 11))


def test_several_samples_make_one_step(run: pipeline.Run, tmp_path: Path) -> None:
    assert _train(run, tmp_path, _trainer(), samples_per_step=4) == 3
    assert run.samples.stats().done == 10


def test_nothing_is_acked_before_a_checkpoint_holds_it(run: pipeline.Run, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def look(result: StepResult) -> None:
        seen.append((result.step, run.samples.stats().done))

    _train(run, tmp_path, _trainer(), checkpoint_every=4, on_step=look)
    assert [done for _, done in seen] == [0] * 4 + [4] * 4 + [8] * 2


def test_a_run_that_crashed_goes_on_from_its_checkpoint_and_loses_nothing(run: pipeline.Run, tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    def crash(result: StepResult) -> None:
        if result.step == 6:
            raise Crash

    trained: list[int] = []
    with pytest.raises(Crash):
        _train(run, tmp_path, _trainer(), checkpoint_every=4, on_step=crash)
    assert run.samples.stats().done == 4
    again = _trainer()
    _train(run, tmp_path, again, checkpoint_every=4, on_step=lambda result: trained.append(result.step))
    assert trained == [5, 6, 7, 8, 9, 10]
    straight = _trainer()
    other = pipeline.Run(clock=pipeline.TurnableClock())
    other.feed(*(pipeline.prompt(index) for index in range(10)))
    other.produce()
    _train(other, tmp_path / "straight", straight, checkpoint_every=4)
    for name, tensor in straight.draft.state_dict().items():
        assert torch.equal(tensor, again.draft.state_dict()[name]), name


def test_a_stop_saves_and_acknowledges_what_was_trained(run: pipeline.Run, tmp_path: Path) -> None:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        training = TrainingRun(
            _trainer(),
            stream,
            tmp_path,
            contract="c",
            checkpoint_every=100,
            on_step=lambda result: stream.stop() if result.step == 3 else None,
        )
        assert training.train() == 3
    assert (run.samples.stats().done, run.samples.stats().ready) == (3, 7)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000003.safetensors"]


def test_a_checkpoint_of_another_contract_is_refused(run: pipeline.Run, tmp_path: Path) -> None:
    _train(run, tmp_path, _trainer())
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        training = TrainingRun(_trainer(), stream, tmp_path, contract="other")
        with pytest.raises(ContractMismatch, match=r"wanted other, got c"):
            training.resume()


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
