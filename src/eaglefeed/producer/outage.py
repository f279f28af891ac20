"""Tells a store that is away from prompts that fail: an outage must not use up the attempts of a run's prompts."""

from collections.abc import Callable
from typing import TypeVar

from eaglefeed.clock import Clock
from eaglefeed.errors import IdConflict, StaleLease, StorageError, StoreFull
from eaglefeed.logs import get_logger

__all__ = ["StoreAway", "StoreWatch"]

T = TypeVar("T")

_ITEMS = 3

log = get_logger(__name__)


class StoreAway(Exception):
    """The store is taken to be away: the item is to be given back uncounted. It never leaves the producer.

    Args:
        error: the store's.
        away_s: for how long it has been.
    """

    def __init__(self, error: StorageError, away_s: float) -> None:
        self.error, self.away_s = error, away_s
        super().__init__(error, away_s)


class StoreWatch:
    """Takes a store to be away after retryable errors on three items with no success between, until a put succeeds.

    Args:
        clock: measures for how long.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: set[str] = set()
        self._since_s: float | None = None

    def put(self, item_id: str, step: Callable[[], T]) -> T:
        """The result of an item's put and hand-off; its errors pass.

        Raises:
            StoreAway: it failed, and the store is taken to be away.
        """
        try:
            result = step()
        except (StaleLease, IdConflict, StoreFull):  # the store answered: these come after a put, or are its word
            self._answered()
            raise
        except StorageError as error:
            if not error.retryable:
                raise
            if self._since_s is None:
                self._failed.add(item_id)
                if len(self._failed) < _ITEMS:
                    raise
            raise self._away(error) from None
        self._answered()
        return result

    def document(self, step: Callable[[], T]) -> T:
        """The result of a step whose only retryable storage errors are of the run's own files, never the prompt's.

        Raises:
            StoreAway: such an error.
        """
        try:
            return step()
        except StorageError as error:
            if isinstance(error, StoreFull) or not error.retryable:
                raise
            raise self._away(error) from None

    def _away(self, error: StorageError) -> StoreAway:
        if self._since_s is None:
            self._since_s = self._clock.monotonic()
            log.error("store_away", reason=str(error))
        return StoreAway(error, self._clock.monotonic() - self._since_s)

    def _answered(self) -> None:
        if self._since_s is not None:
            log.warning("store_back", away_s=self._clock.monotonic() - self._since_s)
        self._since_s = None
        self._failed.clear()
