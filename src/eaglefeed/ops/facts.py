"""RunFacts: all that a run's queues and journal tell of it, read once, for whoever shows it."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from eaglefeed.errors import SchemaError
from eaglefeed.ops.reasons import reason_class
from eaglefeed.ops.series import moment
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, LeaseQueue, QueueLimits, QueueStats
from eaglefeed.queue.checks import refuses_writes
from eaglefeed.queue.connection import QueueClient, read_info
from eaglefeed.queue.journal import MAX_POINTS, JournalView, RunJournal
from eaglefeed.schema.contract import CONTRACT_RECORD, RunContract

__all__ = ["LOOK_AT", "DeadFacts", "Queues", "RunFacts", "read_run", "read_stats"]

LOOK_AT = 1000
"""Dead letters that are looked at, of each queue and group."""
_EXAMPLES = 5
_MAX_DEPTH = 8


class Queues(Protocol):
    """A run's queues, as the command line opens them."""

    @property
    def client(self) -> QueueClient:
        """The connection to their server."""

    @property
    def run(self) -> str:
        """The run's id."""

    def named(self, name: str, group: str = MAIN_GROUP) -> LeaseQueue:
        """Any queue of the run, as any of its groups sees it."""


@dataclass(frozen=True)
class DeadFacts:
    """Dead letters of a queue's group.

    Args:
        count: of all of them, exact.
        looked_at: of how many the reasons were read, at most LOOK_AT.
        by_class: reason class → how many of those looked at.
        examples: reason class → the first (id, reason) of them.
    """

    count: int = 0
    looked_at: int = 0
    by_class: dict[str, int] = field(default_factory=dict)
    examples: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """A run at one moment.

    Args:
        run: its id.
        address: of its queues' server, without a password.
        at_s: when it was read, unix s of the server.
        prompts: counts.
        samples: (queue, group) → counts; the first epoch's queue first.
        limits: of each queue, by its name.
        journal: what it tells of itself.
        dead: (queue, group) → its dead letters, where there are any and they were looked at.
        contract: what its producers agreed on; None before the first sample.
        started_s: the earliest time that anything tells of; None if nothing does.
        ended_s: when the last worker told of itself, for a run that is drained.
        refuses_writes: why the server does, or may; "" where nothing says so.
    """

    run: str
    address: str
    at_s: float
    prompts: QueueStats
    samples: dict[tuple[str, str], QueueStats]
    limits: dict[str, QueueLimits] = field(default_factory=dict)
    journal: JournalView = field(default_factory=JournalView)
    dead: dict[tuple[str, str], DeadFacts] = field(default_factory=dict)
    contract: RunContract | None = None
    started_s: float | None = None
    ended_s: float | None = None
    refuses_writes: str = ""

    @property
    def epochs(self) -> tuple[int, ...]:
        """Those that have a queue."""
        return tuple(sorted({rules.epoch_of(name) or 0 for name, _ in self.samples}))

    @property
    def stats(self) -> tuple[QueueStats, ...]:
        """The counts of all queues, the prompts first."""
        return (self.prompts, *self.samples.values())

    @property
    def is_fed(self) -> bool:
        """Whether anything was ever put into a queue."""
        return any(each.unsettled + each.done + each.dead for each in self.stats)

    @property
    def is_drained(self) -> bool:
        """Whether something was fed, and every group has done with it: nothing is left but dead letters."""
        return self.is_fed and all(each.closed and not each.unsettled for each in self.stats)

    def to_json(self) -> dict[str, Any]:
        """Plain data: no payloads, no secrets; a number that JSON does not know is None."""
        queues: dict[str, Any] = {}
        for each in self.stats:
            limits = self.limits.get(each.name)
            known = queues.setdefault(each.name, {"limits": asdict(limits) if limits else None, "groups": {}})
            dead = self.dead.get((each.name, each.group), DeadFacts(each.dead))
            known["groups"][each.group] = asdict(each) | {"dead_letters": asdict(dead)}
        document = {
            "run": self.run,
            "address": self.address,
            "at_s": self.at_s,
            "started_s": self.started_s,
            "ended_s": self.ended_s,
            "drained": self.is_drained,
            "refuses_writes": self.refuses_writes,
            "epochs": self.epochs,
            "queues": queues,
            "contract": self.contract.model_dump(mode="json") if self.contract else None,
            "journal": asdict(self.journal),
        }
        plain: dict[str, Any] = _plain(document)
        return plain


def read_run(queues: Queues, *, look_at: int = LOOK_AT, last_points: int = MAX_POINTS) -> RunFacts:
    """Read a run: its queues' counts, its journal, and the reasons of some dead letters of each queue.

    Raises:
        QueueUnavailable: the server is out of reach.
    """
    seconds, micros = queues.client.call("TIME")
    prompts, *rest = read_stats(queues)
    samples = {(each.name, each.group): each for each in rest}
    journal = RunJournal(queues.client, queues.run).read(last_points=last_points)
    contract = _read_contract(queues.named(rules.epoch_queue(0)))
    facts = RunFacts(
        run=queues.run,
        address=queues.client.address,
        at_s=int(seconds) + int(micros) / 1e6,
        prompts=prompts,
        samples=samples,
        limits={name: queues.named(name).limits() for name in dict.fromkeys(("prompts", *(n for n, _ in samples)))},
        journal=journal,
        dead=_read_dead((prompts, *rest), queues.named, look_at),
        contract=contract,
        started_s=_started_s(journal),
        refuses_writes=refuses_writes(read_info(queues.client)),
    )
    if not facts.is_drained:
        return facts
    return replace(facts, ended_s=max((each.at_s for each in journal.workers), default=None))


def read_stats(queues: Queues) -> list[QueueStats]:
    """The counts of the prompts, and of each epoch's samples for each group.

    Raises:
        QueueUnavailable: the server is out of reach.
    """
    names = [samples.name for samples in QueueLedger(queues.run, queues.named).releases()]
    found = [queues.named("prompts").stats()]
    for name in sorted(names, key=lambda name: rules.epoch_of(name) or 0):
        found += [queues.named(name, group).stats() for group in queues.named(name).groups()]
    return found


def _read_dead(
    stats: tuple[QueueStats, ...], named: Callable[[str, str], LeaseQueue], look_at: int
) -> dict[tuple[str, str], DeadFacts]:
    found = {}
    for each in stats:
        if each.dead and look_at:
            letters = islice(named(each.name, each.group).dead_reasons(), look_at)
            found[each.name, each.group] = _count_reasons(each.dead, list(letters))
    return found


def _count_reasons(count: int, letters: list[tuple[str, str]]) -> DeadFacts:
    classes: dict[str, list[tuple[str, str]]] = {}
    for item_id, reason in letters:
        classes.setdefault(reason_class(reason), []).append((item_id, reason))
    by_class = Counter({name: len(of) for name, of in classes.items()})
    examples = {name: tuple(classes[name][:_EXAMPLES]) for name, _ in by_class.most_common()}
    return DeadFacts(count, len(letters), dict(by_class.most_common()), examples)


def _read_contract(samples: LeaseQueue) -> RunContract | None:
    stands = samples.agreed().get(CONTRACT_RECORD)
    try:
        return RunContract.from_json(stands) if stands else None
    except SchemaError:
        return None


def _started_s(journal: JournalView) -> float | None:
    told = [fact["at_s"] for fact in journal.facts.values()]
    told += [each.values.get("started_s") for each in journal.workers]
    told += [point["at_s"] for point in journal.series[:1]]
    return min((value for value in map(moment, told) if value is not None), default=None)


def _plain(value: Any, depth: int = 0) -> Any:
    """What JSON knows; what somebody nested too deeply is cut."""
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {str(name): _plain(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, depth + 1) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
