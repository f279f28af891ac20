"""Producers that do not answer: how long refs to them wait, and when that is told."""

from itertools import pairwise

import pytest
import structlog

from eaglefeed.clock import ManualClock
from eaglefeed.consumer.gone import GoneProducers
from eaglefeed.errors import PeerGone
from eaglefeed.storage.options import PeerOptions
from eaglefeed.storage.peers import Peers

HERE, THERE = "nccl://here:1/0123456789abcdef", "nccl://there:1/0123456789abcdef"
ERROR = PeerGone("no answer to /health (Connection refused)")


def _silent_for(gone: GoneProducers, clock: ManualClock, seconds: float) -> float:
    """A ref comes back every 5 s; how long the last one is to wait."""
    delay_s = gone.note(HERE, ERROR, 5)
    for _ in range(int(seconds / 5)):
        clock.advance(5)
        delay_s = gone.note(HERE, ERROR, 5)
        gone.tell(HERE)
    return delay_s


def test_refs_wait_longer_the_longer_their_producer_is_silent_and_a_minute_at_most() -> None:
    clock = ManualClock()
    gone = GoneProducers(grace_s=1e9, fails=False, clock=clock)
    assert [_silent_for(gone, clock, seconds) for seconds in (0, 20, 20, 60, 1000)] == [5, 5, 10, 25, 60]
    assert gone.note(THERE, ERROR, 5) == 5
    gone.answered(HERE)
    assert gone.note(HERE, ERROR, 5) == 5


def test_a_silence_that_is_forgotten_begins_anew() -> None:
    clock = ManualClock()
    gone = GoneProducers(grace_s=60, fails=True, clock=clock)
    _silent_for(gone, clock, 50)
    clock.advance(301)
    assert gone.note(HERE, ERROR, 5) == 5
    gone.tell(HERE)


def test_a_producer_that_lives_and_stays_out_of_reach_is_told_once_a_minute() -> None:
    clock = ManualClock()
    gone = GoneProducers(grace_s=60, fails=False, clock=clock)
    with structlog.testing.capture_logs() as logs:
        _silent_for(gone, clock, 55)
        assert [(entry["event"], entry["log_level"]) for entry in logs] == [("peer_gone", "warning")]  # not each ref
        _silent_for(gone, clock, 125)
    assert [(entry["event"], entry["log_level"]) for entry in logs[1:]] == [("producer_unreachable", "error")] * 3
    assert "nccl://here:1" in logs[1]["reason"]
    assert "check that its host, port" in logs[1]["reason"]


def test_it_ends_the_stream_where_that_is_wanted() -> None:
    clock = ManualClock()
    gone = GoneProducers(grace_s=60, fails=True, clock=clock)
    with pytest.raises(PeerGone, match="no answer for 60 s"):
        _silent_for(gone, clock, 65)


def test_a_producer_that_costs_a_whole_timeout_is_left_alone_for_three_times_as_long() -> None:
    """Or whoever pulls would spend most of its time on it while others have samples."""
    clock, asked = ManualClock(), list[float]()

    def time_out(_peer: object) -> None:
        asked.append(clock.monotonic())
        clock.advance(10)
        raise PeerGone("timed out")

    peers = Peers(PeerOptions(), clock)
    for _ in range(100):
        with pytest.raises(PeerGone):
            peers.ask(HERE, time_out)
        clock.advance(1)
    assert {later - sooner for sooner, later in pairwise(asked)} == {40.0}
