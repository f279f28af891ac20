"""The lease queue in one process's memory: what the Redis scripts do, in plain Python. Use it in your tests."""

import random
from collections.abc import Callable, Iterator, Sequence
from threading import RLock

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, IdConflict, QueueClosed, QueueFull, StaleLease
from eaglefeed.queue import rules
from eaglefeed.queue.base import (
    AckResult,
    DeadLetter,
    DrainState,
    Lease,
    LeasedItem,
    LeaseQueue,
    NoLease,
    PutResult,
    QueueItem,
    QueueLimits,
    QueueStats,
)
from eaglefeed.queue.memory_state import State

__all__ = ["MemoryLeaseQueue", "MemoryServer"]

_POLL_S = 0.005


class MemoryServer:
    """What queues of one process share, as they would share a Redis server."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.lock = RLock()
        self.states: dict[tuple[str, str], State] = {}
        self.workers: dict[str, dict[tuple[str, str], int]] = {}

    def now_ms(self) -> int:
        """The server's time in milliseconds."""
        return int(self.clock.time() * 1000)


class MemoryLeaseQueue(LeaseQueue):
    """A queue on a MemoryServer; queues of the same server, namespace and name are one."""

    def __init__(
        self, server: MemoryServer, namespace: str, name: str, *, jitter: Callable[[], float] = random.random
    ) -> None:
        self.namespace, self.name = rules.check_name("run", namespace), rules.check_name("queue", name)
        self._server, self._lock, self._jitter = server, server.lock, jitter

    @property
    def _state(self) -> State:
        return self._server.states.setdefault((self.namespace, self.name), State())

    @property
    def _workers(self) -> dict[tuple[str, str], int]:
        return self._server.workers.setdefault(self.namespace, {})

    def configure(self, limits: QueueLimits) -> None:
        """See LeaseQueue."""
        with self._lock:
            self._state.limits = limits
            self._state.update_room()

    def put(self, items: Sequence[QueueItem]) -> PutResult:
        """See LeaseQueue."""
        accepted = duplicate = 0
        for chunk in rules.chunks(items):
            with self._lock:
                new = self._put_chunk(chunk)
            accepted, duplicate = accepted + new, duplicate + len(chunk) - new
        return PutResult(accepted, duplicate, self._state.depth)

    def _put_chunk(self, chunk: Sequence[QueueItem]) -> int:
        state = self._state
        new: dict[str, QueueItem] = {}
        for item in chunk:
            known = rules.digest(new[item.id].payload) if item.id in new else state.known.get(item.id)
            if known is None:
                new[item.id] = item
            elif known != rules.digest(item.payload):
                raise IdConflict(self.name, item.id)
        if new and state.closed:
            raise QueueClosed(self.name)
        if new and state.depth + len(new) > state.limits.max_depth:
            raise QueueFull(self.name, depth=state.depth, max_depth=state.limits.max_depth)
        for item in new.values():
            state.add(item)
        state.update_room()
        return len(new)

    def lease(
        self,
        n: int,
        *,
        visibility_timeout_s: float,
        consumer: str,  # noqa: ARG002 - for whoever looks into a server
        wait_s: float = 0.0,
    ) -> Lease | NoLease:
        """See LeaseQueue."""
        rules.check_batch(n)
        clock = self._server.clock
        end_s = clock.monotonic() + wait_s
        while True:
            with self._lock:
                got = self._try_lease(n, int(visibility_timeout_s * 1000))
            left_s = end_s - clock.monotonic()
            if isinstance(got, Lease) or got.state is DrainState.DRAINED or left_s <= 0:
                return got
            clock.sleep(min(left_s, _POLL_S))

    def _try_lease(self, n: int, timeout_ms: int) -> Lease | NoLease:
        state, now_ms = self._state, self._server.now_ms()
        state.reclaim(now_ms)
        state.promote(now_ms)
        items = state.grant(n, now_ms, timeout_ms)
        if items:
            return Lease(token=state.token, deadline_ms=now_ms + timeout_ms, items=tuple(items))
        drained = state.closed and not state.depth
        return NoLease(DrainState.DRAINED if drained else DrainState.EMPTY, state.next_ms())

    def renew(self, token: int, *, visibility_timeout_s: float) -> int:
        """See LeaseQueue."""
        with self._lock:
            held = self._state.leases.get(token)
            if held is None:
                raise StaleLease("renew", token)
            held.deadline_ms = self._server.now_ms() + int(visibility_timeout_s * 1000)
            return held.deadline_ms

    def ack(self, token: int, ids: Sequence[str], *, step: int = 0) -> AckResult:  # noqa: ARG002 - for commit(step)
        """See LeaseQueue."""
        with self._lock:
            state = self._state
            taken, result = state.take(token, ids)
            for item in taken:
                state.settle(item)
            state.update_room()
            return result

    def nack(
        self, token: int, ids: Sequence[str], *, reason: str, retryable: bool = True, delay_s: float | None = None
    ) -> AckResult:
        """See LeaseQueue."""
        jitter = self._jitter()
        with self._lock:
            state = self._state
            taken, result = state.take(token, ids)
            if retryable and delay_s == 0:
                state.give_back(taken)
                return result
            for item in taken:
                item.error = rules.short_reason(reason)
                if not retryable:
                    state.bury(item, item.error)
                    continue
                backoff_ms = rules.backoff_ms(state.limits, item.deliveries, jitter)
                wait_ms = backoff_ms if delay_s is None else int(delay_s * 1000)
                state.delayed[item.id] = self._server.now_ms() + wait_ms
            state.update_room()
            return result

    def handoff(self, token: int, prompt_id: str, item: QueueItem, samples: LeaseQueue) -> None:
        """See LeaseQueue."""
        rules.check_item(item)
        if not isinstance(samples, MemoryLeaseQueue) or samples.namespace != self.namespace:
            raise ConfigError("a hand-off needs two queues of one run", subject=samples.name)
        with self._lock:
            state, target = self._state, samples._state
            known, digest = target.known.get(item.id), rules.digest(item.payload)
            prompt = state.items.get(prompt_id)
            if prompt is None or prompt.token != token:
                if known == digest:
                    return
                raise StaleLease("handoff", token, prompt_id)
            if known not in (None, digest):
                raise IdConflict(samples.name, item.id)
            self.ack(token, [prompt_id])
            if known is None:
                target.add(item)
            target.update_room()

    def has_room(self) -> bool:
        """See LeaseQueue."""
        return not self._state.full

    def wait_for_room(self, timeout_s: float) -> bool:
        """See LeaseQueue."""
        clock = self._server.clock
        end_s = clock.monotonic() + timeout_s
        while not self.has_room():
            if clock.monotonic() >= end_s:
                return False
            clock.sleep(_POLL_S)
        return True

    def beat(self, role: str, worker: str) -> None:
        """See LeaseQueue."""
        with self._lock:
            self._workers[role, worker] = self._server.now_ms()

    def farewell(self, role: str, worker: str) -> None:
        """See LeaseQueue."""
        with self._lock:
            self._workers.pop((role, worker), None)

    def close(self) -> None:
        """See LeaseQueue."""
        self._state.closed = True

    def stats(self) -> QueueStats:
        """See LeaseQueue."""
        with self._lock:
            state = self._state
            since_ms = self._server.now_ms() - int(rules.WORKER_GRACE_S * 1000)
            roles = [role for (role, _), seen_ms in self._workers.items() if seen_ms >= since_ms]
            return QueueStats(
                name=self.name,
                ready=len(state.ready),
                delayed=len(state.delayed),
                leased=state.depth - len(state.ready) - len(state.delayed),
                done=len(state.known) - len(state.items),
                dead=len(state.dead),
                redelivered=state.redelivered,
                stored_bytes=state.stored,
                closed=state.closed,
                full=state.full,
                workers={role: roles.count(role) for role in sorted(set(roles))},
            )

    def dead_letters(self) -> Iterator[DeadLetter]:
        """See LeaseQueue."""
        with self._lock:
            state = self._state
            dead = [(state.items[item_id], reason) for item_id, reason in state.dead.items()]
        return iter([DeadLetter(item.id, reason, item.deliveries, item.payload) for item, reason in dead])

    def requeue(self, ids: Sequence[str]) -> int:
        """See LeaseQueue."""
        with self._lock:
            state = self._state
            found = [state.items[item_id] for item_id in dict.fromkeys(ids) if item_id in state.dead]
            for item in found:
                state.revive(item)
            state.update_room()
            return len(found)

    def payloads(self) -> Iterator[LeasedItem]:
        """See LeaseQueue."""
        with self._lock:
            state = self._state
            items = sorted((i for i in state.items.values() if i.id not in state.dead), key=lambda item: item.seq)
        return iter([LeasedItem(item.id, item.payload, item.deliveries) for item in items])

    def purge(self) -> int:
        """See LeaseQueue."""
        with self._lock:
            old = self._state
            self._server.states[self.namespace, self.name] = State(token=old.token)
            return len(old.items)
