"""Tells a store that is away from items that fail: an outage must not use up their attempts."""

from eaglefeed.clock import Clock
from eaglefeed.errors import EaglefeedError, PeerGone, SampleMissing, StorageError
from eaglefeed.logs import get_logger

__all__ = ["StoreOutage", "is_of_store"]

_ITEMS = 3

log = get_logger(__name__)


def is_of_store(error: EaglefeedError) -> bool:
    """Whether an error may be the store's and no sample's."""
    return isinstance(error, StorageError) and error.retryable and not isinstance(error, SampleMissing | PeerGone)


class StoreOutage:
    """Takes a store to be away after such errors on three items with no success between, until one succeeds.

    Args:
        clock: measures for how long.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: set[str] = set()
        self._since_s: float | None = None

    def note(self, item_id: str, reason: str) -> float | None:
        """An item failed; for how long the store has been away, None while it is not taken to be."""
        self._failed.add(item_id)
        if self._since_s is None and len(self._failed) < _ITEMS:
            return None
        return self.away_s(reason)

    def away_s(self, reason: str) -> float:
        """For how long the store has been away, which it is from now on at the latest."""
        if self._since_s is None:
            self._since_s = self._clock.monotonic()
            log.error("store_away", reason=reason)
        return self._clock.monotonic() - self._since_s

    def answered(self) -> None:
        """An item was read or written."""
        if self._since_s is not None:
            log.warning("store_back", away_s=self._clock.monotonic() - self._since_s)
        self._since_s = None
        self._failed.clear()
