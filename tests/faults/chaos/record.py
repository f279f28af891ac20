"""What every process of a chaos run writes down: each call before it is made, and its reply after.

A line is flushed before the next thing happens, so a killed process loses at most its last reply: that call may have
been carried out or not. Times are time.monotonic_ns, which all processes of a machine share.
"""

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eaglefeed.queue.base import AckResult, DrainState, Lease, LeaseQueue, NoLease, PutResult, QueueItem

FOREVER = 2**63
_IN_FLIGHT_NS = 5 * 10**9
"""A killed process' request may still lie in the server's socket for this long."""
_UNKNOWN = {"QueueUnavailable", "KeyboardInterrupt", "SystemExit"}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call; `place` is "queue/group", `end` the latest time at which it can have been carried out.

    `ids` are those asked for, or those that a lease got; `ok` those that were settled. `mode` says what became of a
    nack's: back, given or dead. `origin` is the session that wrote the checkpoint which is restored.
    """

    op: str
    place: str = ""
    process: str = ""
    start: int = 0
    end: int = FOREVER
    outcome: Literal["yes", "no", "maybe"] = "maybe"
    error: str = ""
    token: int = 0
    session: int = 0
    step: int | None = None
    ids: tuple[str, ...] = ()
    ok: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    payloads: tuple[str, ...] = ()
    deadline_ms: int = 0
    timeout_ms: int = 0
    mode: str = ""
    origin: int = 0


class Recorder:
    """Writes one process' calls to a file of its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._numbers = itertools.count()

    @contextmanager
    def call(self, op: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Write the call, and afterwards its error, or what the block puts into the reply."""
        number, reply = next(self._numbers), dict[str, Any]()
        self._write(n=number, op=op, start=time.monotonic_ns(), **fields)
        try:
            yield reply
        except BaseException as error:
            self._write(n=number, end=time.monotonic_ns(), error=type(error).__name__)
            raise
        self._write(n=number, end=time.monotonic_ns(), **reply)

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def write_death(path: Path) -> None:
    """Note that the process behind `path` is gone since now at the latest."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f'\n{{"died":{time.monotonic_ns()}}}\n')


def read(paths: Iterable[Path]) -> list[Call]:
    """The calls of all files, in the order in which they began."""
    return sorted((call for path in paths for call in _read_file(path)), key=lambda call: call.start)


def _read_file(path: Path) -> Iterator[Call]:
    calls: dict[int, dict[str, Any]] = {}
    died = FOREVER
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:  # empty, or cut short by a kill
            continue
        if "died" in entry:
            died = entry["died"] + _IN_FLIGHT_NS
        else:
            calls.setdefault(entry.pop("n"), {}).update(entry)
    for fields in calls.values():
        yield _to_call(fields, path.stem, died)


def _to_call(fields: dict[str, Any], process: str, died: int) -> Call:
    error = fields.get("error", "")
    unknown = "end" not in fields or error in _UNKNOWN
    fields["outcome"] = "maybe" if unknown else "no" if error else "yes"
    if unknown:
        fields["end"] = died
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Call(**(fields | lists), process=process)


class RecordedQueue:
    """A queue whose calls are written down; what is not written down is at `.queue`."""

    def __init__(self, queue: LeaseQueue, recorder: Recorder) -> None:
        self.queue, self._recorder = queue, recorder
        self.place = f"{queue.name}/{queue.group}"

    def put(self, items: Sequence[QueueItem]) -> PutResult:
        with self._recorder.call("put", place=self.place, ids=[item.id for item in items]):
            return self.queue.put(items)

    def lease(self, n: int, *, timeout_s: float, consumer: str, wait_s: float, session: int = 0) -> Lease | NoLease:
        fields = {"place": self.place, "timeout_ms": int(timeout_s * 1000), "session": session}
        with self._recorder.call("lease", **fields) as reply:
            got = self.queue.lease(n, visibility_timeout_s=timeout_s, consumer=consumer, wait_s=wait_s, session=session)
            if isinstance(got, Lease):
                ids, payloads, counts = zip(*got.items, strict=True)
                reply |= {"token": got.token, "deadline_ms": got.deadline_ms, "ids": ids, "counts": counts}
                reply["payloads"] = [payload.decode() for payload in payloads]
            elif got.state is not DrainState.EMPTY:
                reply["mode"] = got.state.value
            return got

    def renew(self, token: int, *, timeout_s: float) -> int:
        with self._recorder.call("renew", place=self.place, token=token) as reply:
            reply["deadline_ms"] = self.queue.renew(token, visibility_timeout_s=timeout_s)
            return int(reply["deadline_ms"])

    def ack(self, token: int, ids: Sequence[str], *, step: int | None = None, session: int = 0) -> AckResult:
        fields = {"place": self.place, "token": token, "ids": list(ids), "step": step, "session": session}
        with self._recorder.call("ack", **fields) as reply:
            result = self.queue.ack(token, ids, step=step, session=session)
            reply["ok"] = result.ok
            return result

    def nack(
        self, token: int, ids: Sequence[str], *, reason: str, retryable: bool = True, delay_s: float | None = None
    ) -> AckResult:
        mode = "dead" if not retryable else "given" if delay_s == 0 else "back"
        with self._recorder.call("nack", place=self.place, token=token, ids=list(ids), mode=mode) as reply:
            result = self.queue.nack(token, ids, reason=reason, retryable=retryable, delay_s=delay_s)
            reply["ok"] = result.ok
            return result

    def commit(self, step: int, *, session: int) -> int:
        with self._recorder.call("commit", place=self.place, step=step, session=session):
            return self.queue.commit(step, session=session)

    def restore(self, step: int, *, seen: Sequence[str] = (), origin: int = 0) -> int:
        """`origin` is the session that wrote the checkpoint of `step`."""
        with self._recorder.call("restore", place=self.place, step=step, ids=list(seen), origin=origin) as reply:
            reply["session"] = self.queue.restore(step, seen=seen)
            return int(reply["session"])

    def handoff(self, token: int, item: QueueItem, samples: LeaseQueue) -> None:
        """The sample has the prompt's id."""
        fields = {"place": self.place, "token": token, "ids": [item.id], "payloads": [item.payload.decode()]}
        with self._recorder.call("handoff", **fields) as reply:
            self.queue.handoff(token, item.id, item, samples)
            reply["ok"] = [item.id]

    def requeue(self, ids: Sequence[str]) -> int:
        with self._recorder.call("requeue", place=self.place, ids=list(ids)):
            return self.queue.requeue(ids)

    def sweep(self, n: int) -> int:
        """Take up to `n` samples off the released ones, as whoever deletes their shards does; returns how many."""
        with self._recorder.call("released", place=self.queue.name) as reply:
            reply["ids"] = [item.id for item in self.queue.released(n)]
        self.queue.forget(reply["ids"])
        return len(reply["ids"])
