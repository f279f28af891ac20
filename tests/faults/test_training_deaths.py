"""A training that is killed anywhere and started again ends as one that was not: processes, SIGKILL, a real queue."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

import queue_servers
from eaglefeed.consumer.checkpoint import list_checkpoints
from training_jobs import Death, Job, filled_job, same

NUM_SAMPLES = 13
NUM_STEPS = 7  # two samples each, the last one alone


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    binaries = list(queue_servers.real_servers().values())
    if not binaries:
        pytest.skip("no server is installed")
    with queue_servers.running(binaries[0]) as server:
        yield server.url


@pytest.fixture
def job(tmp_path: Path, url: str) -> Job:
    return filled_job(tmp_path, url, NUM_SAMPLES)


@pytest.fixture
def pair(tmp_path: Path, url: str) -> Job:
    """Of two ranks, with one sample a step each."""
    return filled_job(tmp_path, url, NUM_SAMPLES, samples_per_step=1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, url: str) -> dict[str, Tensor]:
    """The state after a life without a death."""
    job = filled_job(tmp_path_factory.mktemp("straight"), url, NUM_SAMPLES)
    assert job.live() == ["end"]
    return job.state()


@pytest.fixture(scope="module")
def straight_pair(tmp_path_factory: pytest.TempPathFactory, url: str) -> dict[str, Tensor]:
    job = filled_job(tmp_path_factory.mktemp("pair"), url, NUM_SAMPLES, samples_per_step=1)
    assert job.live(2) == ["end", "end"]
    assert same(job.state(0), job.state(1))
    return job.state()


def _all_done(job: Job, num_samples: int = NUM_SAMPLES) -> bool:
    stats = job.samples().stats()
    return (stats.done, stats.dead, stats.unsettled, stats.redelivered) == (num_samples, 0, 0, 0)


@pytest.mark.parametrize("number", range(1, NUM_STEPS + 1))
def test_a_trainer_killed_at_any_step_ends_with_the_weights_of_one_that_was_not(
    job: Job, number: int, straight: dict[str, Tensor]
) -> None:
    # Before the ack and after the update at odd steps, before the update at even ones.
    assert job.live(death=Death(0, "ack" if number % 2 else "learn", number)) == [None]
    assert job.live() == ["end"]
    assert same(job.state(), straight)
    assert _all_done(job)


@pytest.mark.slow
def test_a_longer_training_killed_at_random_makes_no_difference(tmp_path: Path, url: str) -> None:
    seed = random.randrange(1000)
    draw = random.Random(seed)
    straight, killed = (filled_job(tmp_path / name, url, 60, checkpoint_every=3) for name in ("straight", "killed"))
    assert straight.live() == ["end"]
    for _ in range(5):
        killed.live(death=Death(0, draw.choice(["learn", "ack", "commit"]), draw.randint(1, 9)))
    assert killed.live() == ["end"]
    assert same(killed.state(), straight.state()), f"seed {seed}"
    assert killed.learned() == straight.learned() == [f"p-{index}" for index in range(60)]


@pytest.mark.parametrize("how", ["the newest is gone", "told to"])
def test_the_checkpoint_before_the_last_can_be_gone_on_from(job: Job, how: str, straight: dict[str, Tensor]) -> None:
    assert job.live(death=Death(0, "learn", 6)) == [None]
    assert [path.name[5:14] for path in list_checkpoints(job.draft)] == ["000000002", "000000004"]
    if how == "told to":
        assert job.live(from_step=2) == ["end"]
        assert (job.draft / "later-step-000000004.safetensors").is_file()
    else:
        list_checkpoints(job.draft)[-1].unlink()
        assert job.live() == ["end"]
    assert same(job.state(), straight)
    assert job.learned() == [f"p-{index}" for index in range(NUM_SAMPLES)]


@pytest.mark.parametrize(
    "death",
    [
        Death(0, "learn", 3),
        Death(0, "ack", 4),
        Death(0, "commit", 2),
        Death(1, "learn", 1),
        Death(1, "learn", 6),
        Death(1, "ack", 5),
    ],
    ids=lambda death: f"rank {death.rank} in its {death.doing} {death.number}",
)
def test_two_ranks_of_which_one_is_killed_end_with_the_weights_of_a_job_that_was_not(
    pair: Job, death: Death, straight_pair: dict[str, Tensor]
) -> None:
    told = pair.live(2, death)
    assert told[death.rank] is None
    kind, text = told[1 - death.rank]
    assert (kind, f"rank {death.rank} did not come" in text) == ("RankGone", True)
    assert pair.live(2) == ["end", "end"]
    assert same(pair.state(0), straight_pair)
    assert same(pair.state(1), straight_pair)
    assert _all_done(pair)


def test_a_job_may_go_on_with_another_number_of_ranks_and_learns_each_sample_once(tmp_path: Path, url: str) -> None:
    job = filled_job(tmp_path, url, 29)
    job.live(2, Death(0, "ack", 4))
    job.live(1, Death(0, "learn", 4))
    assert job.live(3) == ["end", "end", "end"]
    assert same(job.state(0), job.state(2))
    assert sorted(job.learned()) == sorted(f"p-{index}" for index in range(29))
    assert _all_done(job, 29)


def test_samples_that_are_padded_together_train_the_same_on_every_start(tmp_path: Path, url: str) -> None:
    jobs = [filled_job(tmp_path / name, url, 13, samples_per_step=4, samples_per_batch=2) for name in ("one", "two")]
    assert jobs[0].live(2) == ["end", "end"]
    jobs[1].live(2, Death(0, "ack", 2))
    assert jobs[1].live(2) == ["end", "end"]
    assert same(jobs[0].state(1), jobs[1].state(1))


def test_a_checkpoint_that_takes_longer_than_ranks_wait_for_each_other_ends_nobody(tmp_path: Path, url: str) -> None:
    job = filled_job(tmp_path, url, 6, samples_per_step=1, checkpoint_every=1, timeout_s=1.5, first_save_s=4.0)
    assert job.live(2) == ["end", "end"]
    assert same(job.state(0), job.state(1))
    assert sorted(job.learned()) == sorted(f"p-{index}" for index in range(6))
    assert _all_done(job, 6)
