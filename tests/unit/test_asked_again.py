"""A request that comes again while it waits or is run: it has one forward, and whoever asks last has the answer."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from coded_target import CodedTarget, check_answer, row
from eaglefeed.clock import ManualClock
from eaglefeed.errors import EaglefeedError, TargetError, TargetUnavailable
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.work import TokenRows, Work
from eaglefeed.schema.batch import Eagle3TargetBatch

Outcome = Eagle3TargetBatch | EaglefeedError


class Caller:
    """Somebody who waits for one answer."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    @property
    def answer(self) -> dict[str, torch.Tensor]:
        (outcome,) = self.outcomes
        assert isinstance(outcome, Eagle3TargetBatch)
        return outcome.tensors()

    @property
    def error(self) -> EaglefeedError:
        (outcome,) = self.outcomes
        assert isinstance(outcome, EaglefeedError)
        return outcome


class Desk:
    """A batcher whose requests all bear one id, unless they say otherwise; `meanwhile` is done in its next forward."""

    def __init__(self, **limits: int) -> None:
        self.clock, self.target = ManualClock(), CodedTarget()
        limits = {"batch_tokens": 64, "max_in_flight": 2, "max_waiting": 4} | limits
        self.batcher = Batcher(self.target, clock=self.clock, **limits)
        self.meanwhile = lambda: None
        forward = self.target._forward

        def run(*args: Any) -> Any:
            do, self.meanwhile = self.meanwhile, lambda: None
            do()
            return forward(*args)

        self.target._forward = run

    def ask(self, caller: Caller, *ids: int, seconds: float = 10.0, request: str = "a", **options: Any) -> Work:
        deadline_s = self.clock.monotonic() + seconds
        rows = TokenRows(*row(*ids))
        return self.batcher.submit(
            Work(request=request, rows=rows, deliver=caller.put, deadline_s=deadline_s, **options)
        )


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def first() -> Caller:
    return Caller()


@pytest.fixture
def second() -> Caller:
    return Caller()


def test_a_request_that_comes_again_in_its_forward_is_not_run_again(desk: Desk, first: Caller, second: Caller):
    work = desk.ask(first, 1, 2)

    def come_again() -> None:
        desk.batcher.release(work, first.put)  # its client has hung up
        desk.ask(second, 1, 2)

    desk.meanwhile = come_again
    assert desk.batcher.step() == 1
    assert desk.batcher.step() == 0
    check_answer(second.answer, torch.tensor([[1, 2]]))
    assert len(desk.target.forwards) == 1
    stats = desk.batcher.stats()
    assert (stats.answered, stats.in_flight, stats.waiting, stats.cancelled) == (1, 1, 0, 0)


def test_who_asked_first_and_still_waits_is_told_so(desk: Desk, first: Caller, second: Caller):
    desk.ask(first, 1, 2)
    desk.ask(second, 1, 2)
    assert isinstance(first.error, TargetUnavailable)
    assert desk.batcher.stats().waiting == 1
    desk.batcher.step()
    check_answer(second.answer, torch.tensor([[1, 2]]))
    assert len(desk.target.forwards) == 1


def test_who_asked_first_and_leaves_late_takes_nothing_from_who_asked_again(desk: Desk, first: Caller, second: Caller):
    work = desk.ask(first, 1, 2)
    again = desk.ask(second, 1, 2)
    desk.batcher.release(work, first.put)
    desk.batcher.step()
    check_answer(second.answer, torch.tensor([[1, 2]]))
    assert desk.batcher.stats().in_flight == 1
    desk.batcher.release(again, second.put)
    assert desk.batcher.stats().in_flight == 0


def test_a_request_that_comes_again_keeps_its_place_and_has_the_time_of_the_second(
    desk: Desk, first: Caller, second: Caller
):
    desk.ask(first, 1, 2, seconds=5.0)
    desk.ask(Caller(), 3, 4, seconds=60.0, request="b")
    desk.clock.advance(4.0)
    desk.ask(second, 1, 2, seconds=30.0)
    desk.clock.advance(4.0)
    desk.batcher.step()
    assert desk.target.forwards[0].tolist() == [[1, 2], [3, 4]]
    check_answer(second.answer, torch.tensor([[1, 2]]))


def test_a_request_that_comes_again_needs_no_room_and_is_answered_by_a_server_that_ends(first: Caller, second: Caller):
    desk = Desk(max_waiting=1)
    desk.ask(first, 1, 2)
    desk.batcher.close()
    desk.ask(second, 1, 2)
    desk.batcher.step()
    check_answer(second.answer, torch.tensor([[1, 2]]))


def test_a_failure_is_told_to_who_asked_again(desk: Desk, first: Caller, second: Caller):
    work, desk.target.poison = desk.ask(first, 1, 13), {13}

    def come_again() -> None:
        desk.batcher.release(work, first.put)
        desk.ask(second, 1, 13)

    desk.meanwhile = come_again
    desk.batcher.step()
    assert type(second.error) is TargetError
    assert first.outcomes == []


OTHERS: dict[str, dict[str, Any]] = {
    "other rows": {"ids": (1, 3)},
    "longer rows": {"ids": (1, 2, 2)},
    "another vocabulary": {"selected": (torch.tensor([2]), torch.arange(64) == 2)},
    "a forward of its own": {"exact": True},
    "another way back": {"on_device": True},
    "no id": {"request": ""},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_request_that_bears_the_same_id_has_an_answer_of_its_own(
    name: str, desk: Desk, first: Caller, second: Caller
):
    options = {"ids": (1, 2), **OTHERS[name]}
    ids = options.pop("ids")
    desk.ask(first, 1, 2, **({"request": ""} if name == "no id" else {}))
    desk.ask(second, *ids, **options)
    while desk.batcher.step():
        pass
    check_answer(first.answer, torch.tensor([[1, 2]]))
    assert second.answer["input_ids"].tolist() == [[*ids[1:], 0]]
    assert desk.batcher.stats().answered == 2


def test_a_request_that_comes_again_after_its_answer_is_run_again(desk: Desk, first: Caller, second: Caller):
    work = desk.ask(first, 1, 2)
    desk.batcher.step()
    desk.batcher.release(work, first.put)
    desk.ask(second, 1, 2)
    desk.batcher.step()
    check_answer(second.answer, torch.tensor([[1, 2]]))
    assert len(desk.target.forwards) == 2


def test_packed_rows_that_come_again_are_told_apart_by_their_packing(desk: Desk, first: Caller, second: Caller):
    tokens = torch.tensor([[1, 2, 3, 4]])
    ones = torch.ones_like(tokens)
    whole = TokenRows(tokens, ones, ones, torch.arange(4)[None], torch.tensor([[4]]), torch.tensor([[3, 2, 1, 0]]))
    halves = whole._replace(
        position_ids=torch.tensor([[0, 1, 0, 1]]),
        seq_lens=torch.tensor([[2, 2]]),
        doc_remaining=torch.tensor([[1, 0, 1, 0]]),
    )
    work = Work(request="a", rows=whole, deliver=first.put, deadline_s=10.0)
    desk.batcher.submit(work)
    again = replace(work, rows=halves, deliver=second.put)
    assert desk.batcher.submit(again) is again
    repeated = replace(work, rows=TokenRows(*(part.clone() for part in whole)), deliver=partial(second.put))
    assert desk.batcher.submit(repeated) is work
