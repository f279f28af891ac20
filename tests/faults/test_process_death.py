"""Producers, trainers and the server killed in the middle of a run, as real processes: nothing lost, nothing twice."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import kill

from commands import conversation, save_tiny_target, write_rows
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import QueueItem

NUM_ROWS = 80
PATIENCE_S = 90  # processes that import torch, several at a time

pytestmark = pytest.mark.timeout(300)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while not condition():
        assert SYSTEM_CLOCK.monotonic() < end_s
        SYSTEM_CLOCK.sleep(0.005)


class Cluster:
    """A run's server, its queues, and its processes."""

    def __init__(self, folder: Path, target: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.server = stack.enter_context(EmbeddedServer(folder / "runs/default/queue"))
        self.client = connect(self.server.url)
        stack.callback(self.client.close)
        self.prompts = open_queue(self.client, "default", "prompts")
        self.samples = open_queue(self.client, "default", "samples")
        small = ["target.dtype=float32", "feed.max_length=128", "draft.vocab_size=259", "queue.visibility_timeout_s=2"]
        self._settings = [f"target.name={target}", *small, "train.checkpoint_every=8", "produce.lease_batch=3"]

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "eaglefeed", *words, *self._settings]
        with (self.folder / f"{words[0]}.out").open("ab") as out, (self.folder / f"{words[0]}.err").open("ab") as err:
            process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=err)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def finish(self, *words: str) -> None:
        process = self.start(*words)
        assert process.wait(PATIENCE_S) == 0, (self.folder / f"{words[0]}.err").read_text()[-2000:]

    def wait_for_steps(self, steps: int) -> None:
        history = self.folder / "runs/default/draft/history.jsonl"
        wait_until(lambda: history.exists() and history.read_bytes().count(b"\n") >= steps)

    def document(self, command: str) -> dict[str, Any]:
        """What the command's one process with --json printed."""
        lines = (self.folder / f"{command}.out").read_text().splitlines()
        (document,) = (json.loads(line) for line in lines if line.startswith("{"))
        return dict(document)

    def copy_of_samples(self, run: str) -> list[str]:
        """The run's refs and shards as another run has them; returns the words that name it."""
        shards = self.folder / run
        shutil.copytree(self.folder / "runs/default/shards", shards)
        samples = open_queue(self.client, run, "samples")
        samples.put([QueueItem(item.id, item.payload) for item in self.samples.payloads()])
        samples.close()
        return [f"run.id={run}", f"store.uri={shards.as_uri()}", f"redis_url={self.server.url}"]

    def draft(self, run: str) -> bytes:
        (path,) = (self.folder / "runs" / run / "draft").glob("export-*/model.safetensors")
        return path.read_bytes()

    def shards(self) -> list[Path]:
        return list((self.folder / "runs/default/shards").glob("*/*.safetensors"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def cluster(tmp_path: Path, target: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(tmp_path, target, stack)
        rows = write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM_ROWS)])
        made.finish("feed", str(rows))
        yield made


def test_a_killed_producers_prompts_go_to_another_one(cluster: Cluster) -> None:
    doomed, other = cluster.start("produce"), cluster.start("produce")
    wait_until(lambda: cluster.samples.stats().ready > 5)
    doomed.send_signal(signal.SIGKILL)
    assert other.wait(PATIENCE_S) == 0
    stats = cluster.samples.stats()
    assert (stats.ready, stats.closed) == (NUM_ROWS, True)
    assert (cluster.prompts.stats().done, cluster.prompts.stats().dead) == (NUM_ROWS, 0)


def test_killed_trainers_end_with_the_draft_of_one_that_was_not_killed(cluster: Cluster) -> None:
    cluster.finish("produce")
    straight = cluster.start("train", *cluster.copy_of_samples("straight"))
    for steps in (12, 30):
        trainer = cluster.start("train")
        cluster.wait_for_steps(steps)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    cluster.finish("train", "--json")
    stats = cluster.samples.stats()
    assert (stats.done, stats.dead, stats.unsettled, stats.released) == (NUM_ROWS, 0, 0, 0)
    assert cluster.shards() == []
    last = cluster.document("train")
    assert last["step"] == NUM_ROWS
    assert last["drained"] is True
    assert straight.wait(PATIENCE_S) == 0
    assert cluster.draft("default") == cluster.draft("straight")


def test_a_trainer_that_wakes_after_its_successor_started_ends_and_does_no_harm(cluster: Cluster) -> None:
    cluster.finish("produce")
    paused = cluster.start("train", "train.checkpoint_every=1000")
    cluster.wait_for_steps(3)
    paused.send_signal(signal.SIGSTOP)
    cluster.finish("train", "-o", "successor", "--json")
    paused.send_signal(signal.SIGCONT)
    assert paused.wait(PATIENCE_S) == 1
    assert "its session is over" in (cluster.folder / "train.err").read_text()
    assert cluster.document("train")["step"] == NUM_ROWS
    stats = cluster.samples.stats()
    assert (stats.done, stats.dead, stats.unsettled) == (NUM_ROWS, 0, 0)
    assert cluster.shards() == []


def test_a_killed_server_comes_back_and_the_run_goes_on(cluster: Cluster) -> None:
    producer, trainer = cluster.start("produce"), cluster.start("train")
    cluster.wait_for_steps(6)
    kill(cluster.server, cluster.client)
    with EmbeddedServer(cluster.folder / "runs/default/queue"):  # whoever joins finds it dead and starts it again
        assert producer.wait(PATIENCE_S) == 0, (cluster.folder / "produce.err").read_text()[-2000:]
        assert trainer.wait(PATIENCE_S) == 0, (cluster.folder / "train.err").read_text()[-2000:]
        samples = open_queue(cluster.client, "default", "samples").stats()
    assert (samples.done, samples.dead, samples.unsettled) == (NUM_ROWS, 0, 0)
