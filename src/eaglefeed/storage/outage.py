"""When a store counts as away: whoever goes on to the next shard after an error would wait for each of a thousand."""

from collections.abc import Iterator
from contextlib import contextmanager

from eaglefeed.clock import Clock
from eaglefeed.errors import SampleCorrupt, SampleMissing, StorageError

__all__ = ["Outage"]

_ERRORS, _TOOK_S = 3, 5.0


class Outage:
    """Errors of a store in a row.

    Quick ones are of the shards, such as those of another user, and keep nobody from the next shard.

    Args:
        clock: what is waited for an error is measured by.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits_s: list[float] = []

    @property
    def is_away(self) -> bool:
        """Whether three calls in a row failed, and took 5 s or more together."""
        return len(self._waits_s) >= _ERRORS and sum(self._waits_s) >= _TOOK_S

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around one call of the store; its errors pass."""
        started_s = self._clock.monotonic()
        try:
            yield
        except (SampleCorrupt, SampleMissing):  # the store's answer
            self._waits_s.clear()
            raise
        except StorageError:
            self._waits_s.append(self._clock.monotonic() - started_s)
            raise
        self._waits_s.clear()
