"""Histories made by hand, a call after the other."""

from itertools import count
from typing import Any

from faults.chaos.history import Final, check, tell
from faults.chaos.record import FOREVER, Call

PLACE = "samples/draft"
_tick = count(1000, 10)


def call(op: str, **fields: Any) -> Call:
    """A call that was answered, later than every call that was made before it in the test."""
    start = next(_tick)
    defaults: dict[str, Any] = {"place": PLACE, "start": start, "end": start + 5, "outcome": "yes"}
    return Call(op=op, **(defaults | fields))


def put(*ids: str, **fields: Any) -> Call:
    return call("put", place="samples", ids=ids, **fields)


def lease(token: int, *ids: str, at: int, n: int = 1, **fields: Any) -> Call:
    """Granted at server time `at` for 100 ms, each item for the `n`th time."""
    return call("lease", token=token, ids=ids, counts=(n,) * len(ids), deadline_ms=at + 100, timeout_ms=100, **fields)


def ack(token: int, *ids: str, ok: tuple[str, ...] | None = None, **fields: Any) -> Call:
    return call("ack", token=token, ids=ids, ok=ids if ok is None else ok, **fields)


def nack(token: int, item_id: str, mode: str, **fields: Any) -> Call:
    return call("nack", token=token, ids=(item_id,), ok=(item_id,), mode=mode, **fields)


def restore(session: int, step: int, *seen: str, origin: int = 0, **fields: Any) -> Call:
    return call("restore", session=session, step=step, ids=seen, origin=origin, **fields)


def lost(made: Call) -> Call:
    """The same call without a reply: it may have happened at any time from its start on."""
    reply = {"token": 0, "ids": (), "counts": ()} if made.op == "lease" else {}
    reply |= {"session": 0} if made.op == "restore" else {}
    return Call(**(vars(made) | reply | {"outcome": "maybe", "end": FOREVER, "ok": ()}))


def faults(*calls: Call, done: int = 1, dead: str = "", model: str | None = None, unsettled: int = 0) -> list[str]:
    learned = None if model is None else tuple(model.split())
    final = Final(done=done, dead=frozenset(dead.split()), model=learned, unsettled=unsettled)
    return check(tell(calls, {PLACE: final}, max_deliveries=2))


def refute(fault: str, *calls: Call, **final: Any) -> None:
    found = faults(*calls, **final)
    assert any(fault in each for each in found), found
