"""The lease queue's interface: who works on what, and for how long.

An item is an id with a payload. It is ready, delayed, leased, done or dead, and always exactly one of these:

    put ─▶ ready ─lease─▶ leased ─ack────────────────▶ done
             ▲              │ ├─nack(retryable)─▶ delayed ─▶ ready
             │              │ └─nack(final)──────▶ dead ─requeue─▶ ready
             └──deadline────┘   (a lone crash too many ─▶ dead)

A lease is a set of items with one token and one deadline; its token fences every later call. Time is the server's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "MAX_BATCH",
    "AckResult",
    "DeadLetter",
    "DrainState",
    "Lease",
    "LeaseQueue",
    "LeasedItem",
    "NoLease",
    "PutResult",
    "QueueItem",
    "QueueLimits",
    "QueueStats",
]

MAX_BATCH = 1000
"""Items a call may name; larger sequences are split by the queue itself where that is safe (put)."""


class QueueItem(NamedTuple):
    """One item to put.

    `payload` is what workers get; `stored_bytes` what its sample takes in the store (0 for prompts).
    """

    id: str
    payload: bytes
    stored_bytes: int = 0


class PutResult(NamedTuple):
    """What became of a put: new ids, ids that were known (ready, leased, done or dead), and refs now unsettled."""

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
    DRAINED = "drained"
    """Closed, and nothing is ready, delayed or leased."""


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
        max_depth: hard cap on unsettled items; a put over it is QueueFull. A hand-off is never refused.
        high_count: at this many unsettled items the queue has no room,
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
    """Exact counts, read in O(1)."""

    name: str
    ready: int
    delayed: int
    leased: int
    done: int
    dead: int
    redelivered: int
    stored_bytes: int
    closed: bool
    full: bool
    workers: dict[str, int] = field(default_factory=dict)
    """Role ("producer", "trainer") → workers of the run that showed a sign of life within the grace period."""

    @property
    def unsettled(self) -> int:
        """Items that still need work."""
        return self.ready + self.delayed + self.leased

    @property
    def drained(self) -> bool:
        """Closed, and nothing needs work any more."""
        return self.closed and self.unsettled == 0


class LeaseQueue(ABC):
    """One queue of a run. Every method raises QueueUnavailable when the server is out of reach."""

    namespace: str
    name: str

    @abstractmethod
    def configure(self, limits: QueueLimits) -> None:
        """Store the queue's limits; a queue that nobody configured has QueueLimits()'s."""

    @abstractmethod
    def put(self, items: Sequence[QueueItem]) -> PutResult:
        """Add items at the tail, in order; known ids are counted as duplicates and left as they are.

        Safe to repeat after a lost reply.

        Raises:
            IdConflict: an id is known with another payload; nothing of its chunk was added.
            QueueFull: over the hard cap; nothing of its chunk was added.
            QueueClosed: new ids for a closed queue.
        """

    @abstractmethod
    def lease(self, n: int, *, visibility_timeout_s: float, consumer: str, wait_s: float = 0.0) -> Lease | NoLease:
        """Take up to `n` ready items (1 to MAX_BATCH) from the head, and wait up to `wait_s` for the first.

        Reclaims expired leases and promotes due delayed items on the way, a bounded number each call. An item with a
        crash behind it is leased alone.
        """

    @abstractmethod
    def renew(self, token: int, *, visibility_timeout_s: float) -> int:
        """Move the lease's deadline to now + `visibility_timeout_s` and return it, in server ms. O(1).

        Raises:
            StaleLease: the lease is gone.
        """

    @abstractmethod
    def ack(self, token: int, ids: Sequence[str], *, step: int = 0) -> AckResult:
        """Settle items as done. An id whose lease was reclaimed is stale, also when it is done by now."""

    @abstractmethod
    def nack(
        self, token: int, ids: Sequence[str], *, reason: str, retryable: bool = True, delay_s: float | None = None
    ) -> AckResult:
        """Give items back.

        Args:
            token: the lease.
            ids: the items.
            reason: why, kept with the item.
            retryable: False makes them dead letters at once.
            delay_s: 0 puts them back to the head of the ready items without counting anything against them (a
                graceful return); None delays them by the backoff of their delivery count.
        """

    @abstractmethod
    def handoff(self, token: int, prompt_id: str, item: QueueItem, samples: "LeaseQueue") -> None:
        """Put `item` into `samples` and settle the prompt, in one step, fenced by the prompt's lease.

        Never refused for room, nor because `samples` is closed. Safe to repeat after a lost reply: a sample that is
        there with the same payload is a success. `samples` is a queue of the same namespace and kind.

        Raises:
            StaleLease: the prompt is not this lease's any more; the caller deletes its own shard.
            IdConflict: `samples` has that id with another payload; nothing was changed.
        """

    @abstractmethod
    def has_room(self) -> bool:
        """Whether producers may lease another prompt: by count and stored bytes, with hysteresis."""

    @abstractmethod
    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until there is room, at most `timeout_s`."""

    @abstractmethod
    def beat(self, role: str, worker: str) -> None:
        """Show a sign of life as `role` ("producer" or "trainer"); shared by all queues of the namespace."""

    @abstractmethod
    def farewell(self, role: str, worker: str) -> None:
        """Take the sign of life back at a clean end."""

    @abstractmethod
    def close(self) -> None:
        """Take no new ids from now on. Safe to repeat."""

    @abstractmethod
    def stats(self) -> QueueStats:
        """Exact counts, in O(1)."""

    @abstractmethod
    def dead_letters(self) -> Iterator[DeadLetter]:
        """Every dead letter, read in bounded steps."""

    @abstractmethod
    def requeue(self, ids: Sequence[str]) -> int:
        """Make dead letters ready again, with a clean count, also in a closed queue; returns how many."""

    @abstractmethod
    def payloads(self) -> Iterator[LeasedItem]:
        """Every unsettled item (ready, delayed or leased), in put order, read in bounded steps.

        A delivery_count of 0 means that it was never leased.
        """

    @abstractmethod
    def purge(self) -> int:
        """Delete the queue and all that it knows; returns how many items it held unsettled or dead."""
