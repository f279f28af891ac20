"""Keeps leases alive for as long as their holder makes progress, and no longer."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError, StaleLease
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.rules import WORKER_GRACE_S

__all__ = ["LeaseRenewer"]

_log = get_logger(__name__)


@dataclass
class _Watched:
    """A lease: since when it is held, when it was last renewed, and when its next renewal is due."""

    since_s: float
    renewed_s: float
    due_s: float
    too_old: bool = False


class LeaseRenewer:
    """A thread that renews leases at a third of their visibility timeout, or sooner, so that it shows signs of life.

    It stops renewing while the consumer is stalled, so that the work of a hung consumer goes to another one, and for
    good when a lease is too old. An outage of the server is waited out: until somebody reclaims it, a lease can be
    renewed.

    Args:
        queue: where the leases are from.
        visibility_timeout_s: what they were leased with.
        stall_timeout_s: without `progress()` for so long, the consumer counts as stalled.
        max_lease_age_s: a lease is not renewed beyond this age.
        on_lost: called with the token of a lease that somebody else has now, on the renewer's thread.
        on_renewed: called after each renewal, on that thread; a worker shows its sign of life by it.
        clock: tests turn it, and call `tick` instead of `start`.
    """

    def __init__(
        self,
        queue: LeaseQueue,
        *,
        visibility_timeout_s: float,
        stall_timeout_s: float = 600.0,
        max_lease_age_s: float = 1800.0,
        on_lost: Callable[[int], None] | None = None,
        on_renewed: Callable[[], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._queue, self._visibility_timeout_s, self._clock = queue, visibility_timeout_s, clock
        self._stall_timeout_s, self._max_lease_age_s = stall_timeout_s, max_lease_age_s
        self._on_lost = on_lost or (lambda _token: None)
        self._on_renewed = on_renewed or (lambda: None)
        self._interval_s = min(visibility_timeout_s, 2 * WORKER_GRACE_S) / 3
        self._progress_s = clock.monotonic()
        self._stalled = False
        self._watched: dict[int, _Watched] = {}
        self._lost: set[int] = set()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, token: int) -> None:
        """Renew this lease from now on. The first one after an idle time counts as progress."""
        with self._lock:
            now_s = self._clock.monotonic()
            if not self._watched:
                self._progress_s = now_s
            self._watched[token] = _Watched(now_s, now_s, now_s + self._interval_s)

    def forget(self, token: int) -> None:
        """Renew it no more. Call this before the ack or nack of its last item, which ends the lease."""
        with self._lock:
            self._watched.pop(token, None)
            self._lost.discard(token)

    def progress(self) -> None:
        """Say that the consumer did a step."""
        self._progress_s = self._clock.monotonic()

    def is_lost(self, token: int) -> bool:
        """Whether a renewal found that the lease is somebody else's."""
        return token in self._lost

    def is_kept(self, token: int) -> bool:
        """Whether the lease is still renewed: it is neither lost nor too old."""
        lease = self._watched.get(token)
        return lease is not None and not lease.too_old

    def keep_up(self) -> bool:
        """Call this before a lease, which takes back what has run out: our own too, after an outage or a pause.

        Renews what is close to that; False while the consumer is stalled, which is to take nothing.

        Raises:
            QueueUnavailable: the server is out of reach.
        """
        now_s = self._clock.monotonic()
        if self._is_stalled(now_s):
            return False
        with self._lock:
            watched = list(self._watched.items())
        for token, lease in watched:
            if now_s - lease.renewed_s > self._visibility_timeout_s / 2 and not self._is_too_old(token, lease):
                self._renew(token, lease)
        return True

    def tick(self) -> float:
        """Renew what is due; returns the seconds until the next renewal is."""
        now_s = self._clock.monotonic()
        if not self._is_stalled(now_s):
            with self._lock:
                due = [token for token, lease in self._watched.items() if lease.due_s <= now_s and not lease.too_old]
            for token in due:
                self._try(token)
        with self._lock:
            waits_s = [lease.due_s - now_s for lease in self._watched.values() if not lease.too_old]
        return min([self._interval_s, *(wait_s for wait_s in waits_s if wait_s > 0)])

    def _is_stalled(self, now_s: float) -> bool:
        stalled = bool(self._watched) and now_s - self._progress_s > self._stall_timeout_s
        if stalled and not self._stalled:
            _log.warning("consumer_stalled", no_progress_s=now_s - self._progress_s, num_leases=len(self._watched))
        self._stalled = stalled
        return stalled

    def _try(self, token: int) -> None:
        lease = self._watched.get(token)
        if lease is None or self._is_too_old(token, lease):
            return
        try:
            self._renew(token, lease)
        except EaglefeedError as error:
            _log.warning("renewal_failed", lease=token, reason=str(error))
            lease.due_s = self._clock.monotonic() + self._interval_s / 3

    def _renew(self, token: int, lease: _Watched) -> None:
        began_s = self._clock.monotonic()
        try:
            self._queue.renew(token, visibility_timeout_s=self._visibility_timeout_s)
        except StaleLease:
            self._lose(token)
            return
        lease.renewed_s, lease.due_s = began_s, self._clock.monotonic() + self._interval_s
        self._on_renewed()

    def _is_too_old(self, token: int, lease: _Watched) -> bool:
        age_s = self._clock.monotonic() - lease.since_s
        lease.too_old = age_s > self._max_lease_age_s
        if lease.too_old:
            _log.warning("lease_too_old", lease=token, age_s=age_s, max_lease_age_s=self._max_lease_age_s)
        return lease.too_old

    def _lose(self, token: int) -> None:
        with self._lock:
            if self._watched.pop(token, None) is None:
                return
            self._lost.add(token)
        _log.warning("lease_lost", lease=token)
        self._on_lost(token)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name="lease-renewer", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        wait_s = self._interval_s
        while not self._stop.wait(wait_s):
            try:
                wait_s = self.tick()
            except Exception:  # noqa: BLE001 - a dead thread would lose every lease in silence
                _log.exception("renewer_failed")
                wait_s = self._interval_s

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread; False if it is still in a call to the server after `timeout_s`."""
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
