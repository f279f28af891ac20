"""Whether there is room for one more sample: below the queue's watermarks, and in the store itself."""

from contextlib import suppress

from eaglefeed.errors import ConfigError, StorageError, StoreFull
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.storage.base import FeatureStore

__all__ = ["Room"]

_HEADER_BYTES = 4096


class Room:
    """What a producer looks at before it makes a sample.

    Args:
        samples: the queue that it hands them off to.
        store: where it puts them.
    """

    def __init__(self, samples: LeaseQueue, store: FeatureStore) -> None:
        self._samples, self._store = samples, store
        self._missing_bytes = 0

    def is_there(self) -> bool:
        """Whether it is worth making another sample now."""
        return self._samples.has_room() and self._store.wait_for_room(0) and self._fits()

    def is_last(self, num_bytes: int) -> bool:
        """Whether a sample of so many bytes, which is being written, will reach a mark: then it is waited for first.

        So a producer exceeds queue.high_bytes by less than one sample; by less than two in a run with groups, whose
        counts only their trainers see.
        """
        with suppress(ConfigError):
            stats, limits = self._samples.stats(), self._samples.limits()
            return (
                stats.stored_bytes + num_bytes + _HEADER_BYTES >= limits.high_bytes
                or stats.unsettled + stats.dead + 1 >= limits.high_count
            )
        return False

    def was_missing(self, error: StoreFull) -> None:
        """No prompt is leased until its sample would fit; a quota shows in no count, and costs a try now and then."""
        self._missing_bytes = error.num_bytes if error.num_bytes > error.free_bytes else 0

    def _fits(self) -> bool:
        try:
            if self._missing_bytes and self._store.health().free_bytes < self._missing_bytes:
                return False
        except StorageError:  # asked again; whether the store is away for good shows when it is written to
            return False
        self._missing_bytes = 0
        return True
