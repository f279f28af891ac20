"""The points of a run's journal: flat names, a slash between their parts, since no queue and no group has one.

queue/<queue>/<group>/<count>   each count of QUEUE_COUNTS, for the prompts (group main) and each epoch's samples
producers/<sum>                 each of PRODUCER_SUMS over all producers that told of themselves, also ended ones
producers/alive, trainers/alive workers that show signs of life
trainer/<group>/<value>         each of TRAINER_VALUES that the group's newest trainer told: of its last 10 s or so
trainer/<group>/accuracy/<k>    its accuracy at depth k
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from eaglefeed.queue.base import QueueStats
from eaglefeed.queue.journal import WorkerView
from eaglefeed.queue.rules import WORKER_GRACE_S

__all__ = [
    "PRODUCER_SUMS",
    "QUEUE_COUNTS",
    "STARTING",
    "TRAINER_VALUES",
    "is_alive",
    "moment",
    "newest_trainers",
    "number",
    "queue_key",
    "series_point",
    "summed",
    "trainer_key",
]

QUEUE_COUNTS = (
    "ready",
    "delayed",
    "leased",
    "tentative",
    "held",
    "done",
    "dead",
    "redelivered",
    "stored_bytes",
    "full",
    "oldest_ready_s",
)
STARTING = {"producer": "loading its target", "trainer": "waiting for the first sample"}
"""Role → the state of a worker that has yet to begin."""
PRODUCER_SUMS = ("produced", "num_tokens", "num_bytes", "paused_s", "write_wait_s", "dead", "retried")
_END_S = 253_402_300_800
"""The year 10000."""
TRAINER_VALUES = ("step", "epoch", "loss", "samples_per_s", "tokens_per_s", "data_wait", "room_wait", "step_s")


def queue_key(queue: str, group: str, count: str) -> str:
    """The name of a queue's count in a point."""
    return f"queue/{queue}/{group}/{count}"


def trainer_key(group: str, value: str) -> str:
    """The name of a trainer's value in a point."""
    return f"trainer/{group}/{value}"


def series_point(stats: Iterable[QueueStats], workers: Sequence[WorkerView], *, now_s: float) -> dict[str, float]:
    """What the run's journal keeps of a moment, from the queues' counts and what workers told last."""
    point: dict[str, float] = {}
    alive: Mapping[str, int] = {}
    for each in stats:
        alive = each.workers
        for count in QUEUE_COUNTS:
            value = getattr(each, count)
            point[queue_key(each.name, each.group, count)] = value if isinstance(value, float) else int(value)
    point |= {f"producers/{name}": summed(workers, "producer", name) for name in PRODUCER_SUMS}
    point |= {f"{role}s/alive": alive.get(role, 0) for role in ("producer", "trainer")}
    for group, worker in newest_trainers(workers).items():
        if is_alive(worker, now_s):
            point |= _trainer_values(group, worker)
    return point


def newest_trainers(workers: Iterable[WorkerView]) -> dict[str, WorkerView]:
    """Group → the trainer of it that told of itself last."""
    trainers = sorted((each for each in workers if each.role == "trainer"), key=lambda each: each.at_s)
    return {str(each.values.get("group", "main")): each for each in trainers}


def is_alive(worker: WorkerView, now_s: float) -> bool:
    """Whether it told of itself within the grace period, and not that it has ended."""
    return now_s - worker.at_s <= WORKER_GRACE_S and not str(worker.values.get("state", "")).startswith("ended")


def summed(workers: Iterable[WorkerView], role: str, name: str) -> float:
    """A value of all workers of a role, added up."""
    return sum(number(each.values.get(name)) or 0 for each in workers if each.role == role)


def number(value: object) -> float | None:
    """The value if it is a finite number: what workers told is read from a server that others may write to."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) else None


def moment(value: object) -> float | None:
    """The value if it is a time, unix s, that a calendar can show."""
    at_s = number(value)
    return at_s if at_s is not None and 0 <= at_s < _END_S else None


def _trainer_values(group: str, worker: WorkerView) -> dict[str, float]:
    told = {name: number(worker.values.get(name)) for name in TRAINER_VALUES}
    accuracies = worker.values.get("accuracies")
    if isinstance(accuracies, list):
        told |= {f"accuracy/{depth}": number(value) for depth, value in enumerate(accuracies)}
    return {trainer_key(group, name): value for name, value in told.items() if value is not None}
