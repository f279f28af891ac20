"""The batcher and the sessions of a target server, on a clock that stands still, without a thread or a socket."""

import gc
import weakref
from typing import Any

import pytest
import torch

from coded_target import CodedTarget, V, check_answer, row
from eaglefeed.clock import ManualClock
from eaglefeed.errors import EaglefeedError, SchemaError, StorageError, TargetError, TargetUnavailable
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.engine import Captured
from eaglefeed.producer.sessions import Sessions
from eaglefeed.producer.work import TokenRows, Work
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.vocab import VocabMapping

SELECTED = torch.tensor([2, 3, 5, 8, 13])


class House:
    """A batcher over a coded target, and everything that it delivered."""

    def __init__(self, **options: Any) -> None:
        self.clock, self.target = ManualClock(), CodedTarget()
        limits = {"batch_tokens": 64, "max_in_flight": 8, "max_waiting": 8} | options
        self.batcher = Batcher(self.target, clock=self.clock, **limits)
        self.delivered: dict[str, Eagle3TargetBatch | EaglefeedError] = {}

    def work(self, name: str, *ids: int, seconds: float = 10.0, **options: Any) -> Work:
        deadline_s = self.clock.monotonic() + seconds
        rows = TokenRows(*row(*ids), **options.pop("packing", {}))

        def deliver(outcome: Eagle3TargetBatch | EaglefeedError) -> None:
            assert name not in self.delivered
            self.delivered[name] = outcome

        return Work(request=name, rows=rows, deliver=deliver, deadline_s=deadline_s, **options)

    def submit(self, name: str, *ids: int, **options: Any) -> Work:
        work = self.work(name, *ids, **options)
        self.batcher.submit(work)
        return work

    def batch(self, name: str) -> Eagle3TargetBatch:
        found = self.delivered[name]
        assert isinstance(found, Eagle3TargetBatch)
        return found

    def shapes(self) -> list[list[int]]:
        return [list(ids.shape) for ids in self.target.forwards]


@pytest.fixture
def house() -> House:
    return House()


def test_requests_of_one_forward_get_their_own_rows_at_their_own_length(house: House):
    mask = VocabMapping.from_ids(SELECTED, vocab_size=V).t2d
    house.submit("a", 1, 2, 3, 4, 5)
    house.submit("b", 8, 13, selected=(SELECTED, mask))
    house.submit("c", 7, 5, 3)
    assert house.batcher.step() == 3
    assert house.shapes() == [[3, 5]]
    check_answer(house.batch("a").tensors(), torch.tensor([[1, 2, 3, 4, 5]]))
    check_answer(house.batch("b").tensors(), torch.tensor([[8, 13]]), SELECTED)
    check_answer(house.batch("c").tensors(), torch.tensor([[7, 5, 3]]))


def test_packed_requests_share_no_forward_not_even_with_each_other(house: House):
    packing = {
        "position_ids": torch.tensor([[0, 1, 0]]),
        "seq_lens": torch.tensor([[2, 1]]),
        "doc_remaining": torch.tensor([[1, 0, 0]]),
    }
    for name, more in {"a": {}, "p": {"packing": packing}, "b": {}, "q": {"packing": packing}}.items():
        house.submit(name, 1, 2, 3, **more)
    assert [house.batcher.step() for _ in range(3)] == [2, 1, 1]
    assert list(house.delivered) == ["a", "b", "p", "q"]
    for name in "pq":
        tensors = house.batch(name).tensors()
        assert all(torch.equal(tensors[feature], value) for feature, value in packing.items())
        assert tensors["loss_mask"].tolist() == [[1, 0, 0]]
    assert house.batch("a").position_ids is None


def test_an_exact_request_has_a_forward_of_its_own_and_others_may_overtake_it(house: House):
    house.submit("a", 1, 2)
    house.submit("exact", 3, 4, exact=True)
    house.submit("b", 5, 6)
    assert [house.batcher.step(), house.batcher.step()] == [2, 1]
    assert house.shapes() == [[2, 2], [1, 2]]
    assert list(house.delivered) == ["a", "b", "exact"]


def test_an_exact_request_that_comes_first_takes_nobody_along(house: House):
    house.submit("exact", 3, 4, exact=True)
    house.submit("a", 1, 2)
    house.submit("b", 5, 6)
    assert [house.batcher.step(), house.batcher.step()] == [1, 2]


def test_a_forward_holds_no_more_tokens_than_its_budget_with_padding_counted(house: House):
    for name, length in (("a", 30), ("b", 10), ("c", 33), ("d", 2)):
        house.submit(name, *[1] * length)
    assert [house.batcher.step() for _ in range(3)] == [2, 1, 1]
    assert house.shapes() == [[2, 30], [1, 33], [1, 2]]


def test_a_request_beyond_the_budget_runs_alone():
    house = House(batch_tokens=4)
    house.submit("large", *[1] * 9)
    house.submit("small", 2)
    assert [house.batcher.step(), house.batcher.step()] == [1, 1]
    assert house.shapes() == [[1, 9], [1, 1]]


def test_no_forward_begins_while_as_many_answers_as_allowed_are_not_sent():
    house = House(max_in_flight=2, batch_tokens=4)
    works = [house.submit(name, 1, 2, 3) for name in "abc"]
    assert [house.batcher.step() for _ in range(3)] == [1, 1, 0]
    assert house.batcher.stats().in_flight == 2
    house.batcher.release(works[0])
    assert [house.batcher.step(), house.batcher.step()] == [1, 0]
    assert list(house.delivered) == ["a", "b", "c"]


def test_a_merged_forward_takes_no_more_requests_than_there_is_room_for_answers():
    house = House(max_in_flight=2)
    for name in "abc":
        house.submit(name, 1)
    assert house.batcher.step() == 2


def test_the_batcher_keeps_no_answer_that_it_delivered(house: House):
    work = house.submit("a", 1, 2)
    house.batcher.step()
    kept = weakref.ref(house.batch("a").aux_hidden_states)
    del house.delivered["a"]
    gc.collect()
    assert kept() is None
    house.batcher.release(work)
    assert house.batcher.stats().in_flight == 0


def test_cancelled_work_never_reaches_the_forward(house: House):
    given_up = house.submit("a", 1, 2)
    house.submit("b", 3, 4)
    house.batcher.release(given_up)
    assert house.batcher.step() == 1
    assert house.target.forwards[0].tolist() == [[3, 4]]
    assert list(house.delivered) == ["b"]
    assert house.batcher.stats().cancelled == 1


def test_late_work_never_reaches_the_forward_and_is_told_so(house: House):
    house.submit("late", 1, 2, seconds=5.0)
    house.submit("in time", 3, 4, seconds=5.5)
    house.clock.advance(5.0)
    assert house.batcher.step() == 1
    assert house.target.forwards[0].tolist() == [[3, 4]]
    assert isinstance(house.delivered["late"], TargetUnavailable)
    assert house.batcher.stats().timed_out == 1
    assert house.batcher.stats().in_flight == 1


def test_late_work_makes_room_to_wait_also_while_all_places_for_answers_are_taken():
    house = House(max_in_flight=1, max_waiting=1)
    house.submit("a", 1)
    house.batcher.step()
    house.submit("late", 2, seconds=1.0)
    house.clock.advance(1.0)
    assert house.batcher.step() == 0
    house.submit("next", 3)
    assert house.batcher.stats().waiting == 1


def test_work_that_is_given_up_during_its_forward_keeps_its_place_until_then_and_leaves_no_answer(house: House):
    works = {name: house.submit(name, *ids) for name, ids in (("a", (1, 2)), ("b", (3, 4)))}
    forward, supervise = house.target._forward, house.target.supervise
    supervised: list[Any] = []

    def give_up_meanwhile(*args: Any) -> Any:
        house.batcher.release(works["a"])
        assert house.batcher.stats().in_flight == 2
        return forward(*args)

    house.target._forward = give_up_meanwhile
    house.target.supervise = lambda *args: (supervised.append(args), supervise(*args))[1]
    assert house.batcher.step() == 2
    assert len(supervised) == 1
    assert list(house.delivered) == ["b"]
    check_answer(house.batch("b").tensors(), torch.tensor([[3, 4]]))
    stats = house.batcher.stats()
    assert (stats.in_flight, stats.cancelled) == (1, 1)


def test_work_that_is_given_up_while_its_answer_is_made_leaves_none(house: House):
    work, supervise = house.submit("a", 1, 2), house.target.supervise
    house.target.supervise = lambda *args: (house.batcher.release(work), supervise(*args))[1]
    assert house.batcher.step() == 1
    assert house.delivered == {}
    assert house.batcher.stats().in_flight == 0


def test_a_forward_that_fails_fails_its_own_request_only(house: House):
    house.target.poison = {13}
    for name, ids in (("a", (1, 2)), ("bad", (13, 1)), ("c", (3, 4, 5))):
        house.submit(name, *ids)
    assert house.batcher.step() == 3
    check_answer(house.batch("a").tensors(), torch.tensor([[1, 2]]))
    check_answer(house.batch("c").tensors(), torch.tensor([[3, 4, 5]]))
    failed = house.delivered["bad"]
    assert type(failed) is TargetError
    assert "device-side assert" in str(failed)
    stats = house.batcher.stats()
    assert (stats.answered, stats.failed, stats.in_flight) == (2, 1, 2)


def test_where_every_forward_fails_the_server_ends_and_tells_clients_to_ask_another(house: House):
    house.target.poison = set(range(64))
    house.submit("first", 1, exact=True)
    house.submit("second", 2, exact=True)
    house.batcher.run()  # ends by itself
    for name in ("first", "second"):
        assert type(house.delivered[name]) is TargetUnavailable
    assert "every forward fails now" in str(house.delivered["first"])
    assert "device-side assert" in str(house.batcher.failure)
    assert not house.batcher.is_ready
    with pytest.raises(TargetUnavailable):
        house.submit("third", 3)


def test_work_given_up_or_late_after_a_merged_forward_failed_is_not_run_again_alone(house: House):
    house.target.poison = {13}
    given_up = house.submit("given up", 1)
    house.submit("bad", 13)
    house.submit("late", 2, seconds=1.0)
    forward = house.target._forward

    def slow(*args: Any) -> Any:
        house.batcher.release(given_up)
        house.clock.advance(0.6)
        return forward(*args)

    house.target._forward = slow
    house.batcher.step()
    probe = [1, 2]  # after the failure of the one that was left: is it the target?
    assert house.shapes() == [[3, 1], [1, 1], probe]
    assert isinstance(house.delivered["late"], TargetUnavailable)
    assert house.batcher.stats().in_flight == 0


def test_a_row_that_the_target_refuses_spoils_no_other(house: House):
    house.submit("a", 1, 2)
    house.submit("bad", V, 1)
    house.batcher.step()
    assert isinstance(house.delivered["bad"], SchemaError)
    check_answer(house.batch("a").tensors(), torch.tensor([[1, 2]]))


def test_an_error_does_not_keep_the_forwards_tensors(house: House):
    house.submit("bad", V, 1)
    house.batcher.step()
    assert house.delivered["bad"].__traceback__ is None


def test_more_requests_than_may_wait_are_refused_at_once(house: House):
    for index in range(8):
        house.submit(str(index), 1)
    with pytest.raises(TargetUnavailable, match="too many requests wait"):
        house.submit("one more", 1)
    assert house.batcher.stats().refused == 1


def test_a_closing_batcher_answers_what_waits_and_refuses_the_rest(house: House):
    house.submit("a", 1)
    house.batcher.close()
    with pytest.raises(TargetUnavailable, match="ends"):
        house.submit("b", 2)
    assert house.batcher.step() == 1
    assert list(house.delivered) == ["a"]


def test_memory_that_runs_out_for_one_of_a_shared_forward_fails_that_request_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
):
    part = Captured.part

    def short_of_memory(captured: Captured, rows: slice, length: int) -> Captured:
        if rows.start == 1:
            raise RuntimeError("CUDA out of memory")
        return part(captured, rows, length)

    monkeypatch.setattr(Captured, "part", short_of_memory)
    for name in "abc":
        house.submit(name, 1, 2)
    assert house.batcher.step() == 3
    check_answer(house.batch("a").tensors(), torch.tensor([[1, 2]]))
    assert "out of memory" in str(house.delivered["b"])
    check_answer(house.batch("c").tensors(), torch.tensor([[1, 2]]))
    assert (house.batcher.stats().failed, house.batcher.stats().in_flight) == (1, 2)


def test_stopping_tells_everybody_who_waits(house: House):
    house.submit("a", 1)
    house.batcher.stop()
    house.batcher.run()  # returns at once
    assert isinstance(house.delivered["a"], TargetUnavailable)
    assert house.target.forwards == []


def test_the_warm_up_is_a_forward_and_says_what_fails(house: House):
    house.batcher.warm_up()
    assert len(house.target.forwards) == 1
    house.target.poison = {1}
    with pytest.raises(TargetError, match="warm-up: the target failed"):
        house.batcher.warm_up()


MAPS = [(torch.tensor([k]), torch.arange(V) == k) for k in range(4)]


def test_a_session_lives_as_long_as_its_client_shows_life():
    clock = ManualClock()
    sessions = Sessions(idle_s=10.0, clock=clock)
    sessions.begin("a", MAPS[0])
    sessions.begin("b", MAPS[1])
    clock.advance(9.0)
    assert sessions.use("a") is MAPS[0]
    clock.advance(2.0)
    assert len(sessions) == 1
    assert sessions.use("a") is MAPS[0]
    with pytest.raises(StorageError, match="unknown session"):
        sessions.use("b")


def test_the_longest_idle_session_makes_room_for_a_new_one():
    sessions = Sessions(idle_s=10.0, max_sessions=2, clock=ManualClock())
    for name, selected in zip("ab", MAPS, strict=False):
        sessions.begin(name, selected)
    sessions.use("a")
    sessions.begin("c", MAPS[2])
    assert sessions.use("a") is MAPS[0]
    assert sessions.use("c") is MAPS[2]
    with pytest.raises(StorageError):
        sessions.use("b")


def test_a_new_map_replaces_the_sessions_own_and_ending_one_leaves_the_others():
    sessions = Sessions(idle_s=10.0, max_sessions=2, clock=ManualClock())
    sessions.begin("a", MAPS[0])
    sessions.begin("b", MAPS[1])
    sessions.begin("a", MAPS[2])
    assert sessions.use("a") is MAPS[2]
    sessions.end("a")
    sessions.end("a")
    assert sessions.use("b") is MAPS[1]
    assert len(sessions) == 1
