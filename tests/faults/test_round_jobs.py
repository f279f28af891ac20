"""Jobs of real processes over gloo: damaged samples, ranks that die, hang or are stopped, a queue that restarts."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipeline
import queue_servers
import rank_jobs
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.storage.base import open_store
from faults.processes import kill, restarted, wait_until
from rank_jobs import Plan, Rank

pytestmark = pytest.mark.skipif(not queue_servers.real_servers(), reason="no Redis or Valkey server is installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    binary = next(iter(queue_servers.real_servers().values()))
    with EmbeddedServer(tmp_path / "queue", binary=binary) as started:
        yield started


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[QueueClient]:
    opened = connect(server.url, max_wait_s=20.0)
    yield opened
    opened.close()


@pytest.fixture
def run(client: QueueClient, tmp_path: Path) -> pipeline.Run:
    """Shards in a folder, queues on the server."""
    made = pipeline.Run(store=open_store(f"file://{tmp_path / 'shards'}"))
    made.prompts, made.samples = (open_queue(client, "run", name) for name in ("prompts", "samples"))
    return made


@pytest.fixture
def samples(run: pipeline.Run) -> LeaseQueue:
    """Twelve of them."""
    rank_jobs.fill(run, 12)
    return run.samples


def _plan(tmp_path: Path, server: EmbeddedServer, **changes: Any) -> Plan:
    plain = {"folder": tmp_path / "shards", "redis_url": server.url, "step": 1}
    return Plan(**(plain | changes))


def _names(*numbers: int) -> list[str]:
    return [f"p-{number}" for number in numbers]


def _rows(rank: Rank) -> list[Any]:
    """What a rank's loop saw, up to its end."""
    rows = []
    while (row := rank.hear())[0] != "end":
        assert isinstance(row[0], list), row
        rows.append(row)
    return rows


def _own(rows: list[Any]) -> list[str]:
    return [sample_id for own, _, _ in rows for ids in own for sample_id in ids]


def test_two_ranks_train_on_all_that_is_whole_in_equal_steps(tmp_path: Path) -> None:
    plan = Plan(tmp_path, num_samples=10, spoilt=(1, 3, 6))
    with rank_jobs.job(2, rank_jobs.train, plan) as ranks:
        first, second = (_rows(rank) for rank in ranks)
        stats, queue = ranks[0].hear()[1], ranks[0].hear()
    assert [own for own, _, _ in first] == [[("p-0",), ("p-2",)], [("p-4",), ()], [("p-8",), ()]]
    assert [own for own, _, _ in second] == [[(), ()], [("p-5",), ("p-7",)], [("p-9",), ()]]
    assert [row[1:] for row in first] == [row[1:] for row in second]
    assert [total for _, _, total in first] == [4.0, 6.0, 4.0]  # two supervised tokens a sample
    assert (stats["dead"], stats["padded"], stats["acked"]) == (3, 5, 7)
    assert queue == {"done": 7, "dead": 3, "ready": 0, "leased": 0, "tentative": 0}


def test_a_slow_rank_and_an_uneven_end_give_both_ranks_the_same_steps_and_lose_nothing(tmp_path: Path) -> None:
    plan = Plan(tmp_path, num_samples=7, pauses={1: 1})
    with rank_jobs.job(2, rank_jobs.train, plan) as ranks:
        assert ranks[1].hear()[0] == [("p-1",), ("p-3",)]
        assert ranks[1].hear() == "here"  # and goes on when the other one waits for it in the second step
        assert ranks[0].hear()[0] == [("p-0",), ("p-2",)]
        assert not ranks[0].pipe.poll(0.5)
        ranks[1].say("go on")
        first, second = (_rows(rank) for rank in ranks)
        stats, queue = ranks[0].hear()[1], ranks[0].hear()
        for rank in ranks:
            rank.process.join(rank_jobs.PATIENCE_S)
            assert rank.process.exitcode == 0
    assert ([own for own, _, _ in first], [own for own, _, _ in second]) == (
        [[("p-4",), ("p-6",)]],
        [[("p-5",), ()]],
    )
    assert (stats["acked"], stats["padded"], stats["dead"]) == (7, 1, 0)
    assert queue == {"done": 7, "dead": 0, "ready": 0, "leased": 0, "tentative": 0}


def test_ranks_wait_for_samples_for_longer_than_their_deadline(
    tmp_path: Path, server: EmbeddedServer, run: pipeline.Run
) -> None:
    with rank_jobs.job(3, rank_jobs.train, _plan(tmp_path, server, timeout_s=1.0, idle_s=None)) as ranks:
        assert not ranks[0].pipe.poll(2.5)
        rank_jobs.fill(run, 4)
        found = [_rows(rank) for rank in ranks]
    assert [_own(rows) for rows in found] == [["p-0", "p-3"], ["p-1"], ["p-2"]]
    assert [len(rows) for rows in found] == [2, 2, 2]


def test_a_killed_rank_is_named_and_its_samples_come_back_at_once(
    tmp_path: Path, server: EmbeddedServer, samples: LeaseQueue
) -> None:
    with rank_jobs.job(2, rank_jobs.train, _plan(tmp_path, server, timeout_s=600.0, pauses={1: 2})) as ranks:
        while ranks[1].hear() != "here":
            pass
        ranks[1].signal(signal.SIGKILL)
        assert [ranks[0].hear()[1] for _ in range(2)] == [("p-0", "p-1"), ("p-2", "p-3")]
        kind, text = ranks[0].hear()
        ranks[0].process.join(rank_jobs.PATIENCE_S)
    assert kind == "RankGone"
    assert "rank 1 did not come to" in text
    assert (samples.stats().leased, samples.stats().ready, samples.stats().tentative) == (0, 8, 4)
    with rank_jobs.job(2, rank_jobs.train, _plan(tmp_path, server)) as ranks:
        first, second = (_rows(rank) for rank in ranks)
    # Nothing was committed: a job that goes on from the beginning sees all of it again, in the same steps.
    assert [ids for _, ids, _ in first] == [tuple(_names(at, at + 1)) for at in range(0, 12, 2)]
    assert _own(second) == _names(1, 3, 5, 7, 9, 11)
    assert samples.stats().done == 12


def test_what_a_killed_rank_0_had_leased_goes_to_the_next_job(
    tmp_path: Path, server: EmbeddedServer, samples: LeaseQueue
) -> None:
    with rank_jobs.job(2, rank_jobs.train, _plan(tmp_path, server, timeout_s=600.0, pauses={0: 1})) as ranks:
        while ranks[0].hear() != "here":
            pass
        ranks[0].signal(signal.SIGKILL)
        assert ranks[1].hear()[0] == [("p-1",)]
        kind, text = ranks[1].hear()
    assert kind == "RankGone"
    assert "rank 0 did not come to" in text
    assert samples.stats().leased >= 2
    with rank_jobs.job(1, rank_jobs.train, _plan(tmp_path, server)) as ranks:
        assert _own(_rows(ranks[0])) == _names(*range(12))
    assert samples.stats().done == 12


def test_a_rank_that_stands_still_is_named_when_the_deadline_has_passed(
    tmp_path: Path, server: EmbeddedServer, samples: LeaseQueue
) -> None:
    with rank_jobs.job(2, rank_jobs.train, _plan(tmp_path, server, timeout_s=1.5, pauses={1: 1})) as ranks:
        while ranks[1].hear() != "here":
            pass
        ranks[1].signal(signal.SIGSTOP)
        assert ranks[0].hear()[1] == ("p-0", "p-1")
        kind, text = ranks[0].hear()
        ranks[0].process.join(rank_jobs.PATIENCE_S)
    assert kind == "RankGone"
    assert "rank 1 did not come to" in text
    assert "within 1.5 s" in text
    assert samples.stats().leased == 0


def test_a_stop_on_one_rank_ends_the_job_and_gives_back_the_rest(
    tmp_path: Path, server: EmbeddedServer, samples: LeaseQueue
) -> None:
    with rank_jobs.job(3, rank_jobs.train, _plan(tmp_path, server, pauses={0: 1, 1: 1})) as ranks:
        rows = [ranks[0].hear(), ranks[1].hear()]
        assert [ranks[0].hear(), ranks[1].hear()] == ["here"] * 2
        ranks[1].say("stop")
        wait_until(lambda: samples.stats().leased > 0)
        ranks[0].say("go")
        rest = [_rows(rank) for rank in ranks]
        stats = ranks[0].hear()[1]
        ranks[0].process.join(rank_jobs.PATIENCE_S)
    assert rows[0][1] == rows[1][1]
    assert len(rest[0]) == len(rest[1]) == len(rest[2]) - 1  # one each was heard before
    assert samples.stats().done == stats["acked"] == 3 * len(rest[2])
    assert samples.stats().ready == 12 - stats["acked"]
    assert samples.stats().leased == 0


def test_a_queue_that_restarts_costs_no_sample_and_no_step(
    tmp_path: Path, server: EmbeddedServer, client: QueueClient, samples: LeaseQueue
) -> None:
    with rank_jobs.job(2, rank_jobs.train, _plan(tmp_path, server, pauses={0: 2})) as ranks:
        before = [ranks[0].hear()[1] for _ in range(2)]
        assert ranks[0].hear() == "here"
        kill(server, client)
        ranks[0].say("go")
        with restarted(server):
            first, second = (_rows(rank) for rank in ranks)
            assert samples.stats().done == 12
    assert before + [ids for _, ids, _ in first] == [tuple(_names(at, at + 1)) for at in range(0, 12, 2)]
    assert len(second) == 6
