"""One queue's state in memory, and the transitions that the Redis scripts make."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from eaglefeed.queue import rules
from eaglefeed.queue.base import AckResult, LeasedItem, QueueItem, QueueLimits

__all__ = ["Held", "Item", "State"]


@dataclass
class Item:
    """An item that is not done.

    `crashes` is None until one of its leases ran out, then counts the lone ones; `token` is None unless it is leased.
    """

    id: str
    payload: bytes
    stored_bytes: int
    seq: int
    deliveries: int = 0
    crashes: int | None = None
    error: str = ""
    token: int | None = None


@dataclass
class Held:
    """A lease: when it runs out, the ids it was given, and how many of them are not settled."""

    deadline_ms: int
    ids: list[str]
    open: int


@dataclass
class State:
    """All that is known of one queue; `items` holds what is not done, `known` the digest of all that was put."""

    limits: QueueLimits = QueueLimits()  # noqa: RUF009 - it is frozen
    items: dict[str, Item] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    ready: deque[str] = field(default_factory=deque)
    delayed: dict[str, int] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    seq: int = 0
    token: int = 0
    redelivered: int = 0
    stored: int = 0
    closed: bool = False
    full: bool = False

    @property
    def depth(self) -> int:
        """Items that still need work."""
        return len(self.items) - len(self.dead)

    def next_seq(self) -> int:
        """The next place in put order."""
        self.seq += 1
        return self.seq

    def add(self, item: QueueItem) -> None:
        """Put a new item at the tail."""
        self.known[item.id] = rules.digest(item.payload)
        self.items[item.id] = Item(item.id, item.payload, item.stored_bytes, self.next_seq())
        self.ready.append(item.id)
        self.stored += item.stored_bytes

    def grant(self, n: int, now_ms: int, timeout_ms: int) -> list[LeasedItem]:
        """Lease up to `n` items of the head under the next token."""
        ids = self._head(n)
        if ids:
            self.token = max(self.token + 1, now_ms * 1000)
            self.leases[self.token] = Held(now_ms + timeout_ms, ids, len(ids))
        return [self._deliver(item_id) for item_id in ids]

    def _deliver(self, item_id: str) -> LeasedItem:
        item = self.items[item_id]
        item.token = self.token
        item.deliveries += 1
        self.redelivered += item.deliveries > 1
        return LeasedItem(item_id, item.payload, item.deliveries)

    def _head(self, n: int) -> list[str]:
        """Pop up to `n` ready ids; one with a crash behind it goes alone."""
        ids: list[str] = []
        while self.ready and len(ids) < n:
            suspect = self.items[self.ready[0]].crashes is not None
            if suspect and ids:
                break
            ids.append(self.ready.popleft())
            if suspect:
                break
        return ids

    def take(self, token: int, ids: Sequence[str]) -> tuple[list[Item], AckResult]:
        """Take items out of a lease; an id that is not in it (any more) is stale."""
        taken, stale = [], []
        for item_id in ids:
            item = self.items.get(item_id)
            if item is None or item.token != token:
                stale.append(item_id)
                continue
            item.token = None
            taken.append(item)
        if taken:
            held = self.leases[token]
            held.open -= len(taken)
            if not held.open:
                del self.leases[token]
        return taken, AckResult(tuple(item.id for item in taken), tuple(stale))

    def settle(self, item: Item) -> None:
        """Forget a done item but for its digest."""
        del self.items[item.id]
        self.stored -= item.stored_bytes

    def bury(self, item: Item, reason: str) -> None:
        """Make an item a dead letter."""
        self.dead[item.id] = reason
        self.stored -= item.stored_bytes

    def revive(self, item: Item) -> None:
        """Put a dead letter at the tail, with a clean count."""
        del self.dead[item.id]
        item.seq, item.deliveries, item.crashes, item.error = self.next_seq(), 0, None, ""
        self.ready.append(item.id)
        self.stored += item.stored_bytes

    def give_back(self, items: Sequence[Item]) -> None:
        """Put items to the head, in their order, as if they had not been leased."""
        for item in items:
            item.deliveries -= 1
        self.ready.extendleft(item.id for item in reversed(items))

    def reclaim(self, now_ms: int) -> None:
        """Put the items of leases that ran out to the head, or bury those that crashed alone too often."""
        expired = sorted((held.deadline_ms, token) for token, held in self.leases.items() if held.deadline_ms <= now_ms)
        back: list[str] = []
        for _, token in expired:
            held = self.leases.pop(token)
            lone = len(held.ids) == 1
            for item in [self.items[i] for i in held.ids if i in self.items and self.items[i].token == token]:
                item.token = None
                item.crashes = (item.crashes or 0) + lone
                if item.crashes >= self.limits.max_deliveries:
                    self.bury(item, rules.crash_reason(item.crashes, item.error))
                else:
                    back.append(item.id)
        self.ready.extendleft(reversed(back))
        self.update_room()

    def promote(self, now_ms: int) -> None:
        """Put delayed items whose time has come to the tail."""
        due = sorted((at_ms, item_id.encode(), item_id) for item_id, at_ms in self.delayed.items() if at_ms <= now_ms)
        for _, _, item_id in due:
            del self.delayed[item_id]
            self.ready.append(item_id)

    def next_ms(self) -> int:
        """When the next delayed or leased item may be ready; 0 if there is none."""
        return min([*self.delayed.values(), *(held.deadline_ms for held in self.leases.values())], default=0)

    def update_room(self) -> None:
        """Set or clear `full`, with hysteresis."""
        limits = self.limits
        high = self.depth >= limits.high_count or self.stored >= limits.high_bytes
        self.full = high or (self.full and (self.depth > limits.low_count or self.stored > limits.low_bytes))
