"""Producers, trainers and the server killed in the middle of a run, as real processes: nothing lost, nothing twice."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import kill, wait_until

from commands import conversation, save_tiny_target, write_rows
from eaglefeed.queue import EmbeddedServer, connect, open_queue

NUM_ROWS = 120


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
        assert process.wait(90) == 0, (self.folder / f"{words[0]}.err").read_text()[-2000:]

    def wait_for_steps(self, steps: int) -> None:
        history = self.folder / "runs/default/draft/history.jsonl"
        wait_until(lambda: history.exists() and history.read_bytes().count(b"\n") >= steps)

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
    assert other.wait(60) == 0
    stats = cluster.samples.stats()
    assert (stats.ready, stats.closed) == (NUM_ROWS, True)
    assert (cluster.prompts.stats().done, cluster.prompts.stats().dead) == (NUM_ROWS, 0)


def test_killed_trainers_lose_no_sample(cluster: Cluster) -> None:
    cluster.finish("produce")
    for steps in (12, 30):
        trainer = cluster.start("train")
        cluster.wait_for_steps(steps)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    cluster.finish("train", "--json")
    stats = cluster.samples.stats()
    assert (stats.done, stats.dead, stats.unsettled) == (NUM_ROWS, 0, 0)
    assert stats.redelivered > 0
    assert cluster.shards() == []
    last = json.loads((cluster.folder / "train.out").read_text())
    assert last["step"] == NUM_ROWS
    assert last["drained"] is True


def test_a_killed_server_comes_back_and_the_run_goes_on(cluster: Cluster) -> None:
    producer, trainer = cluster.start("produce"), cluster.start("train")
    wait_until(lambda: cluster.samples.stats().done > 5)
    kill(cluster.server, cluster.client)
    with EmbeddedServer(cluster.folder / "runs/default/queue"):  # whoever joins finds it dead and starts it again
        assert producer.wait(60) == 0, (cluster.folder / "produce.err").read_text()[-2000:]
        assert trainer.wait(60) == 0, (cluster.folder / "train.err").read_text()[-2000:]
        samples = open_queue(cluster.client, "default", "samples").stats()
    assert samples.done + samples.dead + samples.unsettled == NUM_ROWS
    assert (samples.done, samples.dead) == (NUM_ROWS, 0)
