"""What a run tells of itself beside its queues: its workers, points over time, and facts.

It lies on the queue's server, so that any machine can read it, also when every process of the run is dead. It is
bounded, whoever writes: MAX_WORKERS snapshots, MAX_POINTS points, MAX_KEPT facts of a kind. Times are the server's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from eaglefeed.errors import QueueError
from eaglefeed.queue import rules
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.scripts import Keys, load

__all__ = ["MAX_KEPT", "MAX_POINTS", "MAX_VALUE_BYTES", "MAX_WORKERS", "JournalView", "RunJournal", "WorkerView"]

MAX_WORKERS = 1000
MAX_POINTS = 2048
MAX_KEPT = 100
MAX_VALUE_BYTES = 64 * 2**10
_BUCKET_MS = 10_000
_END_MS = 253_402_300_800_000
"""The year 10000, which no calendar here can show."""
_MAX_DIGITS = 19
_KEYS = ("workers", "seen", "series", "pace", "facts", "totals")


@dataclass(frozen=True)
class WorkerView:
    """A worker's newest snapshot: what it told of itself at `at_s`, unix s of the server."""

    role: str
    name: str
    at_s: float
    values: dict[str, Any]


@dataclass(frozen=True)
class JournalView:
    """All that a journal holds.

    Args:
        workers: by role and name, also those that have ended.
        series: points, the oldest first, each with its "at_s", unix s of the server.
        facts: by name, each with its "at_s"; "feed:1", "feed:2" and so on are those of a kind.
        totals: "feed.count": how many facts of a kind there were, also those that are not kept, and sums over all of
            them; "forgotten_workers".
        bucket_s: a point stands for so long by now.
        unreadable: entries that are none, left out.
    """

    workers: tuple[WorkerView, ...] = ()
    series: tuple[dict[str, float], ...] = ()
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    bucket_s: float = _BUCKET_MS / 1000
    unreadable: int = 0


class RunJournal:
    """The journal of one run. Every method raises QueueUnavailable when the server is out of reach.

    Args:
        client: to the server of the run's queues.
        run: the run's id.
    """

    def __init__(self, client: QueueClient, run: str) -> None:
        self.run = rules.check_name("run", run)
        self._client = client

    def post(self, role: str, worker: str, values: Mapping[str, Any]) -> None:
        """Keep a worker's newest snapshot, plain values by name; of too many workers the longest silent ones go.

        Raises:
            QueueError: it is larger than MAX_VALUE_BYTES.
        """
        self._run("post", f"{role} {worker}", _encode(f"{role} {worker}", values), MAX_WORKERS)

    def sample(self, point: Callable[[], Mapping[str, float]]) -> bool:
        """Keep a point, made by `point`, unless the run has one for this stretch of time; whoever asks first makes it.

        A stretch is 10 s at first, and twice as long each time that there were more than MAX_POINTS.
        """
        at_ms = self._run("claim", _BUCKET_MS)
        if at_ms == b"0":
            return False
        self._run("point", at_ms, _encode("point", point()), MAX_POINTS, _BUCKET_MS)
        return True

    def note(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a fact, in the place of an earlier one of that name.

        Raises:
            QueueError: it is larger than MAX_VALUE_BYTES.
        """
        self._run("note", name, _encode(name, value))

    def append(self, kind: str, value: Mapping[str, Any], totals: Mapping[str, int] | None = None) -> int:
        """Keep a fact as `<kind>:<n>`, the first MAX_KEPT of them, and add `totals` to the kind's; returns n.

        Raises:
            QueueError: it is larger than MAX_VALUE_BYTES.
        """
        sums = [part for pair in (totals or {}).items() for part in pair]
        number = self._run("append", kind, _encode(kind, value), MAX_KEPT, *sums)[0]
        return int(number)

    def read(self, *, last_points: int = MAX_POINTS) -> JournalView:
        """All of it, or of the points only the last ones."""
        workers = {name: _decode(value) for name, value in self._hash("workers").items()}
        facts = {name: _decode(value) for name, value in self._hash("facts").items()}
        points = [_decode_point(value) for value in self._points(last_points)]
        totals = {name: _count(stored) for name, stored in self._hash("totals").items()}
        bucket_ms = _count(self._client.call("HGET", self._key("pace"), "bucket_ms") or b"")
        found = [*workers.values(), *facts.values(), *points, *totals.values()]
        return JournalView(
            workers=tuple(_worker(name, value) for name, value in sorted(workers.items()) if value is not None),
            series=tuple(_numbers(point) for point in points if point is not None),
            facts={name: value for name, value in sorted(facts.items()) if value is not None},
            totals={name: count for name, count in totals.items() if count is not None},
            bucket_s=(bucket_ms or _BUCKET_MS) / 1000,
            unreadable=found.count(None),
        )

    def delete(self) -> None:
        """Delete all of it."""
        self._client.call("UNLINK", *map(self._key, _KEYS))

    def _points(self, last: int) -> list[bytes]:
        return list(self._client.call("ZRANGE", self._key("series"), -last, -1)) if last else []

    def _hash(self, key: str) -> dict[str, bytes]:
        """A bounded hash, in one or few replies."""
        cursor, found = b"0", dict[str, bytes]()
        while True:
            cursor, flat = self._client.call("HSCAN", self._key(key), cursor, "COUNT", MAX_WORKERS)
            found.update(zip((name.decode(errors="replace") for name in flat[::2]), flat[1::2], strict=True))
            if cursor == b"0":
                return found

    def _key(self, name: str) -> str:
        return f"eaglefeed:{{{self.run}}}:journal:{name}"

    def _run(self, name: str, *args: str | bytes | float) -> Any:
        script = load(name)
        prefix = f"eaglefeed:{{{self.run}}}"
        names = {"replay": f"{prefix}:replay:{self._client.id}"}
        keys = Keys([names.get(key) or self._key(key.removeprefix("journal_")) for _, key in script.keys])
        if not script.replays:
            return self._client.run(script, keys, args)
        call = f"journal/{name}"
        with self._client.turn(f"{self.run}/{call}"):
            return self._client.run(script, keys, (*args, self._client.next_number(), call))


def _encode(subject: str, value: Mapping[str, Any]) -> bytes:
    data: bytes = msgpack.packb(dict(value), unicode_errors="backslashreplace")
    if len(data) > MAX_VALUE_BYTES:
        wanted = f"at most {MAX_VALUE_BYTES} bytes"
        raise QueueError("too large for the run's journal", subject=subject, wanted=wanted, got=len(data))
    return data


def _decode(stored: bytes) -> dict[str, Any] | None:
    """A value with its "at_s"; None for what is none: anybody who may write to the server may have put it there."""
    at_ms, _, data = stored.partition(b"\n")
    try:
        value = msgpack.unpackb(data, strict_map_key=True)
        if isinstance(value, dict) and _is_plain(value) and 0 <= int(at_ms) < _END_MS:
            return value | {"at_s": int(at_ms) / 1000}
    except (ValueError, OverflowError, RecursionError, msgpack.UnpackException):
        pass
    return None


def _count(stored: bytes) -> int | None:
    return int(stored) if len(stored) < _MAX_DIGITS and stored.isdigit() else None


def _is_plain(value: object) -> bool:
    """Whether it could be JSON: no bytes and no extension types, which also are no keys."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _decode_point(stored: bytes) -> dict[str, float] | None:
    value = _decode(stored)
    return value if value is not None and all(isinstance(part, int | float) for part in value.values()) else None


def _numbers(point: dict[str, Any]) -> dict[str, float]:
    """Its finite numbers: whoever reads points reckons with them."""
    return {name: value for name, value in point.items() if isinstance(value, int | float) and math.isfinite(value)}


def _worker(name: str, values: dict[str, Any]) -> WorkerView:
    role, _, worker = name.partition(" ")
    return WorkerView(role, worker, values.pop("at_s"), values)
