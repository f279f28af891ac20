"""StepMeter: shares and rates of windows that the test turns the clock through."""

import pytest

from eaglefeed.clock import ManualClock
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.meter import Pace, StepMeter
from eaglefeed.errors import QueueUnavailable


class Queue:
    """Says whether there is room, and counts who asks."""

    def __init__(self) -> None:
        self.room, self.asked, self.is_away = True, 0, False

    def has_room(self) -> bool:
        self.asked += 1
        if self.is_away:
            raise QueueUnavailable("a:1", "away")
        return self.room


def step(clock: ManualClock, stats: StreamStats, *, seconds: float, wait_s: float = 0.0, samples: int = 1) -> None:
    clock.advance(seconds)
    stats.wait_s += wait_s
    stats.delivered += samples


def test_rates_and_shares_are_those_of_the_window_and_the_total_of_all() -> None:
    clock, stats = ManualClock(), StreamStats(delivered=100, wait_s=50.0)
    meter = StepMeter(stats, clock=clock)
    step(clock, stats, seconds=4.0, wait_s=1.0, samples=2)
    assert meter.step(30) == Pace(0.5, 7.5, 0.25, None)
    step(clock, stats, seconds=6.0, wait_s=2.0, samples=8)
    assert meter.step(20) == Pace(1.0, 5.0, pytest.approx(0.3), None)
    assert meter.close() == Pace(1.0, 5.0, pytest.approx(0.3), None)
    step(clock, stats, seconds=10.0, samples=1)
    assert meter.step(5) == Pace(0.1, 0.5, 0.0, None)
    assert meter.total() == Pace(0.55, 2.75, pytest.approx(0.15), None)


def test_a_window_without_time_has_no_rates_that_break_a_report() -> None:
    assert StepMeter(StreamStats(), clock=ManualClock()).close() == Pace(0.0, 0.0, 0.0, None)


def test_the_queue_is_asked_for_room_at_most_once_a_second() -> None:
    clock, stats, queue = ManualClock(), StreamStats(), Queue()
    meter = StepMeter(stats, has_room=queue.has_room, clock=clock)
    for _ in range(100):  # 25 seconds
        step(clock, stats, seconds=0.25)
        meter.step(1)
    assert queue.asked == 25


def test_the_share_of_waiting_for_room_is_that_of_the_looks_at_a_full_queue() -> None:
    clock, stats, queue = ManualClock(), StreamStats(), Queue()
    meter = StepMeter(stats, has_room=queue.has_room, clock=clock)
    for room in (True, False, False, False):
        queue.room = room
        step(clock, stats, seconds=2.0)
        pace = meter.step(1)
    assert pace.room_wait == 0.75
    meter.close()
    step(clock, stats, seconds=0.5)
    assert meter.step(1).room_wait is None, "nobody has looked in this window"
    assert meter.total().room_wait == 0.75


def test_a_queue_out_of_reach_stops_no_training_and_counts_as_no_look() -> None:
    clock, stats, queue = ManualClock(), StreamStats(), Queue()
    meter = StepMeter(stats, has_room=queue.has_room, clock=clock)
    queue.room, queue.is_away = False, True
    step(clock, stats, seconds=2.0)
    assert meter.step(1).room_wait is None
    queue.is_away = False
    step(clock, stats, seconds=2.0)
    assert meter.step(1).room_wait == 1.0


def test_the_line_says_what_waits_for_what() -> None:
    assert str(Pace(2.0, 1500.4, 0.034, 0.8)) == (
        "trainer waits for data: 3%, producers wait for room: 80% (2.0 samples/s, 1500 tokens/s)"
    )
    assert str(Pace(2.0, 10.0, 1.0, None)) == "trainer waits for data: 100% (2.0 samples/s, 10 tokens/s)"
