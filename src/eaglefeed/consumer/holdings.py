"""A stream's samples, what became of them, and how an outage of their queue is borne."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from eaglefeed.clock import Clock
from eaglefeed.errors import QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.refs import SampleRef

__all__ = ["LeaseTerms", "Sample", "StreamStats", "bear_outage"]

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0

T = TypeVar("T")

log = get_logger(__name__)


@dataclass
class StreamStats:
    """What became of every sample that a stream leased; `gone` are those whose producer did not answer any more."""

    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    stale: int = 0
    dead: int = 0
    retried: int = 0
    gone: int = 0
    returned: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """How a trainer leases, and what becomes of it; SampleStream explains each."""

    visibility_timeout_s: float
    stall_timeout_s: float
    max_lease_age_s: float
    max_attempts: int
    retain: bool
    fail_without_producers: bool
    producer_grace_s: float
    outage_s: float


class Sample(NamedTuple):
    """A materialized sample and the lease it is held by."""

    token: int
    ref: SampleRef
    batch: Eagle3TargetBatch
    delivery_count: int


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
