"""How a training bears that no target server answers for a while, as when its only one restarts."""

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.schema.batch import BatchHandle, Eagle3TargetBatch

__all__ = ["Postponed", "TargetOutage", "bear_target_outage"]

_FIRST_BACKOFF_S, _MAX_BACKOFF_S, _POLL_S = 0.25, 5.0, 0.5

T = TypeVar("T")

log = get_logger(__name__)


class TargetOutage:
    """From the first failure until the next answer; logs when it begins and when it is over.

    Args:
        outage_s: how long it may last.
        clock: measures it.
    """

    def __init__(self, outage_s: float, clock: Clock) -> None:
        self._outage_s, self._clock = outage_s, clock
        self._began_s: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self.retry_at_s = 0.0
        self.num_over = 0

    def failed(self, error: TargetUnavailable) -> None:
        """No server answered: `retry_at_s` says when to ask again.

        Raises:
            TargetUnavailable: `error`, where it has lasted for `outage_s`.
        """
        now_s = self._clock.monotonic()
        began_s = now_s if self._began_s is None else self._began_s
        left_s = began_s + self._outage_s - now_s
        if left_s <= 0:
            raise error
        if self._began_s is None:
            self._began_s, self._backoff_s = now_s, _FIRST_BACKOFF_S
            log.warning("target_out", reason=str(error), patience_s=self._outage_s)
        # At least half: each attempt retries by itself before it fails.
        wait_s = random.uniform(self._backoff_s / 2, self._backoff_s)  # noqa: S311  jitter, not a secret
        self.retry_at_s = now_s + min(wait_s, left_s)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def answered(self) -> None:
        """A server answered: if there was an outage, it is over."""
        if self._began_s is not None:
            log.info("target_back", away_s=round(self._clock.monotonic() - self._began_s, 3))
            self._began_s = None
            self.num_over += 1


class Postponed:
    """The handle of a request that is made at `at_s`, by whoever waits for it then."""

    def __init__(self, ask: Callable[[], BatchHandle], at_s: float, clock: Clock) -> None:
        self._ask, self._at_s, self._clock = ask, at_s, clock
        self._handle: BatchHandle | None = None

    def result(self, timeout: float | None = None) -> Eagle3TargetBatch:
        """Wait for it; raises what the request's own handle does."""
        if self._handle is None:
            left_s = max(0.0, self._at_s - self._clock.monotonic())
            if timeout is not None and timeout < left_s:
                self._clock.sleep(timeout)
                raise TimeoutError
            self._clock.sleep(left_s)
            self._handle, timeout = self._ask(), None if timeout is None else timeout - left_s
        return self._handle.result(timeout)

    def cancel(self) -> bool:
        """Give it up."""
        return self._handle is None or self._handle.cancel()


def bear_target_outage(
    call: Callable[[], T], *, outage_s: float, stop: threading.Event, clock: Clock = SYSTEM_CLOCK
) -> T:
    """Call until a target server answers, with a jittered backoff of up to 5 s, for at most `outage_s`.

    Raises:
        TargetUnavailable: none answered in that time, or `stop` was set meanwhile.
    """
    outage = TargetOutage(outage_s, clock)
    while True:
        try:
            answer = call()
        except TargetUnavailable as error:
            if stop.is_set():
                raise
            outage.failed(error)
            while (left_s := outage.retry_at_s - clock.monotonic()) > 0:
                if stop.is_set():
                    raise
                clock.sleep(min(left_s, _POLL_S))
        else:
            outage.answered()
            return answer
