"""The lease queue on Redis or Valkey: calls and replies. What a call does stands in `lua/<call>.lua`."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, fields

from eaglefeed.errors import IdConflict, QueueClosed, QueueFull, StaleLease
from eaglefeed.queue import replies, rules
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
from eaglefeed.queue.redis_keys import RedisKeys, batched

__all__ = ["RedisLeaseQueue"]

_POLL_S = 1.0
_FORGET_WORKER_MS = 600_000
_MAX_ONE_BY_ONE = 100
"""Ids a call may name of which the server must look for each."""


class RedisLeaseQueue(RedisKeys, LeaseQueue):
    """One queue of a run on a server."""

    def configure(self, limits: QueueLimits, *, groups: Sequence[str] = ()) -> None:
        """See LeaseQueue."""
        names = " ".join(sorted(rules.check_name("group", group) for group in set(groups)))
        status, *rest = self._run("configure", names, *(part for pair in asdict(limits).items() for part in pair))
        if status == b"groups":
            raise rules.groups_are_fixed(self.name, rest[0].decode().split(), groups)

    def limits(self) -> QueueLimits:
        """See LeaseQueue."""
        names = [field.name for field in fields(QueueLimits)]
        stored = self._client.call("HMGET", self.key("ctl"), *names)
        told = {name: value for name, value in zip(names, stored, strict=True) if value is not None}
        return QueueLimits(**{name: type(getattr(QueueLimits(), name))(value) for name, value in told.items()})

    def put(self, items: Sequence[QueueItem]) -> PutResult:
        """See LeaseQueue."""
        accepted = duplicate = depth = 0
        for chunk in rules.chunks(items):
            new, depth = self._put_chunk(chunk)
            accepted, duplicate = accepted + new, duplicate + len(chunk) - new
        return PutResult(accepted, duplicate, depth)

    def _put_chunk(self, chunk: Sequence[QueueItem]) -> tuple[int, int]:
        if not chunk:
            return 0, self._client.call("ZCARD", self.key("seq"))
        status, *rest = self._run("put", " ".join(self.groups()), *(part for item in chunk for part in _wire(item)))
        if status == b"conflict":
            raise IdConflict(self.name, rest[0].decode())
        if status == b"closed":
            raise QueueClosed(self.name)
        if status == b"full":
            raise QueueFull(self.name, depth=rest[0], max_depth=rest[1])
        if status == b"groups":
            return self._put_chunk(chunk)
        return int(rest[0]), int(rest[1])

    def lease(
        self, n: int, *, visibility_timeout_s: float, consumer: str, wait_s: float = 0.0, session: int = 0
    ) -> Lease | NoLease:
        """See LeaseQueue."""
        rules.check_batch(n)
        who = " ".join(consumer.split()) or "-"
        clock = self._client.clock
        end_s = clock.monotonic() + wait_s
        while True:
            told = self._newest_token, int(self._declared is not None)
            status, *rest = self._run("lease", n, int(visibility_timeout_s * 1000), who, session, *told)
            if status == b"lease":
                self._newest_token = max(self._newest_token, int(rest[0]))
                return replies.read_lease(rest)
            if status == b"lost":
                self._note_loss(is_there=bool(rest[0]))
                continue
            self._check_session("lease", status, rest, session)
            next_ms, now_ms = map(int, rest)
            if 0 < next_ms <= now_ms:
                continue
            left_s = end_s - clock.monotonic()
            if status != b"empty" or left_s <= 0:
                return NoLease(DrainState(status.decode()), next_ms)
            due_s = (next_ms - now_ms) / 1000 if next_ms else _POLL_S
            self._wait_for("wake", min(left_s, due_s))

    @staticmethod
    def _check_session(operation: str, status: bytes, rest: list[bytes], session: int) -> None:
        if status == b"session":
            raise StaleLease.of_session(operation, session, int(rest[0]))

    def renew(self, token: int, *, visibility_timeout_s: float) -> int:
        """See LeaseQueue."""
        deadline_ms: int = self._run("renew", token, int(visibility_timeout_s * 1000))
        if not deadline_ms:
            raise StaleLease("renew", token)
        return deadline_ms

    def ack(self, token: int, ids: Sequence[str], *, step: int | None = None, session: int = 0) -> AckResult:
        """See LeaseQueue."""
        return self._settle("ack", (token, session, "-" if step is None else step), ids, session=session)

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
        mode: tuple[str, float] = ("dead", 0)
        if retryable and delay_s is None:
            mode = ("backoff", self._jitter())
        elif retryable:
            mode = ("delay", int(delay_s * 1000)) if delay_s else ("head", 0)
        return self._settle("nack", (token, *mode, int(counted), rules.short_reason(reason)), ids)

    def _settle(self, script: str, head: tuple[str | float, ...], ids: Sequence[str], *, session: int = 0) -> AckResult:
        rules.check_ids(ids)
        flags = b""
        for start in range(0, max(len(ids), 1), MAX_BATCH):
            status, *rest = self._run(script, *head, "\n".join(ids[start : start + MAX_BATCH]))
            self._check_session(script, status, rest, session)
            flags += rest[0] if rest else b""
        if flags == b"1" * len(ids):
            return AckResult(tuple(ids), ())
        pairs = list(zip(ids, flags.decode(), strict=True))
        return AckResult(tuple(i for i, held in pairs if held == "1"), tuple(i for i, held in pairs if held == "0"))

    def commit(self, step: int, *, session: int = 0) -> int:
        """See LeaseQueue."""
        settled, more = 0, True
        while more:
            status, *rest = self._run("commit", step, session)
            self._check_session("commit", status, rest, session)
            settled, more = settled + int(rest[0]), bool(int(rest[1]))
        return settled

    def restore(self, step: int, *, seen: Sequence[str] = ()) -> int:
        """See LeaseQueue."""
        session, _ = self._restore("open", 0, step)
        chunks = [seen[at : at + _MAX_ONE_BY_ONE] for at in range(0, len(seen), _MAX_ONE_BY_ONE)]
        for stage, ids in (("gather", ()), *(("settle", chunk) for chunk in chunks), ("finish", ())):
            more = True
            while more:
                _, more = self._restore(stage, session, step, ids)
        return session

    def _restore(self, stage: str, session: int, step: int, ids: Sequence[str] = ()) -> tuple[int, bool]:
        status, *rest = self._run("restore", stage, session, step, *ids)
        if status == b"committed":
            raise rules.step_is_released(self.name, step, int(rest[0]))
        self._check_session("restore", status, rest, session)
        return int(rest[0]), bool(int(rest[1]))

    def released(self, n: int = MAX_BATCH) -> list[QueueItem]:
        """See LeaseQueue."""
        rows = zip(*self._run("released", n), strict=True)
        return [QueueItem(item_id.decode(), payload, int(size)) for item_id, payload, size in rows]

    def forget(self, ids: Sequence[str]) -> None:
        """See LeaseQueue."""
        for start in range(0, len(ids), MAX_BATCH):
            self._run("forget", *ids[start : start + MAX_BATCH])

    def handoff(self, token: int, prompt_id: str, item: QueueItem, samples: LeaseQueue, *, holder: str = "") -> None:
        """See LeaseQueue."""
        rules.check_item(item)
        rules.check_holder(prompt_id, item, holder)
        target = rules.check_pair(self, samples, RedisLeaseQueue)
        names = " ".join(target.groups())
        status = self._run("handoff", names, token, prompt_id, holder or "-", *_wire(item), to=target)[0]
        if status == b"stale":
            raise StaleLease("handoff", token, prompt_id)
        if status == b"conflict":
            raise IdConflict(samples.name, item.id)
        if status == b"groups":
            self.handoff(token, prompt_id, item, samples, holder=holder)

    def recall(self, samples: LeaseQueue) -> int:
        """See LeaseQueue."""
        target, grace_ms = rules.check_pair(self, samples, RedisLeaseQueue), int(rules.WORKER_GRACE_S * 1000)
        held = self._held()
        places = self._places(held)
        ids = sorted(places, key=places.__getitem__, reverse=True)  # each chunk goes to the head: the last place first
        recalled = 0
        for start in range(0, len(ids), _MAX_ONE_BY_ONE):
            pairs = [part for i in reversed(ids[start : start + _MAX_ONE_BY_ONE]) for part in (i, held[i])]
            recalled += int(self._run("recall", grace_ms, *pairs, to=target)[1])
        return recalled

    def held_for(self, samples: LeaseQueue, *, producer: str = "") -> int:
        """See LeaseQueue."""
        held = [i for i, holder in self._held().items() if producer in ("", holder.decode())]
        return len(rules.check_pair(self, samples, RedisLeaseQueue)._places(held))

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
            self._wait_for("room", left_s)
        return True

    def beat(self, role: str, worker: str) -> None:
        """See LeaseQueue."""
        self._run("beat", f"{role} {worker}", _FORGET_WORKER_MS)

    def farewell(self, role: str, worker: str, *, error: str = "") -> None:
        """See LeaseQueue."""
        self._client.call("ZREM", self._run_key("workers"), f"{role} {worker}")
        if error:
            self._client.call("HSET", self._run_key("run"), rules.LAST_ERROR + role, rules.last_words(worker, error))

    def close(self) -> None:
        """See LeaseQueue."""
        self._run("close")

    def stats(self) -> QueueStats:
        """See LeaseQueue."""
        return replies.read_stats(self._run("stats", int(rules.WORKER_GRACE_S * 1000)), self.name, self.group)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """See LeaseQueue."""
        self._check_group()
        for found in self._pages(self.key("dead")):
            payloads = self._client.call("HMGET", self.key("ref"), *found)
            counts = self._client.call("HMGET", self.key("deliveries"), *found)
            for (item_id, reason), payload, count in zip(found.items(), payloads, counts, strict=True):
                if payload is not None:  # else it was requeued, and is done by now
                    yield DeadLetter(item_id.decode(), reason.decode(), int(count or 0), payload)

    def dead_reasons(self) -> Iterator[tuple[str, str]]:
        """See LeaseQueue."""
        self._check_group()
        for found in self._pages(self.key("dead")):
            yield from ((item_id.decode(), reason.decode()) for item_id, reason in found.items())

    def requeue(self, ids: Sequence[str]) -> int:
        """See LeaseQueue."""
        reopens = int(rules.samples_of(self.name) is not None)
        starts = range(0, len(ids), MAX_BATCH)
        return sum(int(self._run("requeue", reopens, *ids[at : at + MAX_BATCH])[1]) for at in starts)

    def payloads(self) -> Iterator[LeasedItem]:
        """See LeaseQueue."""
        last = b"0"
        while page := self._run("page", last, rules.PAGE):
            last, *columns = page
            for item_id, payload, count in zip(*columns, strict=True):
                yield LeasedItem(item_id.decode(), payload, count)

    def find(self, ids: Collection[str]) -> list[QueueItem]:
        """See LeaseQueue."""
        found = []
        for chunk in batched(ids):
            payloads = self._client.call("HMGET", self.key("ref"), *chunk)
            sizes = self._client.call("HMGET", self.key("bytes"), *chunk)
            rows = zip(chunk, payloads, sizes, strict=True)
            found += [QueueItem(i, payload, int(size or 0)) for i, payload, size in rows if payload is not None]
        return found

    def known(self, ids: Collection[str]) -> set[str]:
        """See LeaseQueue."""
        return self._fields("digest", ids)

    def leased(self, tokens: Collection[int]) -> set[int]:
        """See LeaseQueue."""
        names = [str(token) for token in tokens]
        return {int(name) for group in self.groups() for name in self._fields("state", names, group)}

    def agree(self, name: str, value: bytes) -> bytes:
        """See LeaseQueue."""
        while True:
            # a look first, which also a server out of memory grants
            stands: bytes | None = self._client.call("HGET", self._run_key("run"), name)
            if stands is not None:
                return stands
            self._client.call("HSETNX", self._run_key("run"), name, value)

    def agreed(self) -> dict[str, bytes]:
        """See LeaseQueue."""
        pages = self._pages(self._run_key("run"))
        return {name.decode(): value for page in pages for name, value in page.items()}

    def purge(self) -> int:
        """See LeaseQueue."""
        return int(self._run("purge", int(rules.prompts_of(self.name) is not None))[1])


def _wire(item: QueueItem) -> tuple[str, bytes, str, int]:
    return item.id, item.payload, rules.digest(item.payload), item.stored_bytes
