"""`eaglefeed train` as one process and as the ranks of a job: what it writes, where it goes on, what it refuses."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import LaunchedRank, launched_rank
from eaglefeed.errors import ConfigError
from eaglefeed.schema.vocab import VocabMapping

NUM_ROWS = 11


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM_ROWS)])
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.start_timeout_s=20", "train.checkpoint_every=2"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


@pytest.fixture
def filled(shell: Shell) -> Shell:
    """A run whose samples are all there."""
    assert shell.run("feed", "rows.jsonl").code == 0
    assert shell.run("produce").code == 0
    return shell


def _names(pattern: str) -> list[str]:
    return sorted(path.name for path in Path("runs/default/draft").glob(pattern))


def _history() -> list[dict[str, int]]:
    path = Path("runs/default/draft/history.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, LaunchedRank(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, LaunchedRank(5, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, LaunchedRank(0, 1, 0)),
        ({"RANK": "3"}, LaunchedRank(0, 1, 0)),
    ],
)
def test_the_launchers_variables_say_which_rank_this_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: LaunchedRank
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == wanted


@pytest.mark.parametrize("variables", [(None, "2"), ("2", "2"), ("x", "2"), ("0", "-2")], ids=str)
def test_a_place_that_is_in_no_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: tuple[str | None, str]
) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE"), variables, strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no place in a job"):
        launched_rank()


def test_a_target_in_the_process_is_for_a_job_of_one_rank(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    ended = shell.run("train", "rows.jsonl", "--target-backend", "colocated")
    assert ended.code == 2
    assert "wanted a job of 1 rank, got rank 1 of 4" in ended.err


def test_a_vocabulary_map_of_another_size_is_refused_with_both(filled: Shell) -> None:
    VocabMapping.from_ids(torch.arange(5), vocab_size=64).save(Path("other.safetensors"))
    ended = filled.run("train", "--vocab", "other.safetensors")
    assert ended.code == 3
    assert "wanted 259 tokens, got 64" in ended.err
    VocabMapping.from_ids(torch.arange(7), vocab_size=259).save(Path("seven.safetensors"))
    VocabMapping.from_ids(torch.arange(9), vocab_size=259).save(Path("nine.safetensors"))
    filled.run("train", "--vocab", "seven.safetensors")
    ended = filled.run("train", "--vocab", "nine.safetensors")
    assert ended.code == 3
    assert 'wanted {"draft_vocab_size": 9}, got {"draft_vocab_size": 7}' in ended.err
    ended = filled.run("train", "draft.intermediate_size=24", "--vocab", "seven.safetensors")
    assert (ended.code, 'got {"intermediate_size": ' in ended.err) == (3, True)


def test_who_keeps_no_checkpoints_settles_each_step_for_good(filled: Shell) -> None:
    ended = filled.run("train", "--json", "train.ack_policy=step", "train.samples_per_step=2")
    assert (ended.document["steps"], ended.document["acked"], ended.document["drained"]) == (6, NUM_ROWS, True)
    assert (_names("step-*"), len(_names("export-*"))) == ([], 1)
    stats = filled.run("queue", "stats", "--json").document["samples"]
    assert (stats["done"], stats["tentative"], stats["committed_step"]) == (NUM_ROWS, 0, 0)


def test_training_goes_back_to_the_checkpoint_that_is_asked_for(filled: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from eaglefeed.consumer.run import TrainingRun

    plain = TrainingRun._row

    def row(run: TrainingRun, *args: object) -> object:
        if run._trainer.step_count == 5:
            run._stream.stop()
        return plain(run, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_row", row)
        words = ("train", "--json", "train.keep_checkpoints=3")
        assert filled.run(*words).document["step"] == 5
    assert _names("step-*") == [f"step-00000000{step}.safetensors" for step in (2, 4, 5)]
    refused = filled.run("train", "train.from_step=3")
    assert refused.code == 2
    assert "wanted step 3, got 2, 4, 5" in refused.err
    ended = filled.run(*words, "train.from_step=2")
    assert (ended.document["steps"], ended.document["step"], ended.document["drained"]) == (9, NUM_ROWS, True)
    assert _names("later-step-*") == ["later-step-000000004.safetensors", "later-step-000000005.safetensors"]
    assert [each["step"] for each in _history()] == list(range(1, 12))


def test_an_epoch_goes_on_with_the_weights_of_the_one_before(filled: Shell) -> None:
    assert filled.run("train", "--json", "train.retain=true").document["step"] == NUM_ROWS
    replayed = filled.run("feed", "--replay", "--json")
    assert replayed.code == 0, replayed.err
    ended = filled.run("train", "--json", "train.epoch=1")
    assert (ended.document["steps"], ended.document["step"], ended.document["acked"]) == (NUM_ROWS, 22, NUM_ROWS)
    again = filled.run("train", "--json", "train.epoch=1").document
    assert (again["steps"], again["step"], again["draft"]) == (0, 22, ended.document["draft"])
    before = filled.run("train", "train.epoch=0")
    assert before.code == 2
    assert "wanted samples, got samples.e1" in before.err


@contextmanager
def _started(shell: Shell) -> Iterator["subprocess.Popen[str]"]:
    """A job of two ranks, which torchrun ends with itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "eaglefeed", *shell.common, "train", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            yield job
        finally:
            job.terminate()


@pytest.mark.slow
def test_two_ranks_under_torchrun_stop_together_tell_once_and_leave_the_rest_to_whoever_comes(filled: Shell) -> None:
    with _started(filled) as first:
        while not _history():
            assert first.poll() is None, first.communicate()
            SYSTEM_CLOCK.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=120)
    assert out.count('"steps"') == 1, err
    steps, trained = json.loads(out)["steps"], sum(row["samples"] for row in _history())
    assert trained == min(2 * steps, NUM_ROWS)  # it may have been quicker than the signal
    document = filled.run("train", "--json").document  # by one process
    assert (document["drained"], document["dead"], document["redelivered"]) == (True, 0, 0)
    assert document["step"] == steps + NUM_ROWS - trained
    stats = filled.run("queue", "stats", "--json").document["samples"]
    assert (stats["done"], stats["ready"], stats["tentative"]) == (NUM_ROWS, 0, 0)
