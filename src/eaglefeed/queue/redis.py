"""The lease queue on Redis or Valkey: keys, calls and replies. What a call does stands in `lua/<call>.lua`.

Keys are `eaglefeed:{namespace}:<queue>:<name>`. The braces are one hash tag a run, so that a hand-off can touch both of
its queues in one script. The names and types stand in the scripts' comments; `eaglefeed:{namespace}:workers` is shared
by the run's queues. Sessions (tentative acks), groups, a replay cache and `held:{producer}` get keys beside these.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from eaglefeed.errors import ConfigError, IdConflict, QueueClosed, QueueFull, StaleLease, UnsafeServer
from eaglefeed.queue import rules
from eaglefeed.queue.base import (
    MAX_BATCH,
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
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.scripts import load

__all__ = ["RedisLeaseQueue"]

_MAX_WAIT_S = 1.0
_MIN_WAIT_S = 0.01
_ROOM_POLL_S = 0.1
_FORGET_WORKER_MS = 600_000


class RedisLeaseQueue(LeaseQueue):
    """One queue of a run on a server.

    `put`, `renew`, `handoff` and everything that only reads is repeated by itself after a lost reply (a repeated `put`
    counts its items as duplicates). `lease`, `ack`, `nack`, `requeue` and `purge` are not: they raise QueueUnavailable,
    and what they did not settle comes back when its lease runs out.
    """

    def __init__(
        self, client: QueueClient, namespace: str, name: str, *, jitter: Callable[[], float] = random.random
    ) -> None:
        self.namespace, self.name = rules.check_name("run", namespace), rules.check_name("queue", name)
        self._client, self._jitter = client, jitter

    def key(self, name: str) -> str:
        """The key called `name` in the scripts."""
        run = f"eaglefeed:{{{self.namespace}}}"
        return f"{run}:workers" if name == "workers" else f"{run}:{self.name}:{name}"

    def _run(
        self,
        name: str,
        *args: str | bytes | float,
        repeatable: bool = True,
        tables: dict[str, "RedisLeaseQueue"] | None = None,
    ) -> Any:
        script = load(name)
        queues = tables or {"q": self}
        keys = [queues[table].key(key) for table, key in script.keys]
        return self._client.run(script, keys, args, repeatable=repeatable)

    def configure(self, limits: QueueLimits) -> None:
        """See LeaseQueue."""
        self._run("configure", *(part for pair in asdict(limits).items() for part in pair))

    def put(self, items: Sequence[QueueItem]) -> PutResult:
        """See LeaseQueue."""
        accepted = duplicate = depth = 0
        for chunk in rules.chunks(items):
            new, depth = self._put_chunk(chunk)
            accepted, duplicate = accepted + new, duplicate + len(chunk) - new
        return PutResult(accepted, duplicate, depth)

    def _put_chunk(self, chunk: Sequence[QueueItem]) -> tuple[int, int]:
        if not chunk:
            return 0, self.stats().unsettled
        status, *rest = self._run("put", *(part for item in chunk for part in _wire(item)))
        if status == b"conflict":
            raise IdConflict(self.name, rest[0].decode())
        if status == b"closed":
            raise QueueClosed(self.name)
        if status == b"full":
            raise QueueFull(self.name, depth=rest[0], max_depth=rest[1])
        return rest[0], rest[1]

    def lease(self, n: int, *, visibility_timeout_s: float, consumer: str, wait_s: float = 0.0) -> Lease | NoLease:
        """See LeaseQueue."""
        rules.check_batch(n)
        who = " ".join(consumer.split()) or "-"
        clock = self._client.clock
        end_s = clock.monotonic() + wait_s
        while True:
            status, *rest = self._run("lease", n, int(visibility_timeout_s * 1000), who, repeatable=False)
            if status == b"lease":
                return self._read_lease(rest)
            next_ms, now_ms = rest
            if 0 < next_ms <= now_ms:
                continue
            left_s = end_s - clock.monotonic()
            if status == b"drained" or left_s <= 0:
                return NoLease(DrainState(status.decode()), next_ms)
            due_s = (next_ms - now_ms) / 1000 if next_ms else _MAX_WAIT_S
            self._wait_for_wake(min(left_s, due_s, _MAX_WAIT_S))

    def _read_lease(self, reply: list[Any]) -> Lease:
        token, deadline_ms, ids, payloads, counts = reply
        if None in payloads:
            lost = ids[payloads.index(None)].decode()
            fix = "set maxmemory-policy noeviction, purge the queue and feed again"
            raise UnsafeServer(
                "its payload is gone: the server evicted it, or somebody deleted it", subject=lost, fix=fix
            )
        rows = zip(ids, payloads, counts, strict=True)
        items = tuple(LeasedItem(item_id.decode(), payload, count) for item_id, payload, count in rows)
        return Lease(token=int(token), deadline_ms=int(deadline_ms), items=items)

    def _wait_for_wake(self, wait_s: float) -> None:
        # 0 would wait for ever, and a second is well below the socket's timeout
        self._client.call("BLPOP", self.key("wake"), f"{max(wait_s, _MIN_WAIT_S):.3f}")

    def renew(self, token: int, *, visibility_timeout_s: float) -> int:
        """See LeaseQueue."""
        deadline_ms: int = self._run("renew", token, int(visibility_timeout_s * 1000))
        if not deadline_ms:
            raise StaleLease("renew", token)
        return deadline_ms

    def ack(self, token: int, ids: Sequence[str], *, step: int = 0) -> AckResult:  # noqa: ARG002 - for commit(step)
        """See LeaseQueue."""
        return self._settle("ack", (token,), ids)

    def nack(
        self, token: int, ids: Sequence[str], *, reason: str, retryable: bool = True, delay_s: float | None = None
    ) -> AckResult:
        """See LeaseQueue."""
        mode: tuple[str, float] = ("dead", 0)
        if retryable and delay_s is None:
            mode = ("backoff", self._jitter())
        elif retryable:
            mode = ("delay", int(delay_s * 1000)) if delay_s else ("head", 0)
        return self._settle("nack", (token, *mode, rules.short_reason(reason)), ids)

    def _settle(self, script: str, head: tuple[str | float, ...], ids: Sequence[str]) -> AckResult:
        flags: list[int] = []
        for start in range(0, len(ids), MAX_BATCH):
            flags += self._run(script, *head, *ids[start : start + MAX_BATCH], repeatable=False)
        pairs = list(zip(ids, flags, strict=True))
        return AckResult(tuple(i for i, held in pairs if held), tuple(i for i, held in pairs if not held))

    def handoff(self, token: int, prompt_id: str, item: QueueItem, samples: LeaseQueue) -> None:
        """See LeaseQueue."""
        rules.check_item(item)
        if not isinstance(samples, RedisLeaseQueue) or samples.namespace != self.namespace:
            raise ConfigError("a hand-off needs two queues of one run", subject=samples.name)
        tables = {"prompts": self, "samples": samples}
        status = self._run("handoff", token, prompt_id, *_wire(item), tables=tables)
        if status == b"stale":
            raise StaleLease("handoff", token, prompt_id)
        if status == b"conflict":
            raise IdConflict(samples.name, item.id)

    def has_room(self) -> bool:
        """See LeaseQueue."""
        return bool(self._client.call("HGET", self.key("ctl"), "full") != b"1")

    def wait_for_room(self, timeout_s: float) -> bool:
        """See LeaseQueue."""
        clock = self._client.clock
        end_s = clock.monotonic() + timeout_s
        while not self.has_room():
            left_s = end_s - clock.monotonic()
            if left_s <= 0:
                return False
            clock.sleep(min(left_s, _ROOM_POLL_S))
        return True

    def beat(self, role: str, worker: str) -> None:
        """See LeaseQueue."""
        self._run("beat", f"{role} {worker}", _FORGET_WORKER_MS)

    def farewell(self, role: str, worker: str) -> None:
        """See LeaseQueue."""
        self._client.call("ZREM", self.key("workers"), f"{role} {worker}")

    def close(self) -> None:
        """See LeaseQueue."""
        self._run("close")

    def stats(self) -> QueueStats:
        """See LeaseQueue."""
        *counts, ctl, workers = self._run("stats", int(rules.WORKER_GRACE_S * 1000))
        ready, delayed, leased, done, dead = counts
        redelivered, stored_bytes, closed, full = (int(value or 0) for value in ctl)
        roles = [worker.decode().partition(" ")[0] for worker in workers]
        return QueueStats(
            name=self.name,
            ready=ready,
            delayed=delayed,
            leased=leased,
            done=done,
            dead=dead,
            redelivered=redelivered,
            stored_bytes=stored_bytes,
            closed=bool(closed),
            full=bool(full),
            workers={role: roles.count(role) for role in sorted(set(roles))},
        )

    def dead_letters(self) -> Iterator[DeadLetter]:
        """See LeaseQueue."""
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, flat = self._client.call("HSCAN", self.key("dead"), cursor, "COUNT", rules.PAGE)
            found = {
                item_id: reason for item_id, reason in zip(flat[::2], flat[1::2], strict=True) if item_id not in seen
            }
            seen.update(found)
            yield from self._read_dead(found)
            if cursor == b"0":
                return

    def _read_dead(self, found: dict[bytes, bytes]) -> Iterator[DeadLetter]:
        if not found:
            return
        payloads = self._client.call("HMGET", self.key("ref"), *found)
        counts = self._client.call("HMGET", self.key("deliveries"), *found)
        for (item_id, reason), payload, count in zip(found.items(), payloads, counts, strict=True):
            # requeued and done by now
            if payload is not None:
                yield DeadLetter(item_id.decode(), reason.decode(), int(count or 0), payload)

    def requeue(self, ids: Sequence[str]) -> int:
        """See LeaseQueue."""
        starts = range(0, len(ids), MAX_BATCH)
        return sum(self._run("requeue", *ids[start : start + MAX_BATCH], repeatable=False) for start in starts)

    def payloads(self) -> Iterator[LeasedItem]:
        """See LeaseQueue."""
        last = b"0"
        while page := self._run("page", last, rules.PAGE):
            last, *columns = page
            for item_id, payload, count in zip(*columns, strict=True):
                yield LeasedItem(item_id.decode(), payload, int(count or 0))

    def purge(self) -> int:
        """See LeaseQueue."""
        held: int = self._run("purge", repeatable=False)
        return held


def _wire(item: QueueItem) -> tuple[str, bytes, str, int]:
    return item.id, item.payload, rules.digest(item.payload), item.stored_bytes
