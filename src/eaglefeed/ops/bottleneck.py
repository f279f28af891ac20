"""Who waits for whom in a run, in one sentence. Pure: it looks at RunFacts alone."""

from typing import NamedTuple

from eaglefeed.ops.facts import RunFacts
from eaglefeed.ops.series import STARTING, is_alive, newest_trainers, number, queue_key
from eaglefeed.queue.base import MAIN_GROUP, QueueStats
from eaglefeed.queue.journal import WorkerView
from eaglefeed.queue.rules import epoch_queue

__all__ = ["KINDS", "WINDOW_S", "Bottleneck", "Waits", "bottleneck", "waits"]

KINDS = (
    "not_fed",
    "drained",
    "fed_out",
    "server_refuses",
    "starting",
    "no_workers",
    "no_producers",
    "no_trainers",
    "stalled",
    "dead_growing",
    "commit_due",
    "store_full",
    "producers_wait",
    "trainers_wait",
    "balanced",
)
WINDOW_S = 300.0
"""Rates and growth are of this last stretch of the run's points, and of at least _POINTS of them."""
_STALL_S = 180.0
_POINTS, _GAP = 4, 3
_WAITS, _GROWS = 0.2, 0.1
"""Shares: of the time that somebody waits, and of what was settled that became dead letters."""


class Bottleneck(NamedTuple):
    """What holds a run up: one of KINDS, and a sentence for people that says what to do."""

    kind: str
    sentence: str


class Waits(NamedTuple):
    """Shares of the time, 0 to 1: trainers for data, producers for room; None where nobody told."""

    data: float | None
    room: float | None


def bottleneck(facts: RunFacts) -> Bottleneck:
    """The first thing of KINDS, in that order, that is so."""
    found = (look(facts) for look in (_of_the_end, _of_the_server, _of_workers, _of_trouble, _of_room, _of_waits))
    return next(each for each in found if each is not None)


def waits(facts: RunFacts) -> Waits:
    """Who waits, by what trainers told last and what producers told over the last WINDOW_S."""
    data = [share for _, share in _data_waits(facts)]
    return Waits(sum(data) / len(data) if data else None, _room_wait(facts))


def _data_waits(facts: RunFacts) -> list[tuple[WorkerView, float]]:
    """The trainers that live, and what each told last."""
    alive = [each for each in newest_trainers(facts.journal.workers).values() if is_alive(each, facts.at_s)]
    told = [(each, number(each.values.get("data_wait"))) for each in alive]
    return [(each, share) for each, share in told if share is not None]


def _room_wait(facts: RunFacts) -> float | None:
    """The share of their time that producers paused: seconds over all of them by seconds of all of them."""
    points = _window(facts)
    alive = sum(point.get("producers/alive", 0) for point in points[1:]) / max(len(points) - 1, 1)
    if not alive:
        return None
    paused_s = points[-1].get("producers/paused_s", 0) - points[0].get("producers/paused_s", 0)
    return min(1.0, max(0.0, paused_s / (points[-1]["at_s"] - points[0]["at_s"]) / alive))


def _window(facts: RunFacts) -> list[dict[str, float]]:
    """The points of the last WINDOW_S, at least two of them; or none."""
    recent = _since(facts, WINDOW_S)
    return recent if len(recent) > 1 and recent[-1]["at_s"] > recent[0]["at_s"] else []


def _since(facts: RunFacts, seconds: float) -> list[dict[str, float]]:
    span_s = max(seconds, _POINTS * facts.journal.bucket_s)
    return [point for point in facts.journal.series if facts.at_s - point["at_s"] <= span_s]


def _to_lease(stats: QueueStats) -> int:
    return stats.ready + stats.delayed + stats.leased


def _samples_left(facts: RunFacts) -> int:
    """Of the group that has most to do."""
    return max((_to_lease(each) for each in facts.samples.values()), default=0)


def _of_the_end(facts: RunFacts) -> Bottleneck | None:
    if not facts.is_fed:
        return Bottleneck("not_fed", "nothing was fed: `eaglefeed feed` conversations")
    if facts.is_drained:
        dead, worst = sum(each.dead for each in facts.stats), max(facts.stats, key=lambda each: each.dead)
        tail = f"; {_count(dead, 'dead letter')} left, see {_dead_ls(worst)}" if dead else ""
        all_done = "all that could be" if dead else "everything"
        what = all_done if any(each.done for each in facts.samples.values()) else "nothing"
        return Bottleneck("drained", f"done: {what} was trained on{tail}")
    is_over = not any(each.unsettled for each in facts.stats)
    if is_over and not facts.prompts.closed:
        fix = "feed more, or feed the last file without --keep-open"
        return Bottleneck("fed_out", f"all that was fed is trained on, and more may come: {fix}")
    return None


def _of_the_server(facts: RunFacts) -> Bottleneck | None:
    if not facts.refuses_writes:
        return None
    return Bottleneck("server_refuses", f"the queue's server at {facts.address} is in trouble: {facts.refuses_writes}")


def _of_workers(facts: RunFacts) -> Bottleneck | None:
    alive = facts.prompts.workers
    prompts, samples = _to_lease(facts.prompts), _samples_left(facts)
    learned = any(each.tentative for each in facts.samples.values())
    no_producer, no_trainer = not alive.get("producer"), not alive.get("trainer")
    left = f"{_count(prompts, 'prompt')} and {_count(samples, 'sample')} are left"
    if (no_producer or no_trainer) and (starting := _of_starting(facts, left)):
        return starting
    if no_producer and no_trainer:
        both = f"`eaglefeed produce` and {_to_train(facts)}"
        return Bottleneck("no_workers", f"nobody works: {left}; start {both if prompts else _to_train(facts)}")
    if no_producer and prompts:
        return Bottleneck("no_producers", f"no producer lives: {left}; start `eaglefeed produce`")
    if no_trainer and (samples or learned):
        return Bottleneck("no_trainers", f"no trainer lives: {left}; start {_to_train(facts)}")
    return _of_groups(facts)


def _of_starting(facts: RunFacts, left: str) -> Bottleneck | None:
    """A producer that loads its target; or, where there is something to train on, a trainer that takes it up."""
    alive = facts.prompts.workers
    telling = [each for each in facts.journal.workers if is_alive(each, facts.at_s)]
    starting = {each.role for each in telling if each.values.get("state") == STARTING.get(each.role)}
    if not alive.get("producer") and "producer" in starting and _to_lease(facts.prompts):
        nobody = not alive.get("trainer") and "trainer" not in starting
        fix = f"; meanwhile start {_to_train(facts)}" if nobody else ""
        return Bottleneck("starting", f"a producer loads its target: {left}{fix}")
    if not alive.get("trainer") and "trainer" in starting and _samples_left(facts):
        return Bottleneck("starting", f"a trainer is about to begin: {left}")
    return None


def _to_train(facts: RunFacts) -> str:
    """The commands that train what is left, or will be there."""
    to_come = _to_lease(facts.prompts)
    groups = sorted({each.group for each in facts.samples.values() if to_come or _to_lease(each) or each.tentative})
    if groups in ([], [MAIN_GROUP]):
        return "`eaglefeed train`"
    return " and ".join(f"`eaglefeed train train.group={group}`" for group in groups)


def _of_groups(facts: RunFacts) -> Bottleneck | None:
    """A group that nobody trains, while others have trainers; unless a trainer lives that has yet to tell its group."""
    told = [each for each in facts.journal.workers if each.role == "trainer" and is_alive(each, facts.at_s)]
    known = {str(each.values.get("group", MAIN_GROUP)) for each in told}
    left = [each for each in facts.samples.values() if each.group not in known and _to_lease(each)]
    is_one = len({group for _, group in facts.samples}) == 1
    if is_one or not left or len(told) < facts.prompts.workers.get("trainer", 0):
        return None
    most = max(left, key=_to_lease)
    fix = f"start `eaglefeed train train.group={most.group}`"
    what = f"no trainer of group {most.group} lives: {_count(_to_lease(most), 'sample')} left"
    return Bottleneck("no_trainers", f"{what}; {fix}")


def _of_trouble(facts: RunFacts) -> Bottleneck | None:
    return _stalled(facts) or _dead_growing(facts)


def _stalled(facts: RunFacts) -> Bottleneck | None:
    """Nothing was put, acknowledged or set aside for _STALL_S, by the points and by now, though workers live.

    A gap between points means that nobody lived to make one.
    """
    now = {queue_key(each.name, each.group, ""): _moved(each) for each in facts.stats}
    since_s = facts.at_s
    for point in reversed(_since(facts, 2 * WINDOW_S)):
        has_gap = since_s - point["at_s"] > _GAP * facts.journal.bucket_s
        if has_gap or any(_moved_in(point, key) != moved for key, moved in now.items()):
            break
        since_s = point["at_s"]
    if facts.at_s - since_s < _STALL_S:
        return None
    who = " and ".join(_count(count, role) for role, count in sorted(facts.prompts.workers.items()) if count)
    sentence = f"nothing has moved for {facts.at_s - since_s:.0f} s although {who} live: see their logs"
    full = _behind_in_full_queues(facts).get(epoch_queue(0))
    tail = f"; {full.name} has no room, {_depth(facts, full)}" if full else ""
    return Bottleneck("stalled", sentence + tail)


def _moved(stats: QueueStats) -> float:
    """Grows with every acknowledgement, every dead letter and every put."""
    return 2 * (stats.done + stats.tentative + stats.dead) + stats.ready + stats.delayed + stats.leased + stats.held


def _moved_in(point: dict[str, float], key: str) -> float:
    settled = sum(point.get(f"{key}{name}", 0) for name in ("done", "tentative", "dead"))
    return 2 * settled + sum(point.get(f"{key}{name}", 0) for name in ("ready", "delayed", "leased", "held"))


def _dead_growing(facts: RunFacts) -> Bottleneck | None:
    points = _window(facts)
    if not points:
        return None
    for each in facts.stats:
        dead = each.dead - points[0].get(queue_key(each.name, each.group, "dead"), each.dead)
        settled = {name: points[0].get(queue_key(each.name, each.group, name), 0) for name in ("done", "tentative")}
        good = each.done + each.tentative + each.held - sum(settled.values())
        if dead > 0 and dead >= _GROWS * (dead + max(good, 0)):
            return Bottleneck("dead_growing", _tell_dead(facts, each, int(dead), facts.at_s - points[0]["at_s"]))
    return None


def _tell_dead(facts: RunFacts, stats: QueueStats, dead: int, seconds: float) -> str:
    known = facts.dead.get((stats.name, stats.group))
    mostly = f", mostly {next(iter(known.by_class))}" if known and known.by_class else ""
    told = f"{_count(dead, 'dead letter')} more in the last {seconds:.0f} s{mostly}"
    return f"{told}: see {_dead_ls(stats)}"


def _dead_ls(stats: QueueStats) -> str:
    where = f"--queue {stats.name}" + (f" --group {stats.group}" if stats.group != MAIN_GROUP else "")
    return f"`eaglefeed queue dead ls {where}`"


def _of_room(facts: RunFacts) -> Bottleneck | None:
    behind = _behind_in_full_queues(facts)
    for each in behind.values():
        if not each.ready and each.tentative:
            what = f"{each.name} has no room, and {each.tentative} samples wait for a checkpoint"
            return Bottleneck("commit_due", f"{what}: trainers write one now; lower train.checkpoint_every if it lasts")
    full = behind.get(epoch_queue(0))  # nobody produces a later epoch
    return _tell_full(facts, full) if full and _to_lease(facts.prompts) else None


def _behind_in_full_queues(facts: RunFacts) -> dict[str, QueueStats]:
    """Of each queue without room, the group that is furthest behind: it keeps what takes the room."""
    full = [each for each in facts.samples.values() if each.full]
    return {each.name: each for each in sorted(full, key=lambda each: each.unsettled)}


def _tell_full(facts: RunFacts, stats: QueueStats) -> Bottleneck:
    limits, share = facts.limits.get(stats.name), waits(facts).room
    part = f" {share:.0%} of the time" if share else ""
    if limits and stats.stored_bytes > limits.low_bytes:
        used = f"{_gib(stats.stored_bytes)} of {_gib(limits.high_bytes)} stored"
        fix = "train on more ranks, or free space and raise queue.high_bytes"
        return Bottleneck("store_full", f"producers wait for room{part}, {used}: {fix}")
    return Bottleneck("producers_wait", f"producers wait for room{part}, {_depth(facts, stats)}: train on more ranks")


def _depth(facts: RunFacts, stats: QueueStats) -> str:
    by = f" by group {stats.group}" if sum(name == stats.name for name, _ in facts.samples) > 1 else ""
    return f"{_count(stats.unsettled, 'sample')} {'is' if stats.unsettled == 1 else 'are'} not trained on{by}"


def _of_waits(facts: RunFacts) -> Bottleneck:
    told = waits(facts)
    if not _to_lease(facts.prompts):  # then no producer waits any more, whatever the last minutes were
        told = told._replace(room=None)
    data, room = told.data or 0.0, told.room or 0.0
    if room >= _WAITS and room > data:
        return Bottleneck("producers_wait", f"producers wait for room {room:.0%} of the time: train on more ranks")
    if data >= _WAITS:
        return Bottleneck("trainers_wait", f"trainers wait for data {data:.0%} of the time: {_remedy(facts)}")
    if told.data is None and _to_lease(facts.prompts) and not any(each.ready for each in facts.samples.values()):
        return Bottleneck("trainers_wait", "trainers take samples as they come: add producers")
    known = {"trainers wait for data": told.data, "producers wait for room": told.room}
    parts = [f"{what} {share:.0%} of the time" for what, share in known.items() if share is not None]
    return Bottleneck("balanced", f"in balance: {', '.join(parts)}" if parts else "in balance, as far as it shows")


def _remedy(facts: RunFacts) -> str:
    if any(_is_ready_for(facts, each) for each, share in _data_waits(facts) if share >= _WAITS):
        return "samples are ready, reading them is slow: raise train.prefetch, or see the store"
    if _to_lease(facts.prompts):
        return "add producers"
    return f"no prompts are left, {'it is the end of the run' if facts.prompts.closed else 'feed more'}"


def _is_ready_for(facts: RunFacts, trainer: WorkerView) -> bool:
    """Whether there is something to lease in the very queue and group that it trains on."""
    group, epoch = trainer.values.get("group", MAIN_GROUP), number(trainer.values.get("epoch")) or 0
    stats = facts.samples.get((epoch_queue(int(epoch)), str(group)))
    return stats is not None and stats.ready > 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
