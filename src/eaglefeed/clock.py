"""Time that tests can turn by hand."""

import threading
import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Where a component takes its time from."""

    def time(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class SystemClock:
    """The machine's clock."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        time.sleep(seconds)


class ManualClock:
    """A clock that stands still until `advance` turns it; `sleep` turns it too."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._now_s

    def monotonic(self) -> float:
        """The same as `time`."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Turn the clock by `seconds` and return at once."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Turn the clock forward."""
        with self._lock:
            self._now_s += seconds


SYSTEM_CLOCK = SystemClock()
