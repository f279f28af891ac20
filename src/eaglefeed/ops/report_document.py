"""What a report says of a run, as plain data: report.json, and what its page is drawn from. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from eaglefeed.ops.bottleneck import WINDOW_S, Bottleneck, bottleneck
from eaglefeed.ops.facts import RunFacts
from eaglefeed.ops.report_outcome import Lane, lanes, outcome
from eaglefeed.ops.report_people import producers, timeline, trainers, workers
from eaglefeed.ops.report_values import mapping, number, sequence, tidied, whole
from eaglefeed.ops.series import queue_key
from eaglefeed.ops.wording import count
from eaglefeed.queue import rules

__all__ = ["FORMAT", "report_document"]

FORMAT = 1
_SUMMED = ("accepted", "duplicates", "rejected", "items", "tokens", "num_bytes", "queued", "known")
_REJECTIONS = 100


def report_document(facts: RunFacts, *, version: str) -> dict[str, Any]:
    """Everything a report says, by name; units stand in the names, times are unix seconds of the queue's server.

    Args:
        facts: of the run.
        version: of eaglefeed.
    """
    held_up = bottleneck(facts)
    found = lanes(facts.prompts, facts.samples.values())
    people = workers(facts.journal.workers, facts.at_s)
    fed = _fed(facts)
    series = sorted(facts.journal.series, key=lambda point: float(point["at_s"]))
    eta_s = _eta_s(facts, found)
    alive = sum(facts.prompts.workers.values())
    ended = outcome(
        found, is_stuck=_is_stuck(held_up, found), num_alive=alive, is_open=not facts.prompts.closed, eta_s=eta_s
    )
    document: dict[str, Any] = {
        "format": FORMAT,
        "eaglefeed": version,
        "run": facts.run,
        "address": facts.address,
        "at_s": facts.at_s,
        "started_s": facts.started_s,
        "last_sign_s": max((each.at_s for each in facts.journal.workers), default=None),
        "outcome": asdict(ended) | {"eta_s": eta_s},
        "bottleneck": held_up._asdict(),
        "alive": dict(facts.prompts.workers),
        "fed": fed,
        "produced": _produced(facts),
        "producers": producers(people),
        "trainers": trainers(people, series),
        "lanes": [asdict(lane) | {"title": lane.title, "trained": lane.trained, "left": lane.left} for lane in found],
        "queues": [asdict(each) for each in facts.stats],
        "limits": {name: asdict(each) for name, each in facts.limits.items()},
        "storage": _storage(facts),
        "dead": _dead(facts),
        "evaluation": facts.journal.facts.get("evaluation"),
        "contract": facts.contract.model_dump(mode="json") if facts.contract else None,
        "contract_id": facts.contract.id if facts.contract else None,
        "workers": people,
        "timeline": timeline(people, facts.journal.facts),
        "unknown": _unknown(facts, fed),
        "series": series,
    }
    plain: dict[str, Any] = tidied(document)
    return plain


def _is_stuck(held_up: Bottleneck, found: Sequence[Lane]) -> bool:
    """Whether nothing more will happen unless somebody does something, though workers live."""
    behind = max(found, key=lambda lane: lane.left)
    nothing_to_learn = not behind.waiting and not behind.leased
    return held_up.kind == "stalled" or (held_up.kind == "no_producers" and nothing_to_learn)


def _fed(facts: RunFacts) -> dict[str, Any]:
    """What was fed: sums over every feed, also those that the journal does not keep one by one."""
    feeds = [fact for name, fact in facts.journal.facts.items() if name.startswith("feed:")]
    totals = facts.journal.totals
    kept = {name: sum(whole(feed, name) for feed in feeds) for name in _SUMMED}
    reasons = Counter[str]()
    for feed in feeds:
        reasons.update({reason: whole(mapping(feed, "reasons"), reason) for reason in mapping(feed, "reasons")})
    rejections = [row for feed in feeds for row in sequence(feed, "rejections")]
    sums = {name: max(totals.get(f"feed.{name}", 0), number_of) for name, number_of in kept.items()}
    calls = max(totals.get("feed.count", 0), len(feeds))
    return {
        "calls": calls,
        **sums,
        "queued_tokens": sum(map(_queued_tokens, feeds if calls == len(feeds) else [sums])),
        "reasons": dict(reasons.most_common()),
        "rejections": rejections[:_REJECTIONS],
        "feeds": sorted(feeds, key=lambda feed: number(feed, "at_s") or 0.0),
    }


def _queued_tokens(feed: Mapping[str, Any]) -> int:
    """Tokens of what was new to the run, in proportion: what is fed again, or refused, is none of it."""
    return whole(feed, "tokens") * whole(feed, "queued") // max(1, whole(feed, "items"))


def _produced(facts: RunFacts) -> int:
    """Samples of the first epoch that were ever handed off."""
    first = [each for (name, _), each in facts.samples.items() if name == rules.epoch_queue(0)]
    return max((each.unsettled - each.parked + each.done + each.dead for each in first), default=0)


def _storage(facts: RunFacts) -> dict[str, Any]:
    """Bytes that are not released, now and at most, and the marks of the first epoch's queue."""
    name = rules.epoch_queue(0)
    group = next((group for queue, group in facts.samples if queue == name), "")
    key = queue_key(name, group, "stored_bytes")
    now = next((each.stored_bytes for (queue, _), each in facts.samples.items() if queue == name), 0)
    peak = max([now, *(int(value) for point in facts.journal.series if (value := number(point, key)) is not None)])
    limits = facts.limits.get(name)
    marks = ("high_bytes", "low_bytes", "high_count", "low_count")
    return {"stored_bytes": now, "peak_bytes": peak} | {mark: getattr(limits, mark) for mark in marks if limits}


def _dead(facts: RunFacts) -> list[dict[str, Any]]:
    found = []
    for (queue, group), dead in facts.dead.items():
        classes = [
            {"class": name, "letters": number_of, "first": [list(each) for each in dead.examples.get(name, ())]}
            for name, number_of in dead.by_class.items()
        ]
        found.append(
            {"queue": queue, "group": group, "letters": dead.count, "looked_at": dead.looked_at, "classes": classes}
        )
    return found


def _eta_s(facts: RunFacts, found: Sequence[Lane]) -> float | None:
    """How long the group that is furthest behind takes for the rest, by its pace over the last WINDOW_S."""
    behind = max(found, key=lambda lane: lane.left, default=None)
    recent = [point for point in facts.journal.series if facts.at_s - point["at_s"] <= WINDOW_S]
    if behind is None or not behind.left or len(recent) < 2:
        return None
    keys = [queue_key(behind.queue, behind.group, name) for name in ("done", "tentative")]
    first, last = (sum(number(point, key) or 0.0 for key in keys) for point in (recent[0], recent[-1]))
    seconds = recent[-1]["at_s"] - recent[0]["at_s"]
    return behind.left * seconds / (last - first) if last > first and seconds > 0 else None


def _unknown(facts: RunFacts, fed: Mapping[str, Any]) -> list[str]:
    """What is missing here and why, one sentence each."""
    journal, told = facts.journal, []
    if len(journal.series) < 2:
        told.append(
            "No plots over time: the run keeps a point every ten seconds while a worker works, and has fewer than two."
        )
    elif gaps := _gaps(facts):
        told.append(f"Nothing was measured in {count(gaps)} stretches of time, when no worker worked: plots have gaps.")
    told += [
        f"Why letters of {each['queue']} ({each['group']}) are dead is told for the first {count(each['looked_at'])} "
        f"of {count(each['letters'])}."
        for each in _dead(facts)
        if each["looked_at"] < each["letters"]
    ]
    if not fed["calls"] and facts.is_fed:
        told.append("What was rejected while feeding: the queue holds items, and no feed noted itself.")
    if fed["calls"] > len(fed["feeds"]):
        told.append(f"Single feeds after the first {count(len(fed['feeds']))} of {count(fed['calls'])}: sums hold all.")
    if fed["rejected"] > sum(fed["reasons"].values()):
        told.append("The reasons of some rejected rows: their feeds are kept as sums alone.")
    if forgotten := journal.totals.get("forgotten_workers"):
        told.append(f"{count(forgotten)} workers that were silent for longest are forgotten, and missing in sums.")
    if journal.unreadable:
        told.append(f"{count(journal.unreadable)} entries of the run's journal cannot be read and are left out.")
    if facts.contract is None:
        told.append("The contract: no producer has agreed on one yet.")
    if facts.journal.facts.get("evaluation") is None:
        told.append("A measured acceptance length: nothing evaluated the draft; what is shown is estimated.")
    return told


def _gaps(facts: RunFacts) -> int:
    times = [point["at_s"] for point in facts.journal.series]
    return sum(after - before > 4 * facts.journal.bucket_s for before, after in pairwise(times))
