"""What a queue in memory tells, and where its state lies."""

import random
from collections.abc import Callable, Collection, Iterator

from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, DeadLetter, LeasedItem, LeaseQueue, QueueItem, QueueLimits, QueueStats
from eaglefeed.queue.memory_group import GroupState
from eaglefeed.queue.memory_state import MemoryServer, State

__all__ = ["MemoryView"]


class MemoryView(LeaseQueue):
    """The part of a MemoryLeaseQueue that changes no item."""

    def __init__(
        self,
        server: MemoryServer,
        namespace: str,
        name: str,
        group: str = MAIN_GROUP,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.namespace, self.name = rules.check_name("run", namespace), rules.check_name("queue", name)
        self.group = rules.check_name("group", group)
        self._server, self._lock, self._jitter = server, server.lock, jitter

    @property
    def _state(self) -> State:
        run = self._server.queues(self.namespace)
        return run.setdefault(self.name, State(self.name, run, self._server.now_ms))

    @property
    def _own(self) -> GroupState:
        groups = self._state.groups
        rules.check_group(self.name, self.group, groups)
        return groups[self.group]

    def groups(self) -> tuple[str, ...]:
        """See LeaseQueue."""
        return tuple(sorted(self._state.groups))

    def limits(self) -> QueueLimits:
        """See LeaseQueue."""
        return self._state.limits

    def stats(self) -> QueueStats:
        """See LeaseQueue."""
        with self._lock:
            roles = [role for role, _ in self._server.living(self.namespace)]
            workers = {role: roles.count(role) for role in sorted(set(roles))}
            return self._own.stats(self.group, workers)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """See LeaseQueue."""
        with self._lock:
            own, items = self._own, self._state.items
            dead = list(own.dead.items())
            return iter([DeadLetter(i, reason, own.deliveries[i], items[i].payload) for i, reason in dead])

    def dead_reasons(self) -> Iterator[tuple[str, str]]:
        """See LeaseQueue."""
        with self._lock:
            return iter(list(self._own.dead.items()))

    def payloads(self) -> Iterator[LeasedItem]:
        """See LeaseQueue."""
        with self._lock:
            own, items = self._own, self._state.items
            ids = sorted(self._state.places, key=self._state.places.__getitem__)
            return iter([LeasedItem(i, items[i].payload, own.deliveries[i]) for i in ids])

    def find(self, ids: Collection[str]) -> list[QueueItem]:
        """See LeaseQueue."""
        with self._lock:
            found = [self._state.items[item_id] for item_id in ids if item_id in self._state.items]
        return [QueueItem(item.id, item.payload, item.stored_bytes) for item in found]

    def known(self, ids: Collection[str]) -> set[str]:
        """See LeaseQueue."""
        with self._lock:
            return self._state.known.keys() & set(ids)

    def leased(self, tokens: Collection[int]) -> set[int]:
        """See LeaseQueue."""
        with self._lock:
            return {token for group in self._state.groups.values() for token in group.leases} & set(tokens)

    def agree(self, name: str, value: bytes) -> bytes:
        """See LeaseQueue."""
        with self._lock:
            return self._server.record(self.namespace).setdefault(name, value)

    def agreed(self) -> dict[str, bytes]:
        """See LeaseQueue."""
        with self._lock:
            return dict(self._server.record(self.namespace))
