"""A report's tables, from its document."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eaglefeed.ops.report_parts import Table, columns
from eaglefeed.ops.report_values import number, text, whole
from eaglefeed.ops.wording import count, duration, human_bytes, percent, rate, significant, timestamp

__all__ = [
    "dead_table",
    "evaluation_table",
    "feed_table",
    "lane_table",
    "pace_table",
    "queue_table",
    "reason_table",
    "rejection_table",
    "trainer_table",
    "worker_table",
]

_Document = Mapping[str, Any]
_MOST_ROWS = 60
_STATES = ("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released")


def lane_table(document: _Document) -> Table:
    """Each epoch of each group."""
    names = ("total", "trained", "left", "dead", "redelivered")
    rows = [[lane["title"], *(count(lane[name]) for name in names)] for lane in document["lanes"]]
    return Table("Epochs and groups", columns("~epoch", *(f"#{name}" for name in names)), rows)


def queue_table(document: _Document) -> Table:
    """The counts as the queue has them."""
    shown = [name for name in _STATES if any(each[name] for each in document["queues"])]
    rows = [
        [f"{each['name']} ({each['group']})", *(count(each[name]) for name in shown), *_queue_state(each)]
        for each in document["queues"]
    ]
    heads = columns("~queue (group)", *(f"#{name}" for name in shown), "#committed step", "state")
    return Table("The queues' own counts", heads, rows, is_folded=True)


def _queue_state(queue: Mapping[str, Any]) -> list[str]:
    state = "closed" if queue["closed"] else "open"
    return [count(queue["committed_step"]), f"{state}, full" if queue["full"] else state]


def pace_table(document: _Document) -> Table | None:
    """How fast everybody was and what they waited for, over all of the run."""
    producers = document["producers"]
    rows = []
    if producers["workers"]:
        rows.append(_pace_row("producers", producers, "produced", "room", "paused"))
        wait = _wait_cells(producers, "the writer", "write_wait")
        rows.append(["their targets", "", "", "", "", *wait])
    rows += [
        _pace_row(f"trainers of {each['group']}", each, "delivered", "data", "wait") for each in document["trainers"]
    ]
    heads = columns("~who", "#workers", "#worked", "#samples", "#each", "waited for", "#time", "#share")
    note = "Of all workers that told of themselves, from their first to their last sign of life."
    return Table("Pace and waits over the whole run", heads, rows, note) if rows else None


def _pace_row(who: str, sums: Mapping[str, Any], samples: str, waited_for: str, wait: str) -> list[str]:
    pace = rate(sums[samples] / sums["lived_s"]) if sums["lived_s"] else ""
    worked = [count(sums["workers"]), duration(sums["lived_s"]), count(sums[samples]), pace]
    return [who, *worked, *_wait_cells(sums, waited_for, wait)]


def _wait_cells(sums: Mapping[str, Any], waited_for: str, wait: str) -> list[str]:
    return [waited_for, duration(sums[f"{wait}_s"]), _told(sums[f"{wait}_share"], percent)]


def trainer_table(document: _Document) -> Table | None:
    """What each group's newest trainer told last."""
    told = document["trainers"]
    if not told:
        return None
    heads = columns("~group", "#ranks", "#epoch", "#step", "#loss", "~accuracies", "#acceptance length")
    note = (
        "What each group's newest trainer told last, and means of the accuracies over the last ten points of the run. "
        "The acceptance length is an estimate, 1 + a1 + a1·a2 + … of them; decoding held-out prompts measures it."
    )
    return Table("Trainers", heads, [_trainer_row(each) for each in told], note)


def _trainer_row(trainer: Mapping[str, Any]) -> list[str]:
    return [
        trainer["group"],
        *(_told(trainer[name], count) for name in ("world_size", "epoch", "step")),
        _told(trainer["loss"], lambda loss: significant(loss, 4)),
        " ".join(f"{accuracy:.3f}" for accuracy in trainer["accuracies"]),
        _told(trainer["accept_length_estimate"], significant),
    ]


def _told(value: float | None, words: Callable[[float], str]) -> str:
    return "" if value is None else words(value)


def evaluation_table(document: _Document) -> Table | None:
    """Measured acceptance lengths."""
    found = document["evaluation"] or {}
    named = (
        ("accept_length", "trained draft"),
        ("accept_length_untrained", "the same draft before training"),
        ("accept_length_prompt_lookup", "prompt lookup, without a draft"),
    )
    known = [(name, value) for field, name in named if (value := number(found, field)) is not None]
    if not known:
        return None
    rows = [[name, significant(value, 4)] for name, value in known]
    num_prompts, mismatches = number(found, "num_prompts"), number(found, "mismatches")
    note = "Tokens a verifying forward gives"
    note += f", on {count(num_prompts)} held-out prompts" if num_prompts is not None else ""
    note += f"; {count(mismatches)} tokens differ from the target's own." if mismatches is not None else "."
    return Table("Acceptance length, measured", columns("~guesses of", "#tokens"), rows, note)


def dead_table(document: _Document) -> Table | None:
    """Dead letters by the class of their reason, with the first ids."""
    rows = [
        [
            dead_class["class"],
            each["queue"] + ("" if each["group"] == "main" else f" ({each['group']})"),
            count(dead_class["letters"]),
            ", ".join(item_id for item_id, _ in dead_class["first"]),
            dead_class["first"][0][1] if dead_class["first"] else "",
        ]
        for each in document["dead"]
        for dead_class in each["classes"]
    ]
    if not rows:
        return None
    note = "`eaglefeed queue dead show ID` tells more; `eaglefeed queue dead requeue` makes them ready again."
    return Table("Dead letters", columns("~reason", "queue", "#letters", "~first ids", "~first reason"), rows, note)


def reason_table(document: _Document) -> Table | None:
    """Rejected rows by reason."""
    reasons = document["fed"]["reasons"]
    if not reasons:
        return None
    rows = [[reason, count(number_of)] for reason, number_of in list(reasons.items())[:_MOST_ROWS]]
    return Table("Rejected rows by reason", columns("~reason", "#rows"), rows, _cut(len(reasons)))


def rejection_table(document: _Document) -> Table | None:
    """The first rejected rows one by one."""
    found = [_rejection(row) for row in document["fed"]["rejections"]]
    known = [row for row in found if row]
    if not known:
        return None
    return Table("The first rejected rows", columns("line", "~id", "~reason"), known[:_MOST_ROWS], _cut(len(known)))


def _rejection(row: Any) -> list[str]:
    if isinstance(row, Mapping):
        row = [row.get(name, "") for name in ("line", "id", "reason")]
    return [str(cell) for cell in row[:3]] if isinstance(row, Sequence) and len(row) >= 3 else []


def feed_table(document: _Document) -> Table | None:
    """Every feed that is kept one by one."""
    feeds = document["fed"]["feeds"]
    if not feeds:
        return None
    names = ("accepted", "duplicates", "rejected", "queued", "known", "tokens")
    rows = [
        [
            _moment(feed),
            text(feed, "path"),
            *(count(whole(feed, name)) for name in names),
            human_bytes(whole(feed, "num_bytes")),
        ]
        for feed in feeds[:_MOST_ROWS]
    ]
    heads = columns("@at", "~file", *(f"#{name}" for name in names), "#samples take")
    return Table("Feeds", heads, rows, _cut(len(feeds)))


def _moment(values: Mapping[str, Any]) -> str:
    at_s = number(values, "at_s")
    return "" if at_s is None else timestamp(at_s)


def worker_table(document: _Document) -> Table:
    """Who worked, from when to when, and what became of it."""
    people = document["workers"]
    heads = columns("~worker", "role", "@from", "@until", "state", "#samples", "~versions")
    rows = [_worker_row(each) for each in people[:_MOST_ROWS]]
    return Table("Workers", heads, rows, _cut(len(people)))


def _worker_row(worker: Mapping[str, Any]) -> list[str]:
    values = worker["values"]
    samples = number(values, "produced") if worker["role"] == "producer" else number(values, "acked")
    state = worker["state"] or "alive"
    return [
        worker["name"],
        worker["role"],
        "" if worker["started_s"] is None else timestamp(worker["started_s"]),
        timestamp(worker["seen_s"]),
        state if worker["is_alive"] or worker["has_ended"] else f"silent; last {state}",
        _told(samples, count),
        ", ".join(f"{name} {version}" for name, version in worker["versions"].items()) or "",
    ]


def _cut(number_of: int) -> str:
    return f"The first {_MOST_ROWS} of {count(number_of)}; report.json has all that is known." * (
        number_of > _MOST_ROWS
    )
