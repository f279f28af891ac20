"""What the queue and the run's journal say of the whole run, as readings of metrics."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from eaglefeed.metrics import Reading
from eaglefeed.ops.facts import RunFacts
from eaglefeed.queue.values import QueueLimits, QueueStats

__all__ = ["feed_readings", "queue_readings", "run_readings"]

_FEED, _FEED_TOTAL = "feed:", "feed."
_STATES = ("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released")
_ROLES = ("producer", "trainer")
_MAX_REASONS, _MAX_REASON_CHARS = 20, 80
_OUTCOMES = {"accepted": "accepted", "duplicates": "duplicate", "rejected": "rejected"}
"""What a feed's fact calls it → outcome."""


def run_readings(facts: RunFacts) -> list[Reading]:
    """All of them."""
    dead = {where: letters.by_class for where, letters in facts.dead.items()}
    feeds = [fact for name, fact in facts.journal.facts.items() if name.startswith(_FEED)]
    readings = queue_readings(facts.run, facts.stats, facts.limits, dead)
    return [*readings, *feed_readings(facts.run, feeds, facts.journal.totals)]


def queue_readings(
    run: str,
    stats: Sequence[QueueStats],
    limits: Mapping[str, QueueLimits],
    dead: Mapping[tuple[str, str], Mapping[str, int]],
) -> Iterator[Reading]:
    """Exact counts.

    Args:
        run: the run's id.
        stats: of every queue, as each of its groups sees it.
        limits: of every queue.
        dead: queue, group → class of reason → dead letters.
    """
    yield from _by_group(run, stats)
    yield from _by_queue(run, stats, limits)
    for role in _ROLES:
        yield Reading("eaglefeed_workers", stats[0].workers.get(role, 0), (run, role))  # of the run, whichever is asked
    for (queue, group), reasons in dead.items():
        for reason, count in _bounded(reasons):
            yield Reading("eaglefeed_dead_letters", count, (run, queue, group, reason))


def _by_group(run: str, stats: Sequence[QueueStats]) -> Iterator[Reading]:
    for each in stats:
        for state in _STATES:
            yield Reading("eaglefeed_items", getattr(each, state), (run, each.name, each.group, state))
    fields: dict[str, Callable[[QueueStats], float]] = {
        "eaglefeed_oldest_ready_age_seconds": lambda each: each.oldest_ready_s,
        "eaglefeed_redelivered_total": lambda each: each.redelivered,
        "eaglefeed_committed_step": lambda each: each.committed_step,
    }
    for name, value in fields.items():
        for each in stats:
            yield Reading(name, value(each), (run, each.name, each.group))


def _by_queue(run: str, stats: Sequence[QueueStats], limits: Mapping[str, QueueLimits]) -> Iterator[Reading]:
    first = {each.name: each for each in reversed(stats)}  # bytes and flags are the same for each group
    unsettled = {name: max(each.unsettled for each in stats if each.name == name) for name in limits}
    per_queue: dict[str, Callable[[str], float]] = {
        "eaglefeed_resident_items": lambda name: unsettled[name],
        "eaglefeed_resident_bytes": lambda name: first[name].stored_bytes,
        "eaglefeed_full": lambda name: first[name].full,
        "eaglefeed_closed": lambda name: first[name].closed,
    }
    for metric, value in per_queue.items():
        for name in limits:
            yield Reading(metric, float(value(name)), (run, name))
    for unit, field in (("items", "count"), ("bytes", "bytes")):
        for name, limit in limits.items():
            for mark in ("high", "low"):
                yield Reading(f"eaglefeed_limit_{unit}", getattr(limit, f"{mark}_{field}"), (run, name, mark))


def feed_readings(run: str, feeds: Sequence[Mapping[str, object]], totals: Mapping[str, int]) -> Iterator[Reading]:
    """What the run's feeds noted.

    Args:
        run: the run's id.
        feeds: the facts that are kept, with reasons → rejected rows. Whoever may write to the queue's server may have
            written them.
        totals: "feed.accepted" and so on → rows of all feeds, also those whose facts are not kept.
    """
    if not feeds:
        return
    for field, outcome in _OUTCOMES.items():
        yield Reading("eaglefeed_fed_rows_total", totals.get(f"{_FEED_TOTAL}{field}", 0), (run, outcome))
    given = (feed.get("reasons") for feed in feeds)
    reasons = Counter[str]()
    for reason, number in chain.from_iterable(each.items() for each in given if isinstance(each, Mapping)):
        reasons[str(reason)[:_MAX_REASON_CHARS]] += _count(number)
    untold = max(0, totals.get(f"{_FEED_TOTAL}rejected", 0) - reasons.total())  # not all are kept
    for reason, count in _bounded(reasons, untold):
        yield Reading("eaglefeed_rejected_rows_total", count, (run, reason))


def _bounded(reasons: Mapping[str, int], untold: int = 0) -> Iterator[tuple[str, int]]:
    """The most frequent ones; the others and those untold together as `other`, which may be one of them."""
    found = Counter(reasons)
    named = dict(found.most_common(_MAX_REASONS))
    if others := found.total() - sum(named.values()) + untold:
        named["other"] = named.get("other", 0) + others
    yield from named.items()


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
