"""A run as it goes: how fast, how long it will take, and who waits for whom."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from eaglefeed.ops.bottleneck import Bottleneck, Waits, bottleneck, waits
from eaglefeed.ops.facts import RunFacts
from eaglefeed.ops.series import queue_key
from eaglefeed.queue.base import MAIN_GROUP, QueueStats
from eaglefeed.queue.rules import epoch_queue

__all__ = ["LAST_POINTS", "Look", "Speed", "Watch"]

LAST_POINTS = 64
"""Points of the journal that a look needs: those of the last ten minutes."""
_RECENT_S, _KEPT_S, _MAX_MARKS = 30.0, 300.0, 1000
_PUT = ("ready", "delayed", "leased", "tentative", "held", "done", "dead")
_TRAINED = ("tentative", "done")
_AT_REST = ("server_refuses", "no_workers", "no_producers", "no_trainers", "stalled")
"""Kinds of bottleneck with which the rest is never done, however fast it went before."""


class Speed(NamedTuple):
    """How far something got, and how much of it a second; None where nobody knows yet.

    Args:
        name: "fed", "produced" or "trained", the last with the queue and group that it is of where there are several.
        total: items so far.
        recent: of the last half minute or so.
        mean: since the run began.
    """

    name: str
    total: int
    recent: float | None
    mean: float | None


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    Args:
        facts: what was read.
        speeds: of what was fed, produced and trained on.
        eta_s: until the slowest group has trained on all that was fed, if it goes on like this; None where it does not.
        bottleneck: what holds it up.
        waits: who waits.
    """

    facts: RunFacts
    speeds: tuple[Speed, ...]
    eta_s: float | None
    bottleneck: Bottleneck
    waits: Waits

    def to_json(self, *, series: bool) -> dict[str, Any]:
        """Plain data; see RunFacts. The journal's points are many, and may be left out."""
        facts = self.facts.to_json()
        if not series:
            del facts["journal"]["series"]
        speeds = [speed._asdict() for speed in self.speeds]
        found = {"bottleneck": self.bottleneck._asdict(), "waits": self.waits._asdict()}
        return facts | found | {"speeds": speeds, "eta_s": self.eta_s}


class _Mark(NamedTuple):
    at_s: float
    counts: dict[str, float]


class Watch:
    """Makes looks of facts, each with what has changed since the ones before, or since the journal's points."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=_MAX_MARKS)

    def look(self, facts: RunFacts) -> Look:
        """The newest facts, and how fast it goes."""
        if not self._marks:
            self._marks.extend(_Mark(point["at_s"], _counts_in(point, facts)) for point in facts.journal.series)
        self._marks.append(_Mark(facts.at_s, _counts_now(facts)))
        since_s = facts.at_s - max(_KEPT_S, 2 * facts.journal.bucket_s)
        while self._marks[0].at_s < since_s:
            self._marks.popleft()
        speeds = self._speeds(facts)
        found = bottleneck(facts)
        eta_s = None if found.kind in _AT_REST else _eta_s(facts, speeds)
        return Look(facts, speeds, eta_s, found, waits(facts))

    def _speeds(self, facts: RunFacts) -> tuple[Speed, ...]:
        newest = self._marks[-1]
        older = [mark for mark in self._marks if mark.at_s <= newest.at_s - _RECENT_S]
        before = older[-1] if older else self._marks[0]
        speeds = []
        for name, count in newest.counts.items():
            recent = _rate(count - before.counts.get(name, 0), newest.at_s - before.at_s)
            speeds.append(Speed(name, int(count), recent, _mean(facts, name, count)))
        return tuple(speeds)


def _rate(count: float, seconds: float) -> float | None:
    """None too early to say, and where a trainer went back, or a queue was purged."""
    return count / seconds if seconds >= 1 and count >= 0 else None


def _mean(facts: RunFacts, name: str, count: float) -> float | None:
    """A later epoch began later than the run, nobody noted when."""
    is_later = any(name == _trained(each) for each in facts.samples.values() if each.name != epoch_queue(0))
    if facts.started_s is None or is_later:
        return None
    return _rate(count, (facts.ended_s or facts.at_s) - facts.started_s)


def _trained(stats: QueueStats) -> str:
    of = [part for part, plain in ((stats.name, epoch_queue(0)), (stats.group, MAIN_GROUP)) if part != plain]
    return " ".join(["trained", *of])


def _counts(facts: RunFacts, value: Callable[[QueueStats, str], float]) -> dict[str, float]:
    """What was fed, produced and trained on, where `value` says each count of a queue."""
    counts = {"fed": sum(value(facts.prompts, name) for name in _PUT), "produced": 0.0}
    for each in facts.samples.values():
        if each.name == epoch_queue(0):
            counts["produced"] = sum(value(each, name) for name in _PUT)
        counts[_trained(each)] = sum(value(each, name) for name in _TRAINED)
    return counts


def _counts_now(facts: RunFacts) -> dict[str, float]:
    return _counts(facts, getattr)


def _counts_in(point: dict[str, float], facts: RunFacts) -> dict[str, float]:
    """A queue that the point does not know was not there yet."""
    return _counts(facts, lambda stats, name: point.get(queue_key(stats.name, stats.group, name), 0.0))


def _eta_s(facts: RunFacts, speeds: tuple[Speed, ...]) -> float | None:
    by_name, longest_s = {speed.name: speed for speed in speeds}, 0.0
    for each in facts.samples.values():
        left = each.ready + each.delayed + each.leased + each.parked
        if each.name == epoch_queue(0):
            left += facts.prompts.ready + facts.prompts.delayed + facts.prompts.leased
        speed = by_name[_trained(each)]
        rate = speed.mean if speed.recent is None else speed.recent
        if left and not rate:
            return None
        longest_s = max(longest_s, left / rate if rate else 0.0)
    return longest_s if facts.is_fed else None
