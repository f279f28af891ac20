"""Metrics of a command's process, where the settings say so."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from eaglefeed.cli.common import RunQueues, access_token
from eaglefeed.config import Settings
from eaglefeed.metrics import Reading
from eaglefeed.queue.rules import epoch_queue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from eaglefeed.cli.train_progress import Progress
    from eaglefeed.consumer.source import BatchSource
    from eaglefeed.ops.collector import Shown
    from eaglefeed.producer.accounts import ProducerStats

__all__ = ["run_shown", "show_producer", "show_training", "showing"]


@contextmanager
def showing(settings: Settings, role: str, *, local_rank: int = 0) -> "Iterator[Shown]":
    """What is shown on metrics.host and metrics.port meanwhile; nobody sees it without a port.

    Args:
        settings: name the run, the port and the token.
        role: producer or trainer.
        local_rank: ranks of one machine show on ports in a row, unless each takes a free one.

    Raises:
        ConfigError: it cannot listen there, or may not.
    """
    from eaglefeed.ops.collector import Shown
    from eaglefeed.ops.exporter import exporting

    shown, metrics = Shown(role, settings.run.id), settings.metrics
    if metrics.port is None:
        yield shown
        return
    port = metrics.port and metrics.port + local_rank
    with exporting(shown.text, host=metrics.host, port=port, token=access_token(settings)):
        yield shown


def run_shown(shown: "Shown", queues: RunQueues | None) -> "AbstractContextManager[None]":
    """Meanwhile also show what the run's queues say; without any, nothing."""
    if queues is None:
        return nullcontext()
    from eaglefeed.ops.facts import read_run
    from eaglefeed.ops.run_readings import run_readings

    shown.add(lambda: [Reading("eaglefeed_queue_repeats_total", queues.client.num_repeats, (queues.run,))])
    at_once = replace(queues, client=queues.client.impatient())
    return shown.of_run(lambda: run_readings(read_run(at_once, last_points=0)))


def show_producer(shown: "Shown", queues: RunQueues, stats: "ProducerStats") -> None:
    """Show what this producer does."""
    from eaglefeed.ops.readings import producer_readings

    shown.add(partial(producer_readings, queues.run, queues.prompts.group, stats))


def show_training(shown: "Shown", settings: Settings, stream: "BatchSource", progress: "Progress | None") -> None:
    """Show what this rank does, and on the first one, which has a `progress`, its steps."""
    from eaglefeed.ops.readings import StepWatch, rank_readings

    train = settings.train
    queue = epoch_queue(train.epoch) if train.target_backend == "stream" else ""
    labels = (settings.run.id, queue, train.group)
    shown.add(partial(rank_readings, labels, stream.stats, is_first=progress is not None))
    if progress is not None:
        watch = StepWatch(labels)
        progress.on_step = watch.step
        shown.add(watch.readings)
        shown.add_families(watch.durations)
