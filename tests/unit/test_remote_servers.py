from collections import Counter
from contextlib import ExitStack
from random import Random

import pytest

from eaglefeed.clock import ManualClock
from eaglefeed.consumer.servers import ServerBook, backoff_s
from eaglefeed.errors import TargetUnavailable

A, B, C = 0, 1, 2


class Bench:
    def __init__(self, num_servers: int = 3) -> None:
        self.clock = ManualClock()
        self.book = ServerBook([f"http://host-{index}:1" for index in range(num_servers)], self.clock)

    def choose(self, *tried: int) -> int:
        with self.book.turn(tried) as index:
            return index

    def fail(self, *servers: int) -> None:
        for index in servers:
            self.book.failed(index, TargetUnavailable("no answer", subject=f"host-{index}"))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_servers_are_used_in_turn(bench: Bench) -> None:
    assert [bench.choose() for _ in range(7)] == [A, B, C, A, B, C, A]


def test_a_server_with_fewer_requests_is_used_first(bench: Bench) -> None:
    with ExitStack() as held:
        found = [held.enter_context(bench.book.turn(())) for _ in range(4)]
        assert found == [A, B, C, A]
        assert [bench.choose(), bench.choose()] == [B, C]


def test_a_request_that_raises_is_not_counted_any_more(bench: Bench) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), bench.book.turn(()) as index:
            1 // index  # A
        assert [bench.choose(), bench.choose()] == [B, C]


def test_a_server_that_is_out_gets_no_request_while_another_is_well(bench: Bench) -> None:
    bench.fail(B)
    assert Counter(bench.choose() for _ in range(10)) == {A: 5, C: 5}


def test_another_attempt_goes_to_a_server_that_was_not_tried(bench: Bench) -> None:
    assert [bench.choose(A), bench.choose(A, B), bench.choose(A, B)] == [B, C, C]


def test_a_well_server_is_tried_twice_before_one_that_is_out_is_tried(bench: Bench) -> None:
    bench.fail(B, C)
    assert bench.choose(A) == A


def test_where_all_are_out_each_is_tried_in_turn(bench: Bench) -> None:
    bench.fail(A, B, C)
    assert [bench.choose(), bench.choose(A), bench.choose(A, B)] == [A, B, C]


def test_a_server_that_answers_is_well_again(bench: Bench) -> None:
    bench.fail(A, B)
    assert bench.book.well() == [C]
    bench.book.answered(A)
    assert bench.book.well() == [A, C]


def test_a_server_is_probed_every_two_seconds_while_it_is_out(bench: Bench) -> None:
    bench.fail(B)
    probed = []
    for quarter in range(1, 25):
        bench.clock.advance(0.25)
        probed += [(index, quarter / 4) for index in bench.book.due()]
        bench.fail(B)  # more failures change nothing about when
    assert probed == [(B, 2.0), (B, 4.0), (B, 6.0)]
    bench.book.answered(B)
    bench.clock.advance(60)
    assert bench.book.due() == []


def test_two_callers_do_not_probe_a_server_twice(bench: Bench) -> None:
    bench.fail(A, C)
    bench.clock.advance(2.0)
    assert [bench.book.due(), bench.book.due()] == [[A, C], []]


def test_there_is_no_outage_while_one_is_well(bench: Bench) -> None:
    bench.fail(A, B)
    assert bench.book.outage() is None


def test_an_outage_names_each_server_with_its_error(bench: Bench) -> None:
    bench.fail(A, B, C)
    outage = bench.book.outage()
    assert outage is not None
    assert outage.retryable
    assert all(f"host-{index}: no answer" in str(outage) for index in (A, B, C))


def test_an_outage_names_a_server_whose_own_words_do_not(bench: Bench) -> None:
    for index in (A, B, C):
        bench.book.failed(index, TargetUnavailable("busy"))
    assert all(f"http://host-{index}:1: busy" in str(bench.book.outage()) for index in (A, B, C))


def test_an_outage_of_the_only_server_says_why() -> None:
    bench = Bench(1)
    bench.fail(A)
    assert "host-0: no answer" in str(bench.book.outage())


def test_backoff_is_anything_up_to_a_bound_that_doubles_until_five_seconds() -> None:
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    for attempt, bound in enumerate(bounds, start=1):
        waits = [backoff_s(attempt, Random(seed)) for seed in range(400)]
        assert 0 <= min(waits) < 0.05 * bound
        assert 0.95 * bound < max(waits) <= bound


def test_backoff_of_a_late_attempt_is_still_bounded() -> None:
    assert backoff_s(5000, Random(0)) <= 5.0
