"""What `eaglefeed train` tells while it trains: what waits for what, and reports of its steps."""

import json
import sys
from pathlib import Path

import pytest
import torch

from commands import Ended, Shell, conversation, save_tiny_target, write_rows
from eaglefeed.queue.redis import RedisLeaseQueue

torch.set_num_threads(1)
NUM_ROWS = 7


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM_ROWS)])
    small = ["feed.max_length=128", "train.start_timeout_s=20", "train.report_every=3"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def test_steps_are_told_and_every_few_of_them_what_waits_for_what(shell: Shell) -> None:
    for command in (["feed", "rows.jsonl"], ["produce"]):
        assert shell.run(*command).code == 0
    ended = shell.run("train", "--json")
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step ") and "loss" in line]
    assert steps == [str(step) for step in range(1, NUM_ROWS + 1)]
    waits = [line for line in lines if "trainer waits for data" in line]
    assert [line.split(":")[0] for line in waits] == ["step 3", "step 6", "step 7"]
    assert "producers wait for room: 0%" in waits[0], "the queue was looked at"
    document = ended.document
    assert 0 <= document["data_wait"] <= 1
    assert document["room_wait"] == 0
    rows = [json.loads(line) for line in Path("runs/default/draft/history.jsonl").read_text().splitlines()]
    assert all(row["samples_per_s"] > 0 and 0 <= row["data_wait"] <= 1 for row in rows)
    # Rates are of rounded numbers over one time: tokens a sample come out.
    pace = rows[2]["tokens_per_s"] / rows[2]["samples_per_s"]
    assert pace == pytest.approx(sum(row["num_tokens"] for row in rows[:3]) / 3, rel=0.01)


def test_a_queue_without_room_shows_as_producers_that_wait(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["feed", "rows.jsonl"], ["produce"]):
        assert shell.run(*command).code == 0
    monkeypatch.setattr(RedisLeaseQueue, "has_room", lambda _: False)
    ended = shell.run("train", "--json")
    assert ended.document["room_wait"] == 1
    assert "producers wait for room: 100%" in ended.err


def _train(shell: Shell, *words: str) -> Ended:
    return shell.run("train", "rows.jsonl", "--target-backend", "colocated", "-o", "draft", *words, "--json")


def test_reports_go_on_behind_the_checkpoint_of_a_resume(shell: Shell) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["train.report_to=tensorboard", "train.report_every=1", "train.checkpoint_every=4", "train.prefetch=1"]
    first = _train(shell, *words)
    assert first.document["steps"] == NUM_ROWS
    Path("draft/step-000000007.safetensors").unlink()
    assert _train(shell, *words).document["steps"] == NUM_ROWS - 4, "it goes on from step 4"
    shown = EventAccumulator("draft/tensorboard").Reload()
    assert [event.step for event in shown.Scalars("loss")] == list(range(1, NUM_ROWS + 1))
    rows = [json.loads(line) for line in Path("draft/history.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows}
    assert [event.value for event in shown.Scalars("loss")] == pytest.approx(list(losses.values()), rel=1e-6)
    assert "room_wait" not in shown.Tags()["scalars"], "there is no queue"


def test_a_missing_package_ends_the_command_before_the_target_is_loaded(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    ended = _train(shell, "train.report_to=tensorboard,wandb")
    assert ended.code == 2
    assert "train.report_to=wandb: not installed; pip install wandb" in ended.err
    assert not Path("draft").exists()
