"""What a stream holds: the samples it leased, what became of them, and how an outage of their queue is borne."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from eaglefeed.clock import Clock
from eaglefeed.errors import QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.refs import SampleRef

__all__ = ["Holdings", "Sample", "StreamStats", "bear_outage"]

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0

T = TypeVar("T")

log = get_logger(__name__)


@dataclass
class StreamStats:
    """What became of every sample that a stream leased."""

    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    stale: int = 0
    dead: int = 0
    retried: int = 0
    returned: int = 0
    wait_s: float = 0.0


class Sample(NamedTuple):
    """A materialized sample and the lease it is held by."""

    token: int
    ref: SampleRef
    batch: Eagle3TargetBatch
    delivery_count: int


class Holdings:
    """The ids that this process holds, by lease; a lease is renewed as long as it holds one."""

    def __init__(self, renewer: LeaseRenewer) -> None:
        self._renewer = renewer
        self._ids: dict[int, set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def add(self, token: int, ids: Iterable[str]) -> None:
        """Hold these items of a lease from now on."""
        with self._lock:
            self._ids[token].update(ids)
            self._renewer.add(token)

    def settle(self, token: int, ids: Iterable[str]) -> None:
        """These are no longer held."""
        with self._lock:
            self._ids[token].difference_update(ids)
            if not self._ids[token]:
                del self._ids[token]
                self._renewer.forget(token)

    def drain(self) -> dict[int, list[str]]:
        """Stop holding anything; returns what was held."""
        with self._lock:
            held = {token: sorted(ids) for token, ids in self._ids.items()}
            self._ids.clear()
            for token in held:
                self._renewer.forget(token)
        return held


def bear_outage(call: Callable[[], T], *, outage_s: float, stop: threading.Event, clock: Clock) -> T:
    """Call until the queue answers, with a jittered backoff, for at most `outage_s`.

    Raises:
        QueueUnavailable: it did not answer in that time, or `stop` was set meanwhile.
    """
    deadline_s = clock.monotonic() + outage_s
    backoff_s = _FIRST_BACKOFF_S
    while True:
        try:
            return call()
        except QueueUnavailable as error:
            if clock.monotonic() > deadline_s or stop.is_set():
                raise
            log.warning("queue_unavailable", reason=str(error))
        clock.sleep(random.uniform(0, backoff_s))  # noqa: S311  jitter, not a secret
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
