"""StepMeter: how fast a training goes, and what waits for what."""

from collections.abc import Callable
from typing import NamedTuple

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.errors import QueueUnavailable

__all__ = ["Pace", "StepMeter"]

_SAMPLE_S = 1.0


class Pace(NamedTuple):
    """A stretch of a training.

    Args:
        samples_per_s: samples that the stream delivered; those of all ranks where it counts them.
        tokens_per_s: real tokens, padding left out.
        data_wait: share of the time that this process waited for samples: more producers would help.
        room_wait: share of the looks at the queue that found it full, when producers wait for trainers: more ranks
            would help. None where nobody looked, or there is no queue.
    """

    samples_per_s: float
    tokens_per_s: float
    data_wait: float
    room_wait: float | None

    def rounded(self) -> dict[str, float]:
        """What is known, by name, for people and files."""
        return {name: round(value, 4) for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        waits = f"trainer waits for data: {self.data_wait:.0%}"
        if self.room_wait is not None:
            waits += f", producers wait for room: {self.room_wait:.0%}"
        return f"{waits} ({self.samples_per_s:.1f} samples/s, {self.tokens_per_s:.0f} tokens/s)"


class _Mark(NamedTuple):
    """Running totals at one moment; a pace is the difference of two."""

    at_s: float
    samples: int
    tokens: int
    wait_s: float
    looks: int
    full: int

    def to(self, end: "_Mark") -> Pace:
        at_s, samples, tokens, wait_s, looks, full = (b - a for a, b in zip(self, end, strict=True))
        seconds = max(at_s, 1e-9)
        room_wait = full / looks if looks else None
        return Pace(samples / seconds, tokens / seconds, min(1.0, wait_s / seconds), room_wait)


class StepMeter:
    """Measures a training from step to step, in windows that `close` ends.

    Args:
        stats: the stream's, in which the trainer's waits for data are counted.
        has_room: the queue's, asked at most once a second, at a step's end; None where there is no queue.
        clock: what time is measured with.
    """

    def __init__(
        self, stats: StreamStats, *, has_room: Callable[[], bool] | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._stats, self._has_room, self._clock = stats, has_room, clock
        self._tokens = self._looks = self._full = 0
        self._looked_s = clock.monotonic() - _SAMPLE_S
        self._first = self._window = self._now()

    def step(self, num_tokens: int) -> Pace:
        """A step on so many tokens has ended; returns the window's pace so far."""
        self._tokens += num_tokens
        self._look()
        return self._window.to(self._now())

    def close(self) -> Pace:
        """The window's pace; a new one begins."""
        ended, self._window = self._window, self._now()
        return ended.to(self._window)

    def total(self) -> Pace:
        """The pace since the meter was made."""
        return self._first.to(self._now())

    def _now(self) -> _Mark:
        at_s, stats = self._clock.monotonic(), self._stats
        return _Mark(at_s, stats.delivered, self._tokens, stats.wait_s, self._looks, self._full)

    def _look(self) -> None:
        now_s = self._clock.monotonic()
        if self._has_room is None or now_s - self._looked_s < _SAMPLE_S:
            return
        self._looked_s = now_s
        try:
            self._full += not self._has_room()
        except QueueUnavailable:
            return  # the stream bears outages, and says so
        self._looks += 1
