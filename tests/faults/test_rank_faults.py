"""Ranks that die, hang, leave or never come: the others are told which, and in time."""

import os
import signal
from multiprocessing.connection import Connection

import pytest
import torch

import rank_jobs
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.errors import ConfigError, RankGone


def _together(pipe: Connection, calls: str, timeout_s: float) -> None:
    """Say "here", hear "go", make the calls, and tell which ranks were missing."""
    with Ranks.of_job(timeout_s=timeout_s) as ranks:
        pipe.send("here")
        pipe.recv()
        tensor = torch.ones(2**18)
        try:
            for call in calls.split():
                ranks.sum([tensor]) if call == "sum" else ranks.tell(b"x")
            pipe.send("done")
        except RankGone as error:
            pipe.send((error.missing, str(error)))


@pytest.mark.parametrize(("victim", "call"), [(0, "sum"), (2, "tell")])
def test_a_rank_that_was_killed_is_named_by_the_others_at_once(call: str, victim: int) -> None:
    with rank_jobs.job(3, _together, call, 600.0) as ranks:
        assert [rank.hear() for rank in ranks] == ["here"] * 3
        ranks[victim].signal(signal.SIGKILL)
        others = [rank for number, rank in enumerate(ranks) if number != victim]
        for rank in others:
            rank.say("go")
        for rank in others:
            missing, text = rank.hear()
            assert missing == (victim,)
            assert f"rank {victim} did not come to" in text
            assert "within 600 s" in text


def test_a_rank_that_is_only_slow_is_not_named_beside_one_that_died() -> None:
    with rank_jobs.job(3, _together, "sum", 600.0) as ranks:
        assert [rank.hear() for rank in ranks] == ["here"] * 3
        ranks[1].signal(signal.SIGKILL)
        ranks[0].say("go")
        assert ranks[0].hear()[0] == (1,)
        ranks[2].say("go")
        assert ranks[2].hear()[0] == (1,)


def test_a_rank_that_is_busy_with_something_else_is_named_when_the_deadline_has_passed() -> None:
    with rank_jobs.job(3, _together, "sum", 1.5) as ranks:
        assert [rank.hear() for rank in ranks] == ["here"] * 3
        _are_told_of_rank_1(ranks[0], ranks[2])


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_rank_that_stands_still_or_dies_is_named_also_in_the_midst_of_a_call(is_in_call: bool, number: int) -> None:
    with rank_jobs.job(3, _together, "sum", 1.5) as ranks:
        assert [rank.hear() for rank in ranks] == ["here"] * 3
        if is_in_call:
            ranks[1].say("go")
            SYSTEM_CLOCK.sleep(0.5)
        ranks[1].signal(number)
        _are_told_of_rank_1(ranks[0], ranks[2])


def _are_told_of_rank_1(*others: rank_jobs.Rank) -> None:
    for rank in others:
        rank.say("go")
    found = [rank.hear() for rank in others]
    assert [missing for missing, _ in found] == [(1,), (1,)]
    assert all("within 1.5 s" in text for _, text in found)


def test_a_rank_that_left_is_named() -> None:
    with rank_jobs.job(2, _together, "", 600.0) as ranks, rank_jobs.job(2, _left, 600.0) as others:
        assert [rank.hear() for rank in ranks] == ["here"] * 2
        assert others[0].hear()[0] == (1,)


def _left(pipe: Connection, timeout_s: float) -> None:
    with Ranks.of_job(timeout_s=timeout_s) as ranks:
        if ranks.rank == 1:
            raise ConfigError("wrong")
        try:
            ranks.sum([torch.ones(3)])
        except RankGone as error:
            pipe.send((error.missing, str(error)))


def _start_alone(pipe: Connection) -> None:
    os.environ["WORLD_SIZE"] = "2"
    try:
        Ranks.of_job(timeout_s=1.0)
    except RankGone as error:
        pipe.send(str(error))


def test_ranks_that_never_come_are_missed_at_the_start() -> None:
    with rank_jobs.job(1, _start_alone) as (rank,):
        text = rank.hear()
    assert "did not come to the start, wanted within 1 s" in text
    assert "1/2" in text


def _start_without_a_launcher(pipe: Connection) -> None:
    del os.environ["MASTER_ADDR"]
    try:
        Ranks.of_job(timeout_s=1.0)
    except ConfigError as error:
        pipe.send(str(error))


def test_a_start_without_a_launcher_says_what_to_do() -> None:
    with rank_jobs.job(1, _start_without_a_launcher) as (rank,):
        text = rank.hear()
    assert "MASTER_ADDR" in text
    assert "torchrun" in text
