"""Hugging Face's Trainer as two ranks of a job, under accelerate's own DistributedDataParallel."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hf_training
import pipeline
import rank_jobs
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue, QueueStats
from eaglefeed.storage.base import open_store
from hf_training import Learned, RankPlan, assert_close, reference, same

NUM_SAMPLES, SPOILT = 15, 6  # 4 rounds of four; one sample of the second cannot be read, one of the last is not there
STEPS = [4, 3, 4, 3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("queue")) as running:
        yield running


class Told(NamedTuple):
    """A rank's last step, weights, steps' losses and gradients, and counts."""

    step: int
    weights: dict[str, Tensor]
    steps: list[tuple[float, float]]
    stats: dict[str, Any]


def _life(folder: Path, server: EmbeddedServer) -> list[Told]:
    """One life of a job of two."""
    with rank_jobs.job(2, hf_training.train_rank, RankPlan(folder, server.url)) as ranks:
        told = [Told(*rank.hear()) for rank in ranks]
    return [each._replace(weights={k: torch.tensor(rows) for k, rows in each.weights.items()}) for each in told]


def _death(folder: Path, server: EmbeddedServer, step: int) -> None:
    """A life that ends by a SIGKILL of both ranks."""
    with rank_jobs.job(2, hf_training.train_rank, RankPlan(folder, server.url, kill_after=step)) as ranks:
        for rank in ranks:
            rank.process.join(rank_jobs.PATIENCE_S)
        assert [rank.process.exitcode for rank in ranks] == [-9, -9]


@contextmanager
def _run(folder: Path, server: EmbeddedServer) -> Iterator[LeaseQueue]:
    """A run of the folder's name: its shards there, one of them damaged, and its queues on the server."""
    with closing(connect(server.url)) as client:
        run = pipeline.Run(clock=pipeline.TurnableClock(), store=open_store(f"file://{folder / 'shards'}"))
        run.prompts, run.samples = (open_queue(client, folder.name, name) for name in ("prompts", "samples"))
        run.feed(*(hf_training.prompt(index) for index in range(NUM_SAMPLES)))
        run.produce()
        rank_jobs.spoil(folder / "shards", SPOILT)
        yield run.samples


def _reference() -> Learned:
    """What one process learns of the same steps."""
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*(hf_training.prompt(index) for index in range(NUM_SAMPLES) if index != SPOILT))
    run.produce()
    return reference(run, STEPS)


@pytest.fixture(scope="module")
def straight(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Told], QueueStats]:
    """A life without a death, and its queue afterwards."""
    folder = tmp_path_factory.mktemp("straight")
    with _run(folder, server) as samples:
        return _life(folder, server), samples.stats()


def test_two_ranks_learn_what_one_does_of_the_samples_that_can_be_read(
    straight: tuple[list[Told], QueueStats],
) -> None:
    (first, second), queue = straight
    assert first.step == second.step == len(STEPS)
    assert same(first.weights, second.weights), "the ranks have diverged"
    assert_close(Learned(first.weights, first.steps), _reference())
    assert (queue.done, queue.dead, queue.unsettled) == (NUM_SAMPLES - 1, 1, 0)
    counts = {name: first.stats[name] for name in ("delivered", "acked", "dead", "padded", "redelivered")}
    assert counts == {
        "delivered": NUM_SAMPLES - 1,
        "acked": NUM_SAMPLES - 1,
        "dead": 1,
        "padded": 2,
        "redelivered": 0,
    }


def test_two_ranks_that_are_killed_go_on_as_if_they_had_not_been(
    straight: tuple[list[Told], QueueStats], tmp_path: Path, server: EmbeddedServer
) -> None:
    with _run(tmp_path, server) as samples:
        _death(tmp_path, server, 3)  # step 3 is in no checkpoint
        told = _life(tmp_path, server)
        assert [each.step for each in told] == [len(STEPS)] * 2
        assert all(same(each.weights, straight[0][0].weights) for each in told)
        assert (samples.stats().done, samples.stats().dead) == (NUM_SAMPLES - 1, 1)


def test_a_loss_on_one_rank_that_is_no_number_stops_both_with_the_rounds_samples(
    tmp_path: Path, server: EmbeddedServer
) -> None:
    plan = RankPlan(tmp_path, server.url, spoil_at=2)
    with _run(tmp_path, server) as samples, rank_jobs.job(2, hf_training.train_rank, plan) as ranks:
        for name, text in [rank.hear() for rank in ranks]:
            assert name == "SampleCorrupt"
            assert set(re.findall(r"p-\d+", text)) == {"p-4", "p-5", "p-7"}
            assert "no weight was changed" in text
        assert samples.stats().tentative + samples.stats().done == 4
