"""A wait that tells of itself: what says nothing for long looks like what hangs."""

from eaglefeed.clock import Clock

__all__ = ["Waiting"]

_EVERY_S = 60.0


class Waiting:
    """A wait, from now on.

    Args:
        clock: measures it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = self._told_s = clock.monotonic()

    @property
    def waited_s(self) -> int:
        """Since its beginning."""
        return round(self._clock.monotonic() - self._began_s)

    def is_due(self) -> bool:
        """Whether to tell of it again: once a minute."""
        now_s = self._clock.monotonic()
        if now_s - self._told_s < _EVERY_S:
            return False
        self._told_s = now_s
        return True
