"""What goes into a lease queue and comes out of it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "MAIN_GROUP",
    "MAX_BATCH",
    "AckResult",
    "DeadLetter",
    "DrainState",
    "Lease",
    "LeasedItem",
    "NoLease",
    "PutResult",
    "QueueItem",
    "QueueLimits",
    "QueueStats",
]

MAX_BATCH = 1000
"""Items a call may name; larger sequences are split by the queue itself where that is safe (put)."""
MAIN_GROUP = "main"
"""The one group of a queue that declares none."""


class QueueItem(NamedTuple):
    """One item to put.

    `payload` is what workers get; `stored_bytes` what its sample takes in the store (0 for prompts).
    """

    id: str
    payload: bytes
    stored_bytes: int = 0


class PutResult(NamedTuple):
    """What became of a put: new ids, ids that were known (also done or dead ones), and items now not released."""

    accepted: int
    duplicate: int
    depth: int


class LeasedItem(NamedTuple):
    """One item of a lease; `delivery_count` counts from 1."""

    id: str
    payload: bytes
    delivery_count: int


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Items that are yours until `deadline_ms` (server time); renew it in good time."""

    token: int
    deadline_ms: int
    items: tuple[LeasedItem, ...]


class DrainState(StrEnum):
    """Why there was nothing to lease."""

    EMPTY = "empty"
    """Nothing is ready, more may come."""
    COMMIT_DUE = "commit_due"
    """The queue has no room, nothing is ready and acks of this group wait for a commit: checkpoint and commit now."""
    DRAINED = "drained"
    """Closed, and nothing is ready, delayed or leased. Tentative acks may still wait for their commit."""


class NoLease(NamedTuple):
    """Nothing to lease; `next_ms` is the server time at which a delayed or leased item may be, 0 if there is none."""

    state: DrainState
    next_ms: int


class AckResult(NamedTuple):
    """Ids that this call settled, and ids that the lease did not hold any more."""

    ok: tuple[str, ...]
    stale: tuple[str, ...]


class DeadLetter(NamedTuple):
    """An item that was set aside."""

    id: str
    reason: str
    delivery_count: int
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Bounds of a queue, stored with it by whoever configures it.

    Args:
        max_depth: hard cap on items that are not released; a put over it is QueueFull. A hand-off is never refused.
        high_count: at this many items that are not released the queue has no room,
        low_count: and has again at this many.
        high_bytes: the same by stored bytes,
        low_bytes: and its low mark.
        max_deliveries: lone crashes (leased alone, and the lease ran out) before an item is a dead letter.
        backoff_base_s: delay after the first nack; doubles with each delivery, with jitter,
        backoff_max_s: up to this.
    """

    max_depth: int = 1_000_000
    high_count: int = 100_000
    low_count: int = 50_000
    high_bytes: int = 64 * 2**30
    low_bytes: int = 48 * 2**30
    max_deliveries: int = 5
    backoff_base_s: float = 1.0
    backoff_max_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class QueueStats:
    """Exact counts of a queue as one group sees it, read in O(1).

    `tentative` acks wait for a commit; `held` prompts and `parked` samples belong to tensors that stay with their
    producer; `released` samples wait for the deletion of their shards; `stored_bytes` are those of all that is not
    released. `oldest_ready_s` is how long ago the item that is leased next was put; 0.0 where none is ready.
    """

    name: str
    group: str
    ready: int
    delayed: int
    leased: int
    tentative: int
    held: int
    parked: int
    done: int
    dead: int
    released: int
    redelivered: int
    session: int
    committed_step: int
    stored_bytes: int
    closed: bool
    full: bool
    oldest_ready_s: float = 0.0
    workers: dict[str, int] = field(default_factory=dict)
    """Role ("producer", "trainer") → workers of the run that showed a sign of life within the grace period."""

    @property
    def unsettled(self) -> int:
        """Items that are neither done nor dead."""
        return self.ready + self.delayed + self.leased + self.tentative + self.held + self.parked

    @property
    def drained(self) -> bool:
        """Closed, and nothing is left to lease."""
        return self.closed and self.ready + self.delayed + self.leased == 0
