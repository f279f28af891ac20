"""What became of a run, in one word and one sentence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eaglefeed.ops.wording import count, roughly
from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, QueueStats

__all__ = ["STATES", "Lane", "Outcome", "lanes", "outcome"]

STATES = {
    "done": "done",
    "under_way": "under way",
    "stopped": "stopped",
    "stuck": "stuck",
    "not_fed": "not fed",
}


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The items of one epoch as one group goes through them.

    Args:
        queue: the samples queue's name.
        group: who trains.
        epoch: from 0.
        total: items, those included whose samples are still to be produced.
        to_produce: those.
        waiting: ready or delayed samples,
        leased: and those that a trainer has.
        tentative: trained on, waiting for a checkpoint's commit.
        done: trained on for good.
        dead: dead letters, prompts included.
        redelivered: deliveries after the first.
    """

    queue: str
    group: str
    epoch: int
    total: int
    to_produce: int
    waiting: int
    leased: int
    tentative: int
    done: int
    dead: int
    redelivered: int

    @property
    def trained(self) -> int:
        """Items that this group has trained on."""
        return self.done + self.tentative

    @property
    def left(self) -> int:
        """Items that are still to be trained on."""
        return self.to_produce + self.waiting + self.leased

    @property
    def title(self) -> str:
        """Its name for people."""
        return f"epoch {self.epoch}" if self.group == MAIN_GROUP else f"epoch {self.epoch}, group {self.group}"


@dataclass(frozen=True)
class Outcome:
    """One of STATES, and a sentence."""

    state: str
    sentence: str


def lanes(prompts: QueueStats, samples: Iterable[QueueStats]) -> list[Lane]:
    """Every epoch of every group, the first epoch first; only that one's items come from prompts."""
    found = [_lane(prompts, each, rules.epoch_of(each.name) or 0) for each in samples]
    return sorted(found, key=lambda lane: (lane.epoch, lane.group))


def _lane(prompts: QueueStats, samples: QueueStats, epoch: int) -> Lane:
    """A parked sample's prompt is ready again and counts there; a held one's sample is there and counts as that."""
    to_produce = prompts.ready + prompts.delayed + prompts.leased if epoch == 0 else 0
    unmade = prompts.dead if epoch == 0 else 0
    return Lane(
        queue=samples.name,
        group=samples.group,
        epoch=epoch,
        total=to_produce + unmade + samples.unsettled - samples.parked + samples.done + samples.dead,
        to_produce=to_produce,
        waiting=samples.ready + samples.delayed,
        leased=samples.leased,
        tentative=samples.tentative,
        done=samples.done,
        dead=samples.dead + unmade,
        redelivered=samples.redelivered,
    )


def outcome(
    found: Sequence[Lane], *, is_stuck: bool, num_alive: int, is_open: bool, eta_s: float | None = None
) -> Outcome:
    """What became of it.

    Args:
        found: the run's lanes.
        is_stuck: nothing goes on though workers live.
        num_alive: workers that live.
        is_open: more may be fed.
        eta_s: how long the rest takes at the present pace.
    """
    if not any(lane.total for lane in found):
        return Outcome("not_fed", "Nothing has been fed yet.")
    behind = max(found, key=lambda lane: (lane.left, lane.tentative))
    if not behind.left and not behind.tentative:
        return Outcome("done", _done(found, is_open=is_open))
    whose = f"In {behind.title}, " if len(found) > 1 else ""
    if not num_alive:
        return Outcome("stopped", _begun(whose, f"{_stopped(behind)}."))
    trained = f"{count(behind.trained)} of {count(behind.total)} items are trained on"
    if is_stuck:
        return Outcome("stuck", _begun(whose, f"{trained}, and it is stuck with {count(behind.left)} left."))
    soon = f", about {roughly(eta_s)} at the present pace" if eta_s is not None and behind.left else ""
    return Outcome("under_way", _begun(whose, f"{trained}, {count(behind.left)} are left{soon}."))


def _begun(whose: str, rest: str) -> str:
    return whose + rest if whose else rest[0].upper() + rest[1:]


def _stopped(lane: Lane) -> str:
    if lane.left:
        return f"stopped with {count(lane.left)} of {count(lane.total)} items left"
    return f"stopped with {count(lane.tentative)} trained items waiting for a checkpoint's commit"


def _done(found: Sequence[Lane], *, is_open: bool) -> str:
    worst = max(found, key=lambda lane: lane.dead)
    epochs, groups = ({getattr(lane, name) for lane in found} for name in ("epoch", "group"))
    where = f" in each of {len(epochs)} epochs" * (len(epochs) > 1) + f" by each of {len(groups)} groups" * (
        len(groups) > 1
    )
    total, tail = count(worst.total), "; more may be fed." if is_open else "."
    if not worst.dead:
        return f"All {total} items are produced and trained on{where}{tail}"
    what = "is a dead letter" if worst.dead == 1 else "are dead letters"
    return f"{count(worst.total - worst.dead)} of {total} items are trained on{where}, {count(worst.dead)} {what}{tail}"
