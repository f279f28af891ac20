"""What a process's own accounts say, as readings of metrics; the run's are in run_readings.py."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.core import Metric as Family

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.metrics import METRICS, STEP_BUCKETS_S, Reading

if TYPE_CHECKING:
    from eaglefeed.consumer.holdings import StreamStats
    from eaglefeed.consumer.trainer import StepResult
    from eaglefeed.producer.accounts import ProducerStats

__all__ = ["StepWatch", "producer_readings", "rank_readings"]

_DURATION = METRICS["eaglefeed_trainer_step_duration_seconds"]


def producer_readings(run: str, group: str, stats: "ProducerStats") -> Iterator[Reading]:
    """A producer's; the prompts have the one group."""
    outcomes = (("done", stats.produced), *((name, getattr(stats, name)) for name in _RETURNED))
    yield from _deliveries((run, "prompts", group), outcomes)
    for name, value in (
        ("samples_total", stats.produced),
        ("tokens_total", stats.num_tokens),
        ("bytes_total", stats.num_bytes),
        ("paused_seconds_total", stats.paused_s),
        ("write_wait_seconds_total", stats.write_wait_s),
    ):
        yield Reading(f"eaglefeed_producer_{name}", value, (run,))


_RETURNED = ("dead", "retried", "returned", "stale")


def rank_readings(labels: tuple[str, str, str], stats: "StreamStats", *, is_first: bool) -> Iterator[Reading]:
    """Those of a rank's stream.

    Args:
        labels: run, queue, group.
        stats: of its stream.
        is_first: it is the first rank's, and tells what became of the whole job's samples.
    """
    yield Reading("eaglefeed_trainer_wait_seconds_total", stats.wait_s, labels)
    if not is_first:
        return
    yield from _deliveries(labels, (("done", stats.acked), *((name, getattr(stats, name)) for name in _RETURNED)))
    yield Reading("eaglefeed_trainer_samples_total", stats.delivered, labels)
    yield Reading("eaglefeed_trainer_padded_total", getattr(stats, "padded", 0), labels)  # a stream alone pads nothing


def _deliveries(labels: tuple[str, str, str], outcomes: tuple[tuple[str, int], ...]) -> Iterator[Reading]:
    for outcome, count in outcomes:
        yield Reading("eaglefeed_deliveries_total", count, (*labels, outcome))


class StepWatch:
    """Told each step by the training, and read by a scrape.

    Args:
        labels: run, queue, group.
        clock: measures how long steps take.
    """

    def __init__(self, labels: tuple[str, str, str], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._labels, self._clock = labels, clock
        self._newest: StepResult | None = None
        self._ended_s: float | None = None
        self._num_tokens = 0
        self._durations = Histogram(
            _DURATION.name, _DURATION.help, _DURATION.labels, registry=None, buckets=STEP_BUCKETS_S
        )
        self._duration = self._durations.labels(*labels)

    def step(self, result: "StepResult") -> None:
        """A step has ended."""
        now_s = self._clock.monotonic()
        if self._ended_s is not None:
            self._duration.observe(now_s - self._ended_s)
        self._ended_s, self._newest = now_s, result
        self._num_tokens += result.num_tokens

    def readings(self) -> Iterator[Reading]:
        """All but the durations."""
        yield Reading("eaglefeed_trainer_tokens_total", self._num_tokens, self._labels)
        newest = self._newest
        if newest is None:
            return
        yield Reading("eaglefeed_trainer_step", newest.step, self._labels)
        yield Reading("eaglefeed_trainer_loss", newest.loss, self._labels)
        for depth, accuracy in enumerate(newest.accuracies):
            yield Reading("eaglefeed_trainer_accuracy", accuracy, (*self._labels, str(depth)))

    def durations(self) -> Iterator[Family]:
        """How long steps took."""
        return iter(self._durations.collect())
