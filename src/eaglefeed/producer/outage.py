"""Tells a store that is away from prompts that fail: an outage must not use up the attempts of a run's prompts."""

from collections.abc import Callable
from typing import TypeVar

from eaglefeed.clock import Clock
from eaglefeed.errors import IdConflict, StaleLease, StorageError, StoreFull
from eaglefeed.storage.away import StoreOutage

__all__ = ["StoreAway", "StoreWatch"]

T = TypeVar("T")


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
    """Tells errors of a producer's store from those of its items.

    Args:
        clock: measures for how long the store is away.
    """

    def __init__(self, clock: Clock) -> None:
        self._outage = StoreOutage(clock)

    def put(self, item_id: str, step: Callable[[], T]) -> T:
        """The result of an item's put and hand-off; its errors pass.

        Raises:
            StoreAway: it failed, and the store is taken to be away.
        """
        try:
            result = step()
        except (StaleLease, IdConflict, StoreFull):  # the store answered: these come after a put, or are its word
            self._outage.answered()
            raise
        except StorageError as error:
            away_s = self._outage.note(item_id, str(error)) if error.retryable else None
            if away_s is None:
                raise
            raise StoreAway(error, away_s) from None
        self._outage.answered()
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
            raise StoreAway(error, self._outage.away_s(str(error))) from None
