"""Exactly once relative to checkpoints: a training run is killed at every line that matters, and goes on as if not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

import draft_samples
import pipeline
import samples
from eaglefeed.consumer import checkpoint, leasing
from eaglefeed.consumer.checkpoint import list_checkpoints
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.resume import resume
from eaglefeed.consumer.run import TrainingRun
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import ConfigError, ContractMismatch, QueueError, SchemaVersionError, StorageError
from eaglefeed.queue.base import Lease, LeaseQueue
from eaglefeed.storage.base import FeatureStore

pytestmark = pytest.mark.usefixtures("deletes_in_place")

NUM_SAMPLES = 10
SIZES = {"hidden_size": samples.H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
CONFIG = replace(draft_samples.CONFIG, **SIZES, vocab_size=pipeline.VOCAB, draft_vocab_size=pipeline.VOCAB)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)  # a stream's end waits for the lease call in hand


class KilledError(BaseException):
    """A SIGKILL: nothing is given back, nothing is saved."""


def _trainer() -> DraftTrainer:
    return DraftTrainer(Eagle3Draft(CONFIG, seed=0))


def _run() -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock())
    made.feed(*(pipeline.prompt(index) for index in range(NUM_SAMPLES)))
    made.produce()
    return made


def _train(
    run: pipeline.Run, folder: Path, *, every: int = 3, keep: int = 2, policy: str = "checkpoint"
) -> dict[str, Tensor]:
    """One life of a trainer; returns the weights."""
    trainer = _trainer()
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        resume(folder, trainer, stream, contract="c")
        options: dict[str, Any] = {"checkpoint_every": every, "keep_checkpoints": keep, "ack_policy": policy}
        try:
            TrainingRun(trainer, stream, folder, contract="c", **options).train()
        except KilledError:
            stream.stop()
            stream._taker.join(10)
            stream._queue.holdings.drain()  # what a killed process holds stays leased
            raise
    return trainer.draft.state_dict()


def _resume(folder: Path, trainer: DraftTrainer, run: pipeline.Run, **options: Any) -> None:
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        resume(folder, trainer, stream, **({"contract": "c"} | options))


def _train_until_killed(run: pipeline.Run, folder: Path, step: int, **options: int) -> None:
    """A life that ends before the ack of `step`."""
    with pytest.MonkeyPatch.context() as patch:
        _kill_at(patch, SampleStream, "ack", step, after=False)
        with pytest.raises(KilledError):
            _train(run, folder, **options)


def _kill_at(patch: pytest.MonkeyPatch, owner: object, name: str, number: int, *, after: bool) -> None:
    """Raise before or after call `number` of a function."""
    plain = getattr(owner, name)
    calls = [0]

    def killed(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            raise KilledError
        result = plain(*args, **options)
        if calls[0] == number:
            raise KilledError
        return result

    patch.setattr(owner, name, killed)


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of a life without a death."""
    return _train(_run(), tmp_path_factory.mktemp("straight"))


def _owner(run: pipeline.Run, name: str) -> LeaseQueue | FeatureStore | object:
    owners = {"samples": run.samples, "store": run.store, "stream": SampleStream, "checkpoint": checkpoint}
    return owners[name]


# Checkpoints are written after steps 3, 6, 9 and 10; 3, 3, 6 and 10 are committed then.
LINES = [
    ("stream", "ack", (1, 3, 4, 6, 10)),  # before: after the step; after: before the checkpoint
    ("checkpoint", "write_safetensors", (1, 2, 4)),  # after: before the pruning
    ("checkpoint", "_prune", (1, 2, 3, 4)),  # after: before the commit
    ("samples", "commit", (1, 2, 3, 4)),  # after: before the deletion
    ("samples", "released", (1, 2, 5)),  # the first one is the stream's start
    ("store", "delete", (1, 2, 4, 10)),  # within a deletion, and between deletion and forget
    ("samples", "forget", (1, 2, 3)),
    ("stream", "commit", (1, 3, 4)),  # after: before the next step, or the end
]
POINTS = [
    pytest.param(owner, name, number, after, id=f"{'after' if after else 'before'} {owner}.{name} {number}")
    for owner, name, numbers in LINES
    for number in numbers
    for after in (False, True)
]


@pytest.mark.parametrize(("owner", "name", "number", "after"), POINTS)
def test_a_run_that_is_killed_at_any_line_ends_with_the_weights_of_one_that_is_not(
    owner: str, name: str, number: int, after: bool, tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    run = _run()
    with pytest.MonkeyPatch.context() as patch:
        _kill_at(patch, _owner(run, owner), name, number, after=after)
        with pytest.raises(KilledError):
            _train(run, tmp_path)
    assert _same(_train(run, tmp_path), straight)
    stats = run.samples.stats()
    assert (stats.done, stats.dead, stats.unsettled, stats.released, stats.redelivered) == (NUM_SAMPLES, 0, 0, 0, 0)
    assert list(run.store.scan()) == []
    assert _steps(tmp_path) == list(range(1, NUM_SAMPLES + 1))


def test_a_history_has_no_steps_that_the_draft_has_not_learned(tmp_path: Path) -> None:
    run, path = _run(), tmp_path / "history.jsonl"
    _train_until_killed(run, tmp_path, 9, every=3)  # checkpoints 3 and 6
    with path.open("a") as history:
        history.write('{"loss": 0.5, "step": 9')  # the kill cut it
    with structlog.testing.capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
        _kill_at(patch, SampleStream, "take", 1, after=False)
        with pytest.raises(KilledError):
            _train(run, tmp_path)
    assert _steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    told = [each for each in logs if each["event"] == "steps_are_made_again"]
    assert [(each["after_step"], each["num_steps"]) for each in told] == [(6, 2)]
    with path.open("a") as history:
        history.write('{"loss": 0.5}')
    _train(run, tmp_path)
    assert _steps(tmp_path) == list(range(1, NUM_SAMPLES + 1))


def test_a_start_without_a_checkpoint_is_not_called_resumed(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        _train(_run(), tmp_path)
    assert [each for each in logs if each["log_level"] == "warning" or each["event"] == "resumed"] == []
    with structlog.testing.capture_logs() as logs:
        _resume(tmp_path, _trainer(), _run())
    assert [(each["event"], each["step"]) for each in logs if each["event"] == "resumed"] == [("resumed", NUM_SAMPLES)]


def test_a_training_that_keeps_no_checkpoints_says_that_it_starts_anew(tmp_path: Path) -> None:
    run = _run()
    with pytest.MonkeyPatch.context() as patch:
        _kill_at(patch, SampleStream, "ack", 5, after=False)
        with pytest.raises(KilledError):
            _train(run, tmp_path, policy="step")
    run.clock.advance(100)
    with structlog.testing.capture_logs() as logs:
        _train(run, tmp_path, policy="step")
    told = [each for each in logs if each["event"] == "training_starts_anew"]
    assert [(each["earlier_steps"], each["log_level"]) for each in told] == [(4, "warning")]
    assert _steps(tmp_path) == list(range(1, NUM_SAMPLES - 4 + 1))


def test_a_run_that_is_killed_over_and_over_makes_progress_and_no_difference(
    tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    run = _run()
    for _ in range(3):  # four steps a life, and three of them are in a checkpoint
        _train_until_killed(run, tmp_path, 4)
    assert _same(_train(run, tmp_path), straight)


def test_a_sample_that_changes_no_weight_is_trained_on_once_too(tmp_path: Path) -> None:
    weights = []
    for step in (None, 3):
        run = pipeline.Run(clock=pipeline.TurnableClock())
        plain = pipeline.PromptRow((9, 2, 3), (0, 0, 0))
        run.feed(*(pipeline.prompt(i, **({"rows": (plain,)} if i in (0, 3) else {})) for i in range(6)))
        run.produce()
        folder = tmp_path / str(step)
        folder.mkdir()
        if step:
            _train_until_killed(run, folder, step, every=2)
        weights.append(_train(run, folder, every=2))
        assert run.samples.stats().done == 6
    assert _same(*weights)


def test_an_older_checkpoint_that_is_not_committed_can_be_restored(tmp_path: Path, straight: dict[str, Tensor]) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 8)  # checkpoints 3 and 6, 3 is committed
    assert run.samples.stats().committed_step == 3
    list_checkpoints(tmp_path)[-1].unlink()
    assert _same(_train(run, tmp_path), straight)


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "history.jsonl").read_text().splitlines()]


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 8)
    _damage(tmp_path / "step-000000006.safetensors")
    with structlog.testing.capture_logs() as logs:
        assert _same(_train(run, tmp_path), straight)
    assert (tmp_path / "damaged-step-000000006.safetensors").is_file()
    assert "checkpoint_damaged" in [entry["event"] for entry in logs]


def test_a_checkpoint_before_the_committed_step_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 10)  # checkpoints 6 and 9, 6 is committed
    before = run.samples.stats()
    (tmp_path / "step-000000006.safetensors").rename(tmp_path / "step-000000003.safetensors")
    _damage(tmp_path / "step-000000009.safetensors")
    trainer = _trainer()
    run.samples.commit(8, session=before.session)
    with pytest.raises(QueueError, match="8"):
        _resume(tmp_path, trainer, run)
    after = run.samples.stats()
    assert (after.session, after.committed_step, after.tentative) == (before.session, 8, 1)
    assert (tmp_path / "step-000000009.safetensors").is_file()


def test_without_a_checkpoint_that_can_be_read_nothing_is_restored(tmp_path: Path) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 8)
    for path in list_checkpoints(tmp_path):
        _damage(path)
    session = run.samples.stats().session
    with pytest.raises(StorageError, match=r"step-000000003\.safetensors: not a safetensors file"):
        _resume(tmp_path, _trainer(), run)
    assert run.samples.stats().session == session
    assert len(list_checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("kind", ["another contract", "another format"])
def test_a_whole_checkpoint_of_something_else_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 8)
    if kind == "another format":
        checkpoint.write_safetensors(tmp_path / "step-000000007.safetensors", {"a": torch.zeros(1)}, {})
    contract = "other" if kind == "another contract" else "c"
    error = ContractMismatch if kind == "another contract" else SchemaVersionError
    names = [path.name for path in list_checkpoints(tmp_path)]
    session = run.samples.stats().session
    with pytest.raises(error):
        _resume(tmp_path, _trainer(), run, contract=contract)
    assert run.samples.stats().session == session
    assert [path.name for path in list_checkpoints(tmp_path)] == names


def test_the_checkpoints_of_another_contract_are_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    run = _run()
    contract = pipeline.contract(max_length=16)
    _resume(tmp_path, _trainer(), run, contract=contract)
    checkpoint.save_checkpoint(tmp_path, _trainer(), contract=contract.id)
    session = run.samples.stats().session
    with pytest.raises(ContractMismatch, match=r"dtype.*float32.*bfloat16|dtype.*bfloat16.*float32"):
        _resume(tmp_path, _trainer(), run, contract=pipeline.contract(max_length=16, dtype="bfloat16"))
    assert run.samples.stats().session == session


def test_a_checkpoint_without_the_optimizers_state_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 8)
    newest = list_checkpoints(tmp_path)[-1]
    tensors, metadata = checkpoint.read_safetensors(newest)
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("draft.")}
    checkpoint.write_safetensors(newest, weights, metadata)
    with pytest.raises(ContractMismatch, match=r"optimizer\.fc\.weight\.exp_avg"):
        _resume(tmp_path, _trainer(), run)
    assert newest in list_checkpoints(tmp_path)


def test_a_step_that_no_checkpoint_is_of_cannot_be_gone_back_to(tmp_path: Path) -> None:
    run = _run()
    _train_until_killed(run, tmp_path, 8)
    with pytest.raises(ConfigError, match="wanted step 5, got 3, 6"):
        _resume(tmp_path, _trainer(), run, from_step=5)
    assert len(list_checkpoints(tmp_path)) == 2


def test_a_server_that_lost_acks_is_told_by_the_checkpoint(tmp_path: Path, straight: dict[str, Tensor]) -> None:
    _train_until_killed(_run(), tmp_path, 8)  # checkpoint 6 has seen p-3 to p-5 since the commit of 3
    restarted = _run()  # the state of just after that commit
    lease = restarted.samples.lease(3, visibility_timeout_s=60, consumer="t")
    assert isinstance(lease, Lease)
    restarted.samples.ack(lease.token, [item.id for item in lease.items])
    assert restarted.samples.stats().ready == 7
    assert _same(_train(restarted, tmp_path), straight)
    assert (restarted.samples.stats().done, list(restarted.store.scan())) == (NUM_SAMPLES, [])


def test_a_start_without_checkpoints_opens_a_session_at_step_0(tmp_path: Path) -> None:
    run = _run()
    lease = run.samples.lease(4, visibility_timeout_s=60, consumer="died")
    assert isinstance(lease, Lease)
    before = run.samples.stats().session
    _resume(tmp_path / "nothing there", _trainer(), run)
    stats = run.samples.stats()
    assert stats.session > before
    assert (stats.committed_step, stats.ready) == (0, NUM_SAMPLES)
