"""A look at a run in words: parts with a title and rows of cells, for a terminal or for plain lines."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eaglefeed.ops.live import Look, Speed
from eaglefeed.ops.report_values import mapping, number, text, whole
from eaglefeed.ops.series import is_alive
from eaglefeed.ops.wording import count, duration, human_bytes, percent, plain, rate, significant, timestamp
from eaglefeed.queue.base import MAIN_GROUP, QueueStats
from eaglefeed.queue.journal import WorkerView

__all__ = ["Part", "line_of", "parts_of", "waits_of"]

_MAX_WORKERS, _MAX_REASONS = 12, 6
_NAME, _REASON, _LINE = 40, 100, 2000
_SLOW_PER_S = 0.1
_UNKNOWN = "-"


@dataclass(frozen=True)
class Part:
    """Some rows under a title; the first row is their heads."""

    title: str
    rows: Sequence[tuple[str, ...]]


def parts_of(look: Look) -> list[Part]:
    """All of them; texts from data are spelled out and cut."""
    found = [_speeds(look), _queues(look), _workers(look), _dead(look), _rejected(look)]
    return [part for part in found if len(part.rows) > 1]


def waits_of(look: Look) -> str:
    """Who waits, in shares of the time."""
    shares = {"trainers wait for data": look.waits.data, "producers wait for room": look.waits.room}
    return ", ".join(f"{what} {_UNKNOWN if share is None else percent(share)}" for what, share in shares.items())


def line_of(look: Look) -> str:
    """The whole look in a line."""
    speeds = ", ".join(f"{speed.name} {count(speed.total)} ({_per_s(speed.recent)})" for speed in look.speeds)
    alive = ", ".join(_plural(number, role) for role, number in sorted(look.facts.prompts.workers.items()) if number)
    told = (f"{timestamp(look.facts.at_s)} {speeds}", alive or "nobody works", waits_of(look), look.bottleneck.sentence)
    return plain("; ".join(told), _LINE)


def _speeds(look: Look) -> Part:
    rows = [("", "items", "now", "since the start"), *map(_speed, look.speeds)]
    eta = "" if not look.eta_s else f"; at this speed all is trained on in {duration(look.eta_s)}"
    return Part(f"items{eta}", rows)


def _speed(speed: Speed) -> tuple[str, ...]:
    return speed.name, count(speed.total), _per_s(speed.recent), _per_s(speed.mean)


def _per_s(value: float | None) -> str:
    """A slow target makes a few a minute."""
    if value is None:
        return _UNKNOWN
    if value == 0:
        return "0/s"
    return f"{significant(60 * value)}/min" if value < _SLOW_PER_S else rate(value)


def _queues(look: Look) -> Part:
    heads = ("", "state", "ready", "leased", "tentative", "done", "dead", "oldest ready", "to do", "stored")
    return Part("queues", [heads, *(_queue(look, each) for each in look.facts.stats)])


def _queue(look: Look, stats: QueueStats) -> tuple[str, ...]:
    name = stats.name if stats.group == MAIN_GROUP else f"{stats.name}/{stats.group}"
    ready = count(stats.ready) + (f" + {count(stats.delayed)} later" if stats.delayed else "")
    numbers = (ready, *map(count, (stats.leased, stats.tentative, stats.done, stats.dead)))
    oldest = duration(stats.oldest_ready_s) if stats.ready else _UNKNOWN
    limits, is_samples = look.facts.limits.get(stats.name), stats is not look.facts.prompts
    room = (count(stats.unsettled), human_bytes(stats.stored_bytes) if is_samples else "")
    if limits is not None and is_samples:
        room = (f"{room[0]} of {count(limits.high_count)}", f"{room[1]} of {human_bytes(limits.high_bytes)}")
    return name, f"{'closed' if stats.closed else 'open'}{', full' * stats.full}", *numbers, oldest, *room


def _workers(look: Look) -> Part:
    at_s, found = look.facts.at_s, look.facts.journal.workers
    alive = [each for each in found if is_alive(each, at_s)]
    gone = sorted((each for each in found if not is_alive(each, at_s)), key=lambda each: -each.at_s)
    chosen = [*alive, *gone][:_MAX_WORKERS]
    rows = [("role", "name", "host", "last sign", "what it does"), *(_worker(each, at_s) for each in chosen)]
    if left := len(found) - len(chosen):
        rows.append(("", f"and {count(left)} more", "", "", ""))
    for role, number_alive in sorted(look.facts.prompts.workers.items()):
        silent = number_alive - sum(each.role == role for each in alive)
        if silent > 0:
            rows.append((plain(role, _NAME), f"{count(silent)} more", "", "alive", "tells nothing of itself"))
    return Part(f"workers; {waits_of(look)}", rows)


def _worker(worker: WorkerView, now_s: float) -> tuple[str, ...]:
    name, host = (plain(each, _NAME) for each in (worker.name, text(worker.values, "host")))
    seen = f"{duration(now_s - worker.at_s)} ago"
    return plain(worker.role, _NAME), name, host, seen, plain(", ".join(_doings(worker, now_s)), _REASON)


def _doings(worker: WorkerView, now_s: float) -> Iterator[str]:
    values, state = worker.values, text(worker.values, "state")
    yield state if is_alive(worker, now_s) or state.startswith("ended") else "no sign of life"
    if worker.role == "trainer":
        yield f"step {count(whole(values, 'step'))}"
        if (loss := number(values, "loss")) is not None:
            yield f"loss {significant(loss)}"
        group, epoch = text(values, "group"), whole(values, "epoch")
        yield from ([f"group {group}"] if group not in ("", MAIN_GROUP) else []) + [f"epoch {epoch}"] * bool(epoch)
    else:
        yield f"{count(whole(values, 'produced'))} samples"
    if dead := whole(values, "dead"):
        yield f"{count(dead)} dead"


def _dead(look: Look) -> Part:
    rows = [("queue", "reason", "letters")]
    for (queue, group), dead in look.facts.dead.items():
        name = queue if group == MAIN_GROUP else f"{queue}/{group}"
        for reason, number_of in list(dead.by_class.items())[:_MAX_REASONS]:
            rows.append((name, plain(reason, _NAME), count(number_of)))
        if dead.looked_at < dead.count:
            rows.append((name, f"reasons of the first {count(dead.looked_at)}", f"of {count(dead.count)}"))
    return Part("dead letters", rows)


def _rejected(look: Look) -> Part:
    reasons = Counter[str]()
    for name, fact in look.facts.journal.facts.items():
        if name.startswith("feed:"):
            reasons.update({reason: whole(mapping(fact, "reasons"), reason) for reason in mapping(fact, "reasons")})
    total = look.facts.journal.totals.get("feed.rejected", 0)
    rows = [
        ("reason", "rows"),
        *((plain(reason, _REASON), count(n)) for reason, n in reasons.most_common(_MAX_REASONS)),
    ]
    return Part(f"{_plural(total, 'row')} rejected by feed", rows)


def _plural(number_of: int, noun: str) -> str:
    return f"{count(number_of)} {noun}{'s' * (number_of != 1)}"
