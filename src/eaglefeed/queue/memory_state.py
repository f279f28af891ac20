"""What the queues of a server and the groups of a queue share in memory, and when an item leaves its queue."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from threading import RLock

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import IdConflict, QueueClosed, QueueFull
from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, QueueItem, QueueLimits
from eaglefeed.queue.memory_group import GroupState

__all__ = ["Item", "MemoryServer", "State"]


@dataclass
class Item:
    """An item that is kept; `pending` groups have neither done it nor hold it dead."""

    id: str
    payload: bytes
    stored_bytes: int
    pending: int


@dataclass
class State:
    """One queue of a run.

    `known` maps all that was put to its digest; `items` is what is kept; `places` the open ones of them, in put order,
    a place being the time of the put in microseconds; `released` those that every group has done; `recalled` ids
    whose tensors went with their producer.
    """

    name: str
    run: dict[str, "State"] = field(repr=False)
    now_ms: Callable[[], int] = field(repr=False)
    limits: QueueLimits = QueueLimits()  # noqa: RUF009 - it is frozen
    groups: dict[str, GroupState] = field(default_factory=dict)
    declared: bool = False
    known: dict[str, str] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    released: dict[str, None] = field(default_factory=dict)
    recalled: set[str] = field(default_factory=set)
    stored: int = 0
    closed: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        if not self.groups:
            self.groups = {MAIN_GROUP: GroupState(self)}

    @property
    def depth(self) -> int:
        """Items that are open to some group."""
        return len(self.places)

    @property
    def samples(self) -> "State | None":
        """The samples of these prompts, if it has any."""
        return self.run.get(rules.samples_of(self.name) or "")

    @property
    def prompts(self) -> "State | None":
        """The prompts of these samples, if it has any."""
        return self.run.get(rules.prompts_of(self.name) or "")

    def declare(self, names: Sequence[str]) -> None:
        """Fix the groups.

        Raises:
            ConfigError: others are fixed already.
        """
        if self.declared and set(names) != set(self.groups):
            raise rules.groups_are_fixed(self.name, self.groups, names)
        self.groups = {name: self.groups.get(name) or GroupState(self) for name in names}
        self.declared = True

    def put(self, chunk: Sequence[QueueItem]) -> int:
        """Add the new ones of `chunk`, all or none; returns how many.

        Raises:
            IdConflict, QueueClosed, QueueFull: see LeaseQueue.put.
        """
        new: dict[str, QueueItem] = {}
        for item in chunk:
            known = rules.digest(new[item.id].payload) if item.id in new else self.known.get(item.id)
            if known is None:
                new[item.id] = item
            elif known != rules.digest(item.payload):
                raise IdConflict(self.name, item.id)
        if new and self.closed:
            raise QueueClosed(self.name)
        if new and self.depth + len(new) > self.limits.max_depth:
            raise QueueFull(self.name, depth=self.depth, max_depth=self.limits.max_depth)
        for item in new.values():
            self.add(item)
        self.update_room()
        return len(new)

    def add(self, item: QueueItem) -> None:
        """Put a new item at the tail for every group."""
        self.known[item.id] = rules.digest(item.payload)
        self.items[item.id] = Item(item.id, item.payload, item.stored_bytes, len(self.groups))
        self._open(self.items[item.id])
        for group in self.groups.values():
            group.to_tail([item.id])
        self.declared = True

    def _open(self, item: Item) -> None:
        last = next(reversed(self.places.values()), 0)
        self.places[item.id] = max(last + 1, self.now_ms() * 1000)
        self.stored += item.stored_bytes

    def end_in_one_group(self, item_id: str) -> None:
        """Note that a group has done an item or holds it dead: after the last one it takes no room any more."""
        item = self.items[item_id]
        item.pending -= 1
        if item.pending:
            return
        del self.places[item_id]
        self.stored -= item.stored_bytes
        if any(item_id in group.dead for group in self.groups.values()):
            return
        if item.stored_bytes:
            self.released[item_id] = None
        else:
            del self.items[item_id]
        if self.prompts:
            self.prompts.settle_held(item_id)

    def settle_held(self, prompt_id: str) -> None:
        """Settle a prompt that was held for a sample which every group has done by now."""
        for group in self.groups.values():
            if group.held.pop(prompt_id, None) is not None:
                group.settle([prompt_id])
        self.update_room()

    def reopen(self, item_id: str) -> None:
        """Note that a group wants a dead letter again; if nobody else did, it gets a new place."""
        item = self.items[item_id]
        item.pending += 1
        if item.pending == 1:
            self._open(item)

    def keeps(self, item_id: str) -> bool:
        """Whether an item is open, or dead to some group."""
        return item_id in self.items and item_id not in self.released

    def recall(self, ids: Collection[str]) -> None:
        """Mark the known ones of `ids` as gone with their producer; those that wait are parked."""
        for item_id in ids:
            if item_id in self.known:
                self.recalled.add(item_id)
                for group in self.groups.values():
                    group.park(item_id)

    def take_over(self, item: QueueItem) -> None:
        """Add a handed-off sample, unless it is there already; a recalled one gets its new payload.

        Raises:
            IdConflict: it is there with another payload, and was not recalled.
        """
        known = self.known.get(item.id)
        if item.id in self.recalled:
            self._bring_back(item)
        elif known is None:
            self.add(item)
        elif known != rules.digest(item.payload):
            raise IdConflict(self.name, item.id)
        self.update_room()

    def _bring_back(self, new: QueueItem) -> None:
        self.recalled.discard(new.id)
        if not self.keeps(new.id):
            return
        item = self.items[new.id]
        if item.pending:
            self.stored += new.stored_bytes - item.stored_bytes
        item.payload, item.stored_bytes = new.payload, new.stored_bytes
        self.known[new.id] = rules.digest(new.payload)
        for group in self.groups.values():
            if new.id in group.parked:
                del group.parked[new.id]
                group.to_tail([new.id])

    def update_room(self) -> None:
        """Set or clear `full`, with hysteresis."""
        limits = self.limits
        low = self.depth <= limits.low_count and self.stored <= limits.low_bytes
        self.full = self.is_high or (self.full and not low)

    @property
    def is_high(self) -> bool:
        """Whether a high mark is reached."""
        return self.depth >= self.limits.high_count or self.stored >= self.limits.high_bytes

    def emptied(self) -> "State":
        """What is left after a purge: the groups with their tokens and sessions."""
        new = State(self.name, self.run, self.now_ms, declared=self.declared)
        new.groups = {
            name: GroupState(new, token=group.token, session=group.session) for name, group in self.groups.items()
        }
        return new


class MemoryServer:
    """What queues of one process share, as they would share a Redis server."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.lock = RLock()
        self._runs: dict[str, dict[str, State]] = {}
        self._workers: dict[str, dict[tuple[str, str], int]] = {}
        self._records: dict[str, dict[str, bytes]] = {}

    def now_ms(self) -> int:
        """The server's time in milliseconds."""
        return int(self.clock.time() * 1000)

    def queues(self, namespace: str) -> dict[str, State]:
        """The queues of a run, by name."""
        return self._runs.setdefault(namespace, {})

    def seen(self, namespace: str) -> dict[tuple[str, str], int]:
        """(role, worker) of a run → when it last showed a sign of life, server ms."""
        return self._workers.setdefault(namespace, {})

    def record(self, namespace: str) -> dict[str, bytes]:
        """What a run agreed on, by name."""
        return self._records.setdefault(namespace, {})

    def living(self, namespace: str) -> list[tuple[str, str]]:
        """(role, worker) of those that showed a sign of life within the grace period."""
        since_ms = self.now_ms() - int(rules.WORKER_GRACE_S * 1000)
        return [worker for worker, seen_ms in self.seen(namespace).items() if seen_ms >= since_ms]
