"""What one group of a queue knows in memory, and the transitions that the Redis scripts make."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eaglefeed.queue import rules
from eaglefeed.queue.base import AckResult, DrainState, LeasedItem, QueueStats

if TYPE_CHECKING:
    from eaglefeed.queue.memory_state import State

__all__ = ["Granted", "GroupState"]


@dataclass
class Granted:
    """A lease: when it runs out, the ids it was given, and how many of them are not settled."""

    deadline_ms: int
    ids: list[str]
    open: int


@dataclass
class GroupState:
    """Where each item is that this group has not done: in one of the places below.

    `owner` maps a leased id to its lease's token, `tentative` an acknowledged one to its step, `held` a prompt to its
    producer, `dead` a dead letter to its reason. `deliveries` counts those that ended without being settled or given
    back; an id is in `crashes` once one of its leases ran out, with the number of lone ones.
    """

    queue: "State" = field(repr=False)
    ready: OrderedDict[str, None] = field(default_factory=OrderedDict)
    delayed: dict[str, int] = field(default_factory=dict)
    owner: dict[str, int] = field(default_factory=dict)
    tentative: dict[str, int] = field(default_factory=dict)
    parked: dict[str, None] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict)
    deliveries: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    token: int = 0
    session: int = 0
    committed: int = 0
    redelivered: int = 0

    @property
    def to_lease(self) -> int:
        """Items that are or may soon be ready; at 0 a closed queue is drained."""
        return len(self.ready) + len(self.delayed) + len(self.owner)

    @property
    def unsettled(self) -> int:
        """Items that are neither done nor dead."""
        return self.to_lease + len(self.tentative) + len(self.parked) + len(self.held)

    def grant(self, n: int, now_ms: int, timeout_ms: int) -> list[LeasedItem]:
        """Lease up to `n` items of the head under the next token."""
        ids = self._head(n)
        if ids:
            self.token = max(self.token + 1, now_ms * 1000)
            self.leases[self.token] = Granted(now_ms + timeout_ms, ids, len(ids))
        return [self._deliver(item_id) for item_id in ids]

    def _deliver(self, item_id: str) -> LeasedItem:
        self.owner[item_id] = self.token
        count = self.deliveries[item_id] + 1
        self.redelivered += count > 1
        return LeasedItem(item_id, self.queue.items[item_id].payload, count)

    def _head(self, n: int) -> list[str]:
        """Pop up to `n` ready ids; one with a crash behind it goes alone."""
        ids: list[str] = []
        while self.ready and len(ids) < n:
            suspect = next(iter(self.ready)) in self.crashes
            if suspect and ids:
                break
            ids.append(self.ready.popitem(last=False)[0])
            if suspect:
                break
        return ids

    def why_nothing(self) -> DrainState:
        """What a lease without items says; a consumer that starves does not wait for the low marks."""
        if self.queue.closed and not self.to_lease:
            return DrainState.DRAINED
        if self.queue.full and self.tentative:
            return DrainState.COMMIT_DUE
        self.queue.full = self.queue.full and self.queue.is_high
        return DrainState.EMPTY

    def take(self, token: int, ids: Sequence[str]) -> AckResult:
        """Take items out of a lease; an id that is not in it (any more) is stale."""
        ok, stale = [], []
        for item_id in ids:
            if self.owner.get(item_id) != token:
                stale.append(item_id)
                continue
            del self.owner[item_id]
            ok.append(item_id)
        if ok:
            lease = self.leases[token]
            lease.open -= len(ok)
            if not lease.open:
                del self.leases[token]
        return AckResult(tuple(ok), tuple(stale))

    def to_head(self, ids: Sequence[str]) -> None:
        """Make items ready at the head, the first at the very head; recalled ones are parked."""
        for item_id in reversed(ids):
            if not self._parks(item_id):
                self.ready[item_id] = None
                self.ready.move_to_end(item_id, last=False)

    def to_tail(self, ids: Iterable[str]) -> None:
        """Make items ready at the tail; recalled ones are parked."""
        for item_id in ids:
            if not self._parks(item_id):
                self.ready[item_id] = None

    def retry_later(
        self, ids: Sequence[str], why: str, now_ms: int, delay_s: float | None, jitter: float, *, counted: bool
    ) -> None:
        """Delay items, by their backoff if `delay_s` is None; recalled ones are parked."""
        for item_id in ids:
            number = self._fail(item_id, why, counted)
            if not self._parks(item_id):
                backoff_ms = rules.backoff_ms(self.queue.limits, number, jitter)
                self.delayed[item_id] = now_ms + (backoff_ms if delay_s is None else int(delay_s * 1000))

    def give_up(self, ids: Sequence[str], why: str, *, counted: bool) -> None:
        """Make items dead letters."""
        for item_id in ids:
            self._fail(item_id, why, counted)
            self.bury(item_id, why)
        self.queue.update_room()

    def _fail(self, item_id: str, why: str, counted: bool) -> int:
        """How many deliveries ended unsettled, with this one, which is remembered if it counts."""
        self.errors[item_id] = why
        number = self.deliveries[item_id] + 1
        if counted:
            self.deliveries[item_id] = number
        return number

    def _parks(self, item_id: str) -> bool:
        if item_id in self.queue.recalled:
            self.parked[item_id] = None
            return True
        return False

    def park(self, item_id: str) -> None:
        """Park a recalled item that waits; one that is leased or done is left alone."""
        if item_id in self.ready or item_id in self.delayed:
            self._pull(item_id)
            self.parked[item_id] = None

    def _pull(self, item_id: str) -> bool:
        """Take an item out of wherever it is; False if it is nowhere: unknown, held, done or dead."""
        if item_id in self.owner:
            self.take(self.owner[item_id], [item_id])
            return True
        places: list[dict[str, None] | dict[str, int]] = [self.ready, self.delayed, self.tentative, self.parked]
        place = next((place for place in places if item_id in place), None)
        if place is None:
            return False
        del place[item_id]
        return True

    def settle(self, ids: Iterable[str]) -> None:
        """Make items done that were taken out of their place."""
        for item_id in ids:
            self._forget_counts(item_id)
            self.queue.end_in_one_group(item_id)

    def bury(self, item_id: str, reason: str) -> None:
        """Make an item a dead letter that was taken out of its place."""
        self.dead[item_id] = reason
        self.queue.end_in_one_group(item_id)

    def revive(self, ids: Sequence[str]) -> int:
        """Put dead letters at the tail, with a clean count; returns how many."""
        found = [item_id for item_id in dict.fromkeys(ids) if item_id in self.dead]
        for item_id in found:
            del self.dead[item_id]
            self._forget_counts(item_id)
            self.queue.reopen(item_id)
        self.to_tail(found)
        return len(found)

    def _forget_counts(self, item_id: str) -> None:
        del self.deliveries[item_id]
        self.crashes.pop(item_id, None)
        self.errors.pop(item_id, None)

    def reclaim(self, now_ms: int) -> list[str]:
        """End the leases that ran out, each a crash of what it held; returns that."""
        expired = sorted(
            (lease.deadline_ms, token) for token, lease in self.leases.items() if lease.deadline_ms <= now_ms
        )
        back: list[str] = []
        for _, token in expired:
            ids = self.leases[token].ids
            for item_id in self.take(token, ids).ok:
                self.deliveries[item_id] += 1
                self.crashes[item_id] = self.crashes.get(item_id, 0) + (len(ids) == 1)
                back.append(item_id)
        return back

    def come_back(self, ids: Sequence[str]) -> None:
        """Put items to the head in this order, but bury those that crashed alone too often."""
        for item_id in ids:
            crashes = self.crashes.get(item_id, 0)
            if crashes >= self.queue.limits.max_deliveries:
                self.bury(item_id, rules.crash_reason(crashes, self.errors.get(item_id, "")))
        self.to_head([item_id for item_id in ids if item_id not in self.dead])

    def promote(self, now_ms: int) -> None:
        """Put delayed items whose time has come to the tail."""
        due = sorted((at_ms, item_id.encode(), item_id) for item_id, at_ms in self.delayed.items() if at_ms <= now_ms)
        for _, _, item_id in due:
            del self.delayed[item_id]
            self.ready[item_id] = None

    def next_ms(self) -> int:
        """When the next delayed or leased item may be ready; 0 if there is none."""
        return min([*self.delayed.values(), *(lease.deadline_ms for lease in self.leases.values())], default=0)

    def commit(self, step: int) -> int:
        """Settle what was acknowledged at `step` or before; returns how many items."""
        ids = [item_id for item_id, at in self.tentative.items() if at <= step]
        for item_id in ids:
            del self.tentative[item_id]
        self.settle(ids)
        self.committed = max(self.committed, step)
        return len(ids)

    def restore(self, step: int, seen: Sequence[str], now_ms: int) -> int:
        """Settle what the checkpoint has learned, put the rest back to the head in put order; returns the session."""
        self.session = max(self.session + 1, now_ms * 1000)
        self.settle([item_id for item_id in dict.fromkeys(seen) if self._pull(item_id)])
        self.commit(step)
        back = sorted([*self.tentative, *self.owner], key=self.queue.places.__getitem__)
        self.reclaim(now_ms)
        for place in (self.tentative, self.owner, self.leases):
            place.clear()
        self.come_back(back)
        return self.session

    def stats(self, name: str, workers: dict[str, int]) -> QueueStats:
        """The counts as the group `name` sees them."""
        return QueueStats(
            name=self.queue.name,
            group=name,
            ready=len(self.ready),
            delayed=len(self.delayed),
            leased=len(self.owner),
            tentative=len(self.tentative),
            held=len(self.held),
            parked=len(self.parked),
            done=len(self.queue.known) - self.unsettled - len(self.dead),
            dead=len(self.dead),
            released=len(self.queue.released),
            redelivered=self.redelivered,
            session=self.session,
            committed_step=self.committed,
            stored_bytes=self.queue.stored,
            closed=self.queue.closed,
            full=self.queue.full,
            oldest_ready_s=self._oldest_ready_s(),
            workers=workers,
        )

    def _oldest_ready_s(self) -> float:
        if not self.ready:
            return 0.0
        put_ms = self.queue.places[next(iter(self.ready))] // 1000
        return max(0, self.queue.now_ms() - put_ms) / 1000
