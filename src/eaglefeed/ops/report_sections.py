"""A report's document as a page: its figures at the top, and its sections in the order in which one asks."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from eaglefeed.ops.report_outcome import STATES
from eaglefeed.ops.report_panels import time_panels, training_panels
from eaglefeed.ops.report_parts import Event, Figure, Flow, Page, Part, Section
from eaglefeed.ops.report_tables import (
    dead_table,
    evaluation_table,
    feed_table,
    lane_table,
    pace_table,
    queue_table,
    reason_table,
    rejection_table,
    trainer_table,
    worker_table,
)
from eaglefeed.ops.report_values import number
from eaglefeed.ops.wording import count, duration, human_bytes, significant, timestamp

__all__ = ["report_page"]

_Document = Mapping[str, Any]
_EVENTS = 200


def report_page(document: _Document) -> Page:
    """The page of a document that `report_document` made."""
    ended = document["outcome"]
    makers = (_items, _over_time, _training, _trouble, _fed, _workers, _contract, _timeline, _unknown)
    return Page(
        run=document["run"],
        state=ended["state"],
        state_words=STATES[ended["state"]],
        sentence=ended["sentence"],
        why=_why(document),
        when=_when(document),
        figures=list(_figures(document)),
        sections=[section for make in makers if (section := make(document)) is not None],
        version=document["eaglefeed"],
    )


def _why(document: _Document) -> str:
    """The bottleneck, unless the outcome says it all."""
    if document["outcome"]["state"] == "done":
        return "`eaglefeed queue dead ls` lists what was set aside, with its reasons." if document["dead"] else ""
    return _sentence(document["bottleneck"]["sentence"])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _when(document: _Document) -> str:
    started_s, seen_s = document["started_s"], document["last_sign_s"]
    told = [f"Begun {timestamp(started_s)}"] if started_s is not None else []
    if started_s is not None and seen_s is not None:
        told.append(f"last sign of life {timestamp(seen_s)}, {duration(seen_s - started_s)} later")
    return _sentence(", ".join([*told, f"read {timestamp(document['at_s'])} UTC"]))


def _figures(document: _Document) -> Iterator[Figure]:
    lanes, fed, producers = document["lanes"], document["fed"], document["producers"]
    behind = max(lanes, key=lambda lane: lane["left"])
    total = max(lane["total"] for lane in lanes)
    yield Figure("fed", count(total), f"{count(fed['queued_tokens'])} tokens" if fed["queued_tokens"] else "items")
    if fed["rejected"]:
        yield Figure("rows rejected", count(fed["rejected"]), "while feeding", is_trouble=True)
    size = human_bytes(producers["num_bytes"]) if producers["num_bytes"] else ""
    yield Figure("produced", count(document["produced"]), f"{size} written" if size else "")
    steps = [trainer["step"] for trainer in document["trainers"] if trainer["step"] is not None]
    yield Figure("trained", count(behind["trained"]), f"step {count(max(steps))}" if steps else "")
    redelivered = max(lane["redelivered"] for lane in lanes)
    yield Figure("redelivered", count(redelivered), "failures and crashes" if redelivered else "")
    dead = sum(each["letters"] for each in document["dead"])
    yield Figure("dead letters", count(dead), "set aside" if dead else "", is_trouble=bool(dead))
    yield from _lengths(document)


def _lengths(document: _Document) -> Iterator[Figure]:
    measured = number(document["evaluation"] or {}, "accept_length")
    estimates = [trainer["accept_length_estimate"] for trainer in document["trainers"]]
    known = [value for value in estimates if value is not None]
    if measured is not None:
        yield Figure("acceptance length", significant(measured), "measured")
    elif known:
        yield Figure("acceptance length", significant(max(known)), "estimated from training")


def _items(document: _Document) -> Section | None:
    lanes = [lane for lane in document["lanes"] if lane["total"]]
    if not lanes:
        return None
    tables = [lane_table(document)] if len(lanes) > 1 else []
    flows = [_flow(lane, lane["title"].capitalize() if len(lanes) > 1 else "") for lane in lanes]
    return Section(id="items", title="Where the items are", flows=flows, tables=[*tables, queue_table(document)])


def _flow(lane: Mapping[str, Any], title: str) -> Flow:
    named = (
        ("trained and committed", lane["done"], 2),
        ("trained, waiting for a commit", lane["tentative"], 3),
        ("leased", lane["leased"], 0),
        ("ready", lane["waiting"], 1),
        ("not produced yet", lane["to_produce"], 6),
        ("dead", lane["dead"], 4),
    )
    known = [(name, number_of, color) for name, number_of, color in named if number_of]
    parts = [Part(name, count(number_of), number_of / lane["total"], color) for name, number_of, color in known]
    summary = ", ".join(f"{part.name} {part.words}" for part in parts)
    return Flow(title, summary, parts)


def _over_time(document: _Document) -> Section | None:
    drawings = time_panels(document)
    tables = [table for table in (pace_table(document),) if table is not None]
    note = "" if drawings else "No worker ran long enough to measure anything over time."
    return Section(id="time", title="Over time", drawings=drawings, tables=tables, note=note)


def _training(document: _Document) -> Section | None:
    drawings = training_panels(document)
    tables = [table for table in (evaluation_table(document), trainer_table(document)) if table is not None]
    note = "" if drawings or tables else "No trainer has told of itself yet."
    return Section(id="training", title="Training", drawings=drawings, tables=tables, note=note)


def _trouble(document: _Document) -> Section | None:
    tables = [dead_table(document), reason_table(document), rejection_table(document)]
    known = [table for table in tables if table is not None]
    note = "" if known else "No dead letters, and no rejected rows that this report knows of."
    return Section(id="trouble", title="Trouble", tables=known, note=note)


def _fed(document: _Document) -> Section | None:
    table = feed_table(document)
    return None if table is None else Section(id="fed", title="What was fed", tables=[table])


def _workers(document: _Document) -> Section | None:
    if not document["workers"]:
        return None
    return Section(id="workers", title="Who worked", tables=[worker_table(document)])


def _contract(document: _Document) -> Section | None:
    contract = document["contract"]
    if contract is None:
        return None
    pairs = [("contract", document["contract_id"]), *((name, _value(value)) for name, value in contract.items())]
    note = "What stayed equal over the run; whoever differed in one field was refused."
    return Section(id="contract", title="Contract", pairs=[pair for pair in pairs if pair[1]], note=note)


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _timeline(document: _Document) -> Section | None:
    events = document["timeline"]
    if not events:
        return None
    first, rest = events[: _EVENTS // 2], events[_EVENTS // 2 :][-_EVENTS // 2 :]
    left_out = len(events) - len(first) - len(rest)
    note = f"{count(left_out)} events in the middle are left out here; report.json has all." if left_out else ""
    return Section(id="timeline", title="Timeline", events=[_event(each) for each in [*first, *rest]], note=note)


def _event(event: Mapping[str, Any]) -> Event:
    at = datetime.fromtimestamp(event["at_s"], UTC)
    return Event(timestamp(event["at_s"]), f"{at:%Y-%m-%dT%H:%M:%SZ}", event["what"])


def _unknown(document: _Document) -> Section | None:
    if not document["unknown"]:
        return None
    return Section(id="unknown", title="What this report does not know", items=document["unknown"])
