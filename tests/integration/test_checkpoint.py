"""Checkpoints: whole or not there, and refused where they do not belong."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draft_samples
from eaglefeed.consumer.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    set_aside,
    step_of,
)
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.state import StreamState
from eaglefeed.consumer.trainer import DraftTrainer, OptimizerSettings
from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError, StorageError, StoreFull
from eaglefeed.schema.batch import Eagle3TargetBatch

CONFIG = replace(
    draft_samples.CONFIG,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=12,
    draft_vocab_size=6,
    ttt_steps=2,
)


def make_trainer(config: DraftConfig = CONFIG, seed: int = 0) -> DraftTrainer:
    draft = Eagle3Draft(config, seed=seed)
    draft.embed_tokens.normal_(generator=torch.Generator().manual_seed(1))
    return DraftTrainer(draft, OptimizerSettings(warmup_steps=0))


def make_batch(seed: int) -> Eagle3TargetBatch:
    draw = torch.Generator().manual_seed(seed)
    return Eagle3TargetBatch(
        aux_hidden_states=torch.randn(1, 5, 24, generator=draw),
        input_ids=torch.randint(0, 12, (1, 5), generator=draw),
        attention_mask=torch.ones(1, 5, dtype=torch.long),
        loss_mask=torch.ones(1, 5, dtype=torch.long),
        target_probs=torch.randn(1, 5, 6, generator=draw).softmax(-1),
        position_mask=torch.ones(1, 5, 1, dtype=torch.bool),
    )


def trained(steps: int = 2) -> DraftTrainer:
    trainer = make_trainer()
    for seed in range(steps):
        trainer.step([make_batch(seed)])
    return trainer


def test_a_restored_trainer_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    one, other = trained(), make_trainer(seed=5)
    path = save_checkpoint(tmp_path / "new" / "folder", one, contract="c")
    assert load_checkpoint(path, other, contract="c") == {"run": "", "queue": "samples", "step": 2, "seen": []}
    assert other.step_count == 2
    assert one.step([make_batch(7)]) == other.step([make_batch(7)])
    for mine, theirs in zip(one.draft.parameters(), other.draft.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_restored_trainer_takes_the_rate_of_its_own_schedule_at_the_checkpoints_step(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(steps=4), contract="c")
    other = DraftTrainer(make_trainer().draft, OptimizerSettings(lr=0.5, warmup_steps=10))
    load_checkpoint(path, other, contract="c")
    other.step([make_batch(7)])
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.25]  # 0.5 * 5 / 10: the fifth step


def test_an_untrained_trainer_can_be_saved_and_restored(tmp_path: Path) -> None:
    path, other = save_checkpoint(tmp_path, make_trainer(), contract="c"), trained()
    assert load_checkpoint(path, other, contract="c") == {"run": "", "queue": "samples", "step": 0, "seen": []}
    assert other.step([make_batch(0)]) == make_trainer().step([make_batch(0)])


def test_a_checkpoint_holds_the_samples_that_no_commit_has_settled(tmp_path: Path) -> None:
    state = StreamState(run="demo", queue="samples.e3", step=2, seen=["p-7", 'odd "id" \u00e9'])
    path = save_checkpoint(tmp_path, trained(), contract="c", stream=state)
    assert load_checkpoint(path, make_trainer(), contract="c") == state


def test_a_checkpoint_of_before_there_were_commits_has_seen_nothing_more(tmp_path: Path) -> None:
    one = trained()
    path = save_checkpoint(tmp_path, one, contract="c")
    metadata = {"format": "eaglefeed-checkpoint-1", "step": "2", "contract": "c", "config": one.draft.config.to_json()}
    save_file(one.state_tensors(), path, metadata)
    assert load_checkpoint(path, make_trainer(), contract="c") == {"run": "", "queue": "samples", "step": 2, "seen": []}


@pytest.mark.parametrize("seen", ["", "7", '{"a": 1}', "[1]"])
def test_a_damaged_list_of_samples_is_refused(tmp_path: Path, seen: str) -> None:
    one = trained()
    path = save_checkpoint(tmp_path, one, contract="c")
    metadata = {"format": "eaglefeed-checkpoint-1", "step": "2", "contract": "c", "config": one.draft.config.to_json()}
    save_file(one.state_tensors(), path, metadata | {"seen": seen})
    with pytest.raises(SchemaError, match="not a list of sample ids"):
        load_checkpoint(path, make_trainer(), contract="c")


def test_a_checkpoints_name_tells_its_step(tmp_path: Path) -> None:
    assert step_of(save_checkpoint(tmp_path, trained(2), contract="c")) == 2


def test_a_checkpoint_that_was_set_aside_is_none_any_more(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), contract="c")
    assert set_aside(path, "damaged").is_file()
    assert list_checkpoints(tmp_path) == []


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    trainer = make_trainer()
    for seed in range(4):
        trainer.step([make_batch(seed)])
        save_checkpoint(tmp_path, trainer, contract="c", keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000003.safetensors",
        "step-000000004.safetensors",
    ]
    assert latest_checkpoint(tmp_path).name == "step-000000004.safetensors"


def test_what_was_just_written_stays_beside_higher_steps(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        save_checkpoint(tmp_path, trained(steps), contract="c")
    written = save_checkpoint(tmp_path, trained(1), contract="c", keep=1)
    assert list_checkpoints(tmp_path) == [written]


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save_checkpoint(tmp_path, trained(), contract="c", keep=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_without_checkpoints_says_so(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(StorageError, match="no checkpoint"):
        latest_checkpoint(tmp_path)


def test_the_file_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save_checkpoint(tmp_path, trained(), contract="c")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="No space left on device"):
        save_checkpoint(tmp_path, trained(), contract="c")
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), contract="c")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StorageError, match="not a safetensors file"):
        load_checkpoint(path, make_trainer(), contract="c")


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), contract="c")
    with pytest.raises(ContractMismatch, match="wanted other, got c"):
        load_checkpoint(path, make_trainer(), contract="other")


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), contract="c")
    with pytest.raises(ContractMismatch, match='"intermediate_size": 16'):
        load_checkpoint(path, make_trainer(replace(CONFIG, intermediate_size=16)), contract="c")


def test_a_checkpoint_of_a_vocabulary_map_of_another_size_is_refused_with_both(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), contract="c")
    wanted = r'wanted \{"draft_vocab_size": 7\}, got \{"draft_vocab_size": 6\}'
    with pytest.raises(ContractMismatch, match=wanted):
        load_checkpoint(path, make_trainer(replace(CONFIG, draft_vocab_size=7)), contract="c")


def test_a_checkpoint_of_another_map_of_the_same_size_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path, other = save_checkpoint(tmp_path, trained(), contract="c"), make_trainer(seed=3)
    other.draft.t2d.copy_(other.draft.t2d.flip(0))
    before = [parameter.clone() for parameter in other.draft.parameters()]
    with pytest.raises(ContractMismatch, match="another vocabulary map of the same size"):
        load_checkpoint(path, other, contract="c")
    assert all(torch.equal(*pair) for pair in zip(before, other.draft.parameters(), strict=True))


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(SchemaVersionError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "a.safetensors", make_trainer(), contract="c")


def test_a_checkpoint_without_optimizer_state_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), contract="c")
    weights = {name: tensor for name, tensor in load_file(path).items() if name.startswith("draft.")}
    metadata = {
        "format": "eaglefeed-checkpoint-1",
        "step": "2",
        "contract": "c",
        "config": make_trainer().draft.config.to_json(),
    }
    save_file(weights, path, metadata)
    with pytest.raises(ContractMismatch, match=r"optimizer\.fc\.weight\.exp_avg"):
        load_checkpoint(path, make_trainer(), contract="c")
