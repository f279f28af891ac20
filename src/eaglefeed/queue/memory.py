"""The lease queue in one process's memory: what the Redis scripts do, in plain Python. Use it in your tests."""

from collections.abc import Sequence
from itertools import islice

from eaglefeed.errors import StaleLease
from eaglefeed.queue import rules
from eaglefeed.queue.base import (
    MAX_BATCH,
    AckResult,
    DrainState,
    Lease,
    LeaseQueue,
    NoLease,
    PutResult,
    QueueItem,
    QueueLimits,
)
from eaglefeed.queue.memory_group import GroupState
from eaglefeed.queue.memory_state import MemoryServer
from eaglefeed.queue.memory_view import MemoryView

__all__ = ["MemoryLeaseQueue", "MemoryServer"]

_POLL_S = 0.005


class MemoryLeaseQueue(MemoryView):
    """A queue on a MemoryServer; queues of the same server, namespace and name are one."""

    def configure(self, limits: QueueLimits, *, groups: Sequence[str] = ()) -> None:
        """See LeaseQueue."""
        names = [rules.check_name("group", name) for name in groups]
        with self._lock:
            state = self._state
            if names:
                state.declare(names)
            state.limits = limits
            state.update_room()

    def put(self, items: Sequence[QueueItem]) -> PutResult:
        """See LeaseQueue."""
        accepted = duplicate = 0
        for chunk in rules.chunks(items):
            with self._lock:
                new = self._state.put(chunk)
            accepted, duplicate = accepted + new, duplicate + len(chunk) - new
        return PutResult(accepted, duplicate, self._state.depth)

    def lease(
        self,
        n: int,
        *,
        visibility_timeout_s: float,
        consumer: str,  # noqa: ARG002 - for whoever looks into a server
        wait_s: float = 0.0,
        session: int = 0,
    ) -> Lease | NoLease:
        """See LeaseQueue."""
        rules.check_batch(n)
        clock = self._server.clock
        end_s = clock.monotonic() + wait_s
        while True:
            with self._lock:
                got = self._try_lease(n, int(visibility_timeout_s * 1000), session)
            left_s = end_s - clock.monotonic()
            if isinstance(got, Lease) or got.state is not DrainState.EMPTY or left_s <= 0:
                return got
            clock.sleep(min(left_s, _POLL_S))

    def _try_lease(self, n: int, timeout_ms: int, session: int) -> Lease | NoLease:
        own, now_ms = self._fenced("lease", session), self._server.now_ms()
        own.come_back(own.reclaim(now_ms))
        self._state.update_room()
        own.promote(now_ms)
        items = own.grant(n, now_ms, timeout_ms)
        if items:
            return Lease(token=own.token, deadline_ms=now_ms + timeout_ms, items=tuple(items))
        return NoLease(own.why_nothing(), own.next_ms())

    def _fenced(self, operation: str, session: int) -> GroupState:
        own = self._own
        if session != own.session:
            raise StaleLease.of_session(operation, session, own.session)
        return own

    def renew(self, token: int, *, visibility_timeout_s: float) -> int:
        """See LeaseQueue."""
        with self._lock:
            lease = self._own.leases.get(token)
            if lease is None:
                raise StaleLease("renew", token)
            lease.deadline_ms = self._server.now_ms() + int(visibility_timeout_s * 1000)
            return lease.deadline_ms

    def ack(self, token: int, ids: Sequence[str], *, step: int | None = None, session: int = 0) -> AckResult:
        """See LeaseQueue."""
        rules.check_ids(ids)
        with self._lock:
            own = self._fenced("ack", session)
            result = own.take(token, ids)
            if step is None:
                own.settle(result.ok)
                self._state.update_room()
            else:
                own.tentative.update(dict.fromkeys(result.ok, step))
            return result

    def nack(
        self,
        token: int,
        ids: Sequence[str],
        *,
        reason: str,
        retryable: bool = True,
        delay_s: float | None = None,
        counted: bool = True,
    ) -> AckResult:
        """See LeaseQueue."""
        jitter, why = self._jitter(), rules.short_reason(reason)
        rules.check_ids(ids)
        with self._lock:
            own = self._own
            result = own.take(token, ids)
            if not retryable:
                own.give_up(result.ok, why, counted=counted)
            elif delay_s == 0:
                own.to_head(result.ok)
            else:
                own.retry_later(result.ok, why, self._server.now_ms(), delay_s, jitter, counted=counted)
            return result

    def commit(self, step: int, *, session: int = 0) -> int:
        """See LeaseQueue."""
        with self._lock:
            num_items = self._fenced("commit", session).commit(step)
            self._state.update_room()
            return num_items

    def restore(self, step: int, *, seen: Sequence[str] = ()) -> int:
        """See LeaseQueue."""
        with self._lock:
            own = self._own
            if step < own.committed:
                raise rules.step_is_released(self.name, step, own.committed)
            session = own.restore(step, seen, self._server.now_ms())
            self._state.update_room()
            return session

    def released(self, n: int = MAX_BATCH) -> list[QueueItem]:
        """See LeaseQueue."""
        with self._lock:
            found = [self._state.items[item_id] for item_id in islice(self._state.released, n)]
        return [QueueItem(item.id, item.payload, item.stored_bytes) for item in found]

    def forget(self, ids: Sequence[str]) -> None:
        """See LeaseQueue."""
        with self._lock:
            for item_id in ids:
                if item_id in self._state.released:
                    del self._state.released[item_id], self._state.items[item_id]

    def handoff(self, token: int, prompt_id: str, item: QueueItem, samples: LeaseQueue, *, holder: str = "") -> None:
        """See LeaseQueue."""
        rules.check_item(item)
        rules.check_holder(prompt_id, item, holder)
        with self._lock:
            own, target = self._own, rules.check_pair(self, samples, MemoryLeaseQueue)._state
            if own.owner.get(prompt_id) != token:
                if target.known.get(item.id) == rules.digest(item.payload):
                    return
                raise StaleLease("handoff", token, prompt_id)
            target.take_over(item)
            own.take(token, [prompt_id])
            if holder and target.keeps(item.id):
                own.held[prompt_id] = holder
            else:
                own.settle([prompt_id])
            self._state.update_room()

    def recall(self, samples: LeaseQueue) -> int:
        """See LeaseQueue."""
        with self._lock:
            own, target = self._own, rules.check_pair(self, samples, MemoryLeaseQueue)._state
            living = {worker for role, worker in self._server.living(self.namespace) if role == "producer"}
            lost = [item_id for item_id, producer in own.held.items() if producer not in living]
            for item_id in lost:
                del own.held[item_id]
            own.to_head(sorted(lost, key=self._state.places.__getitem__))
            target.closed = target.closed and not lost
            target.recall(lost)
            return len(lost)

    def held_for(self, samples: LeaseQueue, *, producer: str = "") -> int:
        """See LeaseQueue."""
        with self._lock:
            target = rules.check_pair(self, samples, MemoryLeaseQueue)._state
            return sum(i in target.places and producer in ("", holder) for i, holder in self._own.held.items())

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
            self._server.seen(self.namespace)[role, worker] = self._server.now_ms()

    def farewell(self, role: str, worker: str, *, error: str = "") -> None:
        """See LeaseQueue."""
        with self._lock:
            self._server.seen(self.namespace).pop((role, worker), None)
            if error:
                words = rules.last_words(worker, error)
                self._server.record(self.namespace)[rules.LAST_ERROR + role] = words.encode()

    def close(self) -> None:
        """See LeaseQueue."""
        self._state.closed = True

    def requeue(self, ids: Sequence[str]) -> int:
        """See LeaseQueue."""
        with self._lock:
            state = self._state
            num_items = self._own.revive(ids)
            state.update_room()
            if num_items and state.samples:
                state.samples.closed = False
            return num_items

    def purge(self) -> int:
        """See LeaseQueue."""
        with self._lock:
            old = self._state
            self._server.queues(self.namespace)[self.name] = old.emptied()
            record = self._server.record(self.namespace)
            if rules.prompts_of(self.name) is not None and (instance := record.pop(rules.INSTANCE, None)):
                record[rules.FORMER + instance.decode()] = b"1"
            return len(old.items) - len(old.released)
