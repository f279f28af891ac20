"""A wait that tells of itself: what says nothing for long looks like what hangs."""

from eaglefeed.clock import Clock
from eaglefeed.logs import get_logger

__all__ = ["Waiting"]

_EVERY_S = 60.0

log = get_logger(__name__)


class Waiting:
    """A wait, from now on.

    Args:
        clock: measures it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = self._told_s = clock.monotonic()

    def tell(self, event: str, **what: object) -> None:
        """Log that it goes on, once a minute."""
        now_s = self._clock.monotonic()
        if now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            log.info(event, waited_s=round(now_s - self._began_s), **what)
