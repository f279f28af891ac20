"""What workers tell of themselves in their run's journal: flat names, plain values."""

import platform
import socket
from dataclasses import asdict
from importlib.metadata import version
from statistics import fmean
from typing import TYPE_CHECKING, Any

from eaglefeed import __version__
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import Settings
from eaglefeed.ops.series import STARTING

if TYPE_CHECKING:
    from eaglefeed.cli.train_progress import Progress
    from eaglefeed.consumer.source import BatchSource
    from eaglefeed.consumer.trainer import DraftTrainer, StepResult
    from eaglefeed.producer.accounts import ProducerStats

__all__ = ["ProducerSnapshot", "TrainerSnapshot", "starting_snapshot", "versions"]

_MOSTLY = 0.5
"""Share of the time since the last snapshot from which on a worker did mostly that."""


def versions() -> dict[str, str]:
    """What this process runs on."""
    return {"eaglefeed": __version__, "python": platform.python_version(), "torch": version("torch")}


def _about_process(settings: Settings) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "target": settings.target.name,
    }


def starting_snapshot(settings: Settings, role: str) -> dict[str, Any]:
    """Of a worker that has yet to begin."""
    about = _about_process(settings) | {"state": STARTING[role]}
    return about | ({"group": settings.train.group, "epoch": settings.train.epoch} if role == "trainer" else {})


class ProducerSnapshot:
    """Its ProducerStats; host, target, engine, versions; state: "working" or "paused for room"."""

    def __init__(self, settings: Settings, stats: "ProducerStats") -> None:
        self._about = _about_process(settings) | {"engine": settings.target.engine}
        self._stats, self._at_s, self._paused_s = stats, SYSTEM_CLOCK.monotonic(), 0.0

    def __call__(self) -> dict[str, Any]:
        """The values now."""
        now_s, paused_s = SYSTEM_CLOCK.monotonic(), self._stats.paused_s
        is_paused = paused_s - self._paused_s > _MOSTLY * (now_s - self._at_s)
        self._at_s, self._paused_s = now_s, paused_s
        state = "paused for room" if is_paused else "working"
        return self._about | asdict(self._stats) | {"state": state}


class TrainerSnapshot:
    """Its stream's counts, and since the last snapshot: means of loss and accuracies, pace and waits.

    Named as in `ops.series`; besides num_steps of this start, group, world_size, host, versions, and state:
    "working" or "waiting for data". `step_s` is the mean time from step to step, waits included; `room_wait` is of the
    last train.report_every steps.
    """

    def __init__(
        self, settings: Settings, trainer: "DraftTrainer", stream: "BatchSource", progress: "Progress"
    ) -> None:
        train, world_size = settings.train, trainer.ranks.world_size
        self._about = _about_process(settings)
        self._about |= {"group": train.group, "epoch": train.epoch, "world_size": world_size}
        self._trainer, self._stream, self._progress = trainer, stream, progress
        self._learned: dict[str, Any] = {}
        self._mark = self._now()

    def __call__(self) -> dict[str, Any]:
        """The values now."""
        steps = self._take_recent()
        before, self._mark = self._mark, self._now()
        at_s, delivered, wait_s = (b - a for a, b in zip(before, self._mark, strict=True))
        seconds = max(at_s, 1e-9)
        if steps:
            self._learned = _means(steps) | {"step_s": seconds / len(steps)}
        data_wait = min(1.0, wait_s / seconds)
        pace = self._progress.pace
        return {
            **self._about,
            **asdict(self._stream.stats),
            **self._learned,
            "step": self._trainer.step_count,
            "num_steps": self._progress.num_steps,
            "samples_per_s": delivered / seconds,
            "tokens_per_s": sum(step.num_tokens for step in steps) / seconds,
            "data_wait": data_wait,
            "room_wait": pace.room_wait if pace else None,
            "state": "waiting for data" if data_wait > _MOSTLY else "working",
        }

    def _now(self) -> tuple[float, int, float]:
        stats = self._stream.stats
        return SYSTEM_CLOCK.monotonic(), stats.delivered, stats.wait_s

    def _take_recent(self) -> "list[StepResult]":
        recent = self._progress.recent
        return [recent.popleft() for _ in range(len(recent))]


def _means(steps: "list[StepResult]") -> dict[str, Any]:
    depths = zip(*(step.accuracies for step in steps), strict=True)
    return {"loss": fmean(step.loss for step in steps), "accuracies": [fmean(depth) for depth in depths]}
