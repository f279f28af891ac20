"""An outage of every target server: borne for a while, in a stream and at the start of a training."""

import threading
from collections.abc import Callable

import pytest
import structlog

import pipeline
from eaglefeed.clock import ManualClock
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.target_outage import bear_target_outage
from eaglefeed.errors import TargetError, TargetMismatch, TargetUnavailable
from eaglefeed.schema.batch import Eagle3TargetBatch
from echo_servers import EchoServers, first_token

AWAY_S = 60.0


class Outage:
    """Servers that are away for AWAY_S from the third prompt on; what was asked before fails in it too."""

    def __init__(self, away_s: float = AWAY_S) -> None:
        self.servers = EchoServers()
        self.servers.answer = self._answer
        self.clock, self._away_s = self.servers.clock, away_s
        self._asked_out: set[int] = set()
        self.began_s: float | None = None
        self.attempts: list[float] = []

    @property
    def is_on(self) -> bool:
        return self.began_s is not None and self.clock.monotonic() < self.began_s + self._away_s

    def _answer(self, number: int, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
        if first_token(answer) == 3 and self.began_s is None:
            self.began_s = self.clock.monotonic()
            self._asked_out = set(self.servers.under_way)  # all of these fail, whenever they are waited for
        if self.is_on or number in self._asked_out:
            self.attempts.append(self.clock.monotonic())
            raise TargetUnavailable("all servers are out")
        return answer

    def stream(self, *, depth: int, outage_s: float = 120.0) -> BackendStream:
        prompts = [pipeline.prompt(index) for index in range(9)]
        return BackendStream(self.servers, prompts, depth=depth, outage_s=outage_s, clock=self.clock)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_training_outlives_an_outage_with_every_batch_once_and_in_order(depth: int) -> None:
    outage = Outage()
    with structlog.testing.capture_logs() as logs, outage.stream(depth=depth) as stream:
        batches = []
        while not stream.ended:
            batches += stream.take(2)
            stream.ack()
    assert [first_token(batch) for batch in batches] == list(range(1, 10))
    assert [batch.sample_ids for batch in batches] == [(f"p-{index}",) for index in range(9)]
    assert (stream.stats.dead, stream.drained, outage.servers.under_way) == (0, True, set())
    assert [entry["event"] for entry in logs] == ["target_out", "target_back"]
    assert AWAY_S <= logs[1]["away_s"] <= AWAY_S + 5.0


def test_servers_are_asked_at_growing_intervals_of_at_most_five_seconds() -> None:
    outage = Outage()
    with outage.stream(depth=0) as stream:
        stream.take(3)
    gaps = [after - before for before, after in zip(outage.attempts, outage.attempts[1:], strict=False)]
    assert gaps[0] <= 0.25
    assert max(gaps) <= 5.0 + 1e-6
    assert all(gap >= 2.5 - 1e-6 for gap in gaps[5:])
    assert len(outage.attempts) < 35


@pytest.mark.parametrize("depth", [0, 2])
def test_an_outage_that_lasts_too_long_ends_the_training_when_it_said(depth: int) -> None:
    outage = Outage(away_s=1000.0)
    with outage.stream(depth=depth, outage_s=30.0) as stream:
        assert len(stream.take(2)) == 2
        with pytest.raises(TargetUnavailable, match="all servers are out"):
            stream.take(2)
        assert stream.ended
    assert outage.began_s is not None
    assert 30.0 <= outage.clock.monotonic() - outage.began_s < 30.1


def test_two_outages_have_a_patience_each() -> None:
    outage = Outage(away_s=20.0)
    with outage.stream(depth=0, outage_s=30.0) as stream:
        assert len(stream.take(3)) == 3
        outage.began_s = outage.clock.monotonic()
        assert len(stream.take(3)) == 3


def test_a_step_that_does_not_come_in_time_for_an_outage_comes_whole_later() -> None:
    outage = Outage()
    with outage.stream(depth=1) as stream:
        while outage.began_s is None or outage.is_on:
            before_s = outage.clock.monotonic()
            if taken := stream.take(4, wait_s=3.0):
                break
            assert outage.clock.monotonic() - before_s <= 3.0 + 1e-6
        taken = taken or stream.take(4)
        assert [first_token(batch) for batch in taken] == [1, 2, 3, 4]


def test_a_stop_in_an_outage_is_heeded_within_a_second() -> None:
    outage = Outage(away_s=1000.0)
    with outage.stream(depth=1) as stream:
        stop_at_s = outage.clock.monotonic() + 40.0
        advance = outage.clock.advance

        def advance_and_stop(seconds: float) -> None:
            advance(seconds)
            if outage.clock.monotonic() >= stop_at_s:
                stream.stop()

        outage.clock.advance = advance_and_stop  # type: ignore[method-assign]
        assert stream.take(4) == []
        assert outage.clock.monotonic() < stop_at_s + 1.0


def _away_until(clock: ManualClock, at_s: float, error: TargetError) -> Callable[[], str]:
    def call() -> str:
        if clock.monotonic() < at_s:
            raise error
        return "answer"

    return call


def test_a_call_is_made_until_a_server_answers() -> None:
    clock = ManualClock(0.0)
    call = _away_until(clock, 60.0, TargetUnavailable("out"))
    with structlog.testing.capture_logs() as logs:
        assert bear_target_outage(call, outage_s=120.0, stop=threading.Event(), clock=clock) == "answer"
    assert 60.0 <= clock.monotonic() <= 65.0
    assert [entry["event"] for entry in logs] == ["target_out", "target_back"]


def test_a_call_that_is_answered_at_once_says_nothing() -> None:
    with structlog.testing.capture_logs() as logs:
        assert bear_target_outage(lambda: 5, outage_s=0.0, stop=threading.Event(), clock=ManualClock()) == 5
    assert logs == []


def test_a_call_fails_with_the_servers_own_words_when_the_patience_is_over() -> None:
    clock = ManualClock(0.0)
    with pytest.raises(TargetUnavailable, match="out"):
        bear_target_outage(
            _away_until(clock, 999.0, TargetUnavailable("out")), outage_s=30.0, stop=threading.Event(), clock=clock
        )
    assert 30.0 <= clock.monotonic() < 30.1


@pytest.mark.parametrize("error", [TargetMismatch("another"), TargetError("failed")])
def test_what_no_waiting_changes_is_not_waited_for(error: TargetError) -> None:
    clock = ManualClock(0.0)
    with pytest.raises(type(error)):
        bear_target_outage(_away_until(clock, 60.0, error), outage_s=120.0, stop=threading.Event(), clock=clock)
    assert clock.monotonic() == 0.0


def test_a_stop_ends_the_waiting_of_a_call_within_a_second() -> None:
    stop = threading.Event()

    class Stopping(ManualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.monotonic() >= 40.0:
                stop.set()

    clock = Stopping(0.0)
    with pytest.raises(TargetUnavailable):
        bear_target_outage(_away_until(clock, 999.0, TargetUnavailable("out")), outage_s=120.0, stop=stop, clock=clock)
    assert clock.monotonic() < 41.0
