"""`eaglefeed feed --replay` and what the other commands make of a run's epochs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from commands import Ended, Shell, conversation, run_server, save_tiny_target, write_rows
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.queue import open_queue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.redis import RedisLeaseQueue
from eaglefeed.storage.shared_dir import SharedDirStore

NUM = 6
GROUPS = ("straight", "killed")
SHARDS = Path("runs/default/shards")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM)])
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.checkpoint_every=4", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


@pytest.fixture
def client(shell: Shell, tmp_path: Path) -> Iterator[QueueClient]:
    """The run's server, kept running between commands."""
    with run_server(tmp_path / "runs" / "default") as opened:
        yield opened


def ok(shell: Shell, *words: str | Path) -> Ended:
    ended = shell.run(*words, "--json")
    assert ended.code == 0, ended.err
    return ended


def learn(client: QueueClient, name: str, *, retain: bool) -> list[str]:
    """A plain loop over a queue, which is settled as it goes; the ids as they came."""
    store = SharedDirStore(SHARDS, durability="none")
    with SampleStream(open_queue(client, "default", name), store, consumer="t", contract="", retain=retain) as stream:
        return [sample_id for batch in stream for sample_id in batch.sample_ids]


def produced(shell: Shell) -> None:
    """A run whose samples are all there."""
    ok(shell, "feed", "rows.jsonl")
    assert ok(shell, "produce").document["produced"] == NUM


def weights(output: str) -> dict[str, Tensor]:
    """The newest checkpoint: weights and moments."""
    return load_file(max(Path(output).glob("step-*.safetensors")))


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_run_is_trained_for_epochs_and_its_last_one_leaves_no_shard(shell: Shell, client: QueueClient) -> None:
    produced(shell)
    first = ok(shell, "train", "train.retain=true").document
    assert (first["acked"], first["step"], first["drained"]) == (NUM, NUM, True)
    for epoch in (1, 2):
        document = ok(shell, "feed", "--replay", "--seed", "3").document
        assert (document["epoch"], document["queue"], document["seed"]) == (epoch, f"samples.e{epoch}", 3)
        assert (document["refs"], document["known"], document["run"]) == (NUM, 0, "default")
        ended = ok(shell, "train", f"train.epoch={epoch}", f"train.retain={epoch < 2}").document
        assert (ended["acked"], ended["step"], ended["dead"], ended["drained"]) == (NUM, NUM * (epoch + 1), 0, True)
    history = [json.loads(line) for line in Path("runs/default/draft/history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == list(range(1, 3 * NUM + 1))
    assert list(SHARDS.rglob("*/*.safetensors")) == []
    stats = ok(shell, "queue", "stats").document["epochs"]
    assert {name: each["main"]["done"] for name, each in stats.items()} == {"samples.e1": NUM, "samples.e2": NUM}


KILLED = """
import os, sys
from eaglefeed.cli import main
from eaglefeed.consumer.rounds import RoundStream
ack = RoundStream.ack
def ack_or_die(stream, step=None, sample_ids=None):
    if step == {step}:
        os._exit(9)
    return ack(stream, step, sample_ids)
RoundStream.ack = ack_or_die
main({words})
"""


def killed_at(step: int, words: list[str], folder: Path) -> None:
    """A trainer of its own process that dies when it has made this step, and before it says so."""
    code = KILLED.format(step=step, words=words)
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 9, ended.stderr.decode()


def test_an_epoch_that_was_interrupted_goes_on_as_if_it_had_not_been(
    shell: Shell, client: QueueClient, tmp_path: Path
) -> None:
    """Killed while the newest checkpoint is still the last epoch's."""
    shell.common = (*shell.common, f"queue.groups={','.join(GROUPS)}")
    produced(shell)
    words = {group: ["train", "train.retain=true", f"train.group={group}", "-o", group] for group in GROUPS}
    for group in GROUPS:
        assert ok(shell, *words[group]).document["step"] == NUM
    ok(shell, "feed", "--replay", "--seed", "3")
    for group in GROUPS:
        words[group].append("train.epoch=1")
    killed_at(NUM + 2, [*shell.common, *words["killed"]], tmp_path)
    for group in GROUPS:
        ended = ok(shell, *words[group]).document
        assert (ended["step"], ended["drained"], ended["dead"]) == (2 * NUM, True, 0)
    assert_same(weights("killed"), weights("straight"))
    done = ok(shell, "queue", "stats", "--group", "straight").document["epochs"]["samples.e1"]
    assert {group: each["done"] for group, each in done.items()} == {"straight": NUM}


def test_a_trainer_of_an_epoch_that_nobody_replayed_is_refused(shell: Shell, client: QueueClient) -> None:
    produced(shell)
    refused = shell.run("train", "train.epoch=1")
    assert refused.code == 2
    assert "samples.e1: nobody has replayed this epoch to its end" in refused.err
    assert "`eaglefeed feed --replay` first" in refused.err


def test_a_trainer_of_an_epoch_whose_replay_was_killed_is_refused(
    shell: Shell, client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on what was put, and then wait for ever."""
    produced(shell)
    ok(shell, "train", "train.retain=true")

    def die(queue: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RedisLeaseQueue, "close", die)
        assert shell.run("feed", "--replay").code == 130
    refused = shell.run("train", "train.epoch=1")
    assert (refused.code, "samples.e1: nobody has replayed this epoch to its end" in refused.err) == (2, True)
    ok(shell, "feed", "--replay")
    assert ok(shell, "train", "train.epoch=1").document["acked"] == NUM


def test_the_other_commands_know_a_runs_epochs(shell: Shell, client: QueueClient) -> None:
    shell.common = (*shell.common, "queue.groups=main,own")
    produced(shell)
    shards = SharedDirStore(SHARDS)
    for group in ("main", "own"):
        queue = open_queue(client, "default", "samples", group)
        with SampleStream(queue, shards, consumer=group, contract="", retain=True) as stream:
            assert len(list(stream)) == NUM
    states = ok(shell, "store", "inspect").document["states"]
    assert (states["retained"]["shards"], states["released"]["shards"], states["orphan"]["shards"]) == (NUM, 0, 0)
    ok(shell, "feed", "--replay")
    stats = ok(shell, "queue", "stats").document
    assert {group: each["done"] for group, each in stats["groups"].items()} == {"main": NUM, "own": NUM}
    assert {group: each["ready"] for group, each in stats["epochs"]["samples.e1"].items()} == {"main": NUM, "own": NUM}
    lines = shell.run("queue", "stats").out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "prompts",
        "samples",
        "samples/own",
        "samples.e1",
        "samples.e1/own",
    ]
    assert ok(shell, "store", "inspect").document["states"]["referenced"]["shards"] == NUM
    refused = shell.run("store", "gc", "--retained")
    assert refused.code == 2
    assert (
        f"samples.e1: its epoch is not over, wanted closed, with nothing left to do, got closed, {NUM}" in refused.err
    )
    purged = ok(shell, "queue", "purge", "--yes").document["purged"]
    assert purged == {"prompts": 0, "samples": 0, "samples.e1": NUM}


def test_retained_shards_are_deleted_when_they_are_asked_to_be(shell: Shell, client: QueueClient) -> None:
    produced(shell)
    learn(client, "samples", retain=True)
    ok(shell, "feed", "--replay")
    held = open_queue(client, "default", "samples.e1")
    lease = held.lease(1, visibility_timeout_s=60, consumer="t")
    held.nack(lease.token, [lease.items[0].id], reason="bad", retryable=False)  # type: ignore[union-attr]
    assert len(learn(client, "samples.e1", retain=True)) == NUM - 1
    for path in SHARDS.rglob("*/*.safetensors"):
        os.utime(path, (1, 1))
    assert ok(shell, "store", "gc").document["kept"] == NUM
    assert ok(shell, "store", "gc", "--retained", "--dry-run").document["orphans"] == NUM - 1
    document = ok(shell, "store", "gc", "--retained").document
    assert (document["orphans"], document["kept"]) == (NUM - 1, 1), "a dead letter keeps its shard"
    refused = shell.run("feed", "--replay")
    assert refused.code == 2
    assert "no shards of run default" in refused.err


def test_a_repeated_replay_says_that_the_samples_were_there(shell: Shell, client: QueueClient) -> None:
    produced(shell)
    learn(client, "samples", retain=True)
    first = shell.run("feed", "--replay").out
    assert f"put {NUM} samples (" in first
    assert "into samples.e1\n" in first
    assert "`eaglefeed train train.epoch=1`" in first
    again = shell.run("feed", "--replay", "--epoch", "1").out
    assert f"put 0 samples (0 B) into samples.e1, {NUM} were there before" in again
    assert "samples.e1 was whole before: its order stays, whatever the seed" in again
    assert "whole before" not in first
    told = shell.run("feed", "--replay", "--epoch", "1", "--seed", "9", "--json").document
    assert (told["stood"], told["seed"]) == (True, None)
    later = shell.run("feed", "--replay")
    assert later.code == 2
    assert (
        f"samples.e1: its epoch is not over, wanted closed, with nothing left to do, got closed, {NUM} to" in later.err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "eaglefeed feed CONVERSATIONS, or --replay"),
        (("rows.jsonl", "--replay"), "a replay takes no conversations"),
        (("rows.jsonl", "--epoch", "1"), "pass --replay"),
        (("rows.jsonl", "--seed", "1"), "pass --replay"),
        (("--replay", "--epoch", "0"), "--epoch"),
        (("--replay", "--batch-size", "2", "--packing"), "samples as they are stored, got --batch-size, --packing"),
        (("--replay", "--max-length", "9", "--keep-open"), "got --max-length, --keep-open"),
        (("--replay",), "no such run here"),
        (("--replay", "--store", "nccl://"), "nothing to replay: its samples are in their producers' memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistaken_call_says_what_to_do_and_makes_nothing(shell: Shell, words: tuple[str, ...], said: str) -> None:
    ended = shell.run("feed", *words)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert not Path("runs").exists()


def test_a_run_that_retained_nothing_is_refused(shell: Shell, client: QueueClient) -> None:
    ok(shell, "feed", "rows.jsonl")
    refused = shell.run("feed", "--replay")
    assert refused.code == 2
    assert "samples: its epoch is not over" in refused.err
    assert "got open, 0 to do in group main" in refused.err
    ok(shell, "produce")
    learn(client, "samples", retain=False)
    refused = shell.run("feed", "--replay", "--epoch", "1")
    assert refused.code == 2
    assert "samples: its trainers retained nothing" in refused.err
    assert "epochs" in ok(shell, "queue", "stats").document
    assert ok(shell, "queue", "stats").document["epochs"] == {}


def test_a_replay_needs_no_torch_and_no_target(shell: Shell, client: QueueClient, tmp_path: Path) -> None:
    produced(shell)
    learn(client, "samples", retain=True)
    code = """
import sys
from eaglefeed.cli import main
try:
    main(["feed", "--replay", "--json", "target.name=nowhere"])
except SystemExit as ended:
    sys.exit(100 * ("torch" in sys.modules or "transformers" in sys.modules) or int(ended.code or 0))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert json.loads(ended.stdout)["refs"] == NUM
