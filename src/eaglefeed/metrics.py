"""Every metric in one table: what a process shows Prometheus is built from it, and docs/metrics.md is made of it.

Units are base units and stand in the names. No label is an id or a worker's name, so that a run has the same few series
however long it is; Prometheus itself adds `instance`.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import NamedTuple

from prometheus_client.core import Metric as Family

__all__ = ["METRICS", "STEP_BUCKETS_S", "Kind", "Metric", "Reading", "Shower", "build_reading", "families"]

STEP_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Kind(StrEnum):
    """How Prometheus reads a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Shower(StrEnum):
    """Who shows a metric."""

    EACH = "every process"
    RUN = "producers and first ranks, for the whole run"
    """The same wherever it is read: take the `max` over instances."""
    PRODUCER = "producers"
    WORKER = "producers and first ranks, each for itself"
    RANK = "every rank of a trainer"
    FIRST = "first ranks of trainers"
    TARGET = "target servers"


class Metric(NamedTuple):
    """A metric.

    Args:
        name: as queries have it.
        kind: how it is read.
        help: what it says.
        labels: in the order of a Reading's.
        shower: who shows it.
        when: the condition under which it has series; "" for always.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    shower: Shower = Shower.RUN
    when: str = ""


class Reading(NamedTuple):
    """A metric's value for its labels' values."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


_QUEUE, _GROUP = ("run", "queue"), ("run", "queue", "group")
_COUNTER, _GAUGE = Kind.COUNTER, Kind.GAUGE

_RUN_METRICS = (
    Metric("eaglefeed_queue_up", _GAUGE, "1 where the queue answered in time when this was read.", ("run",)),
    Metric("eaglefeed_items", _GAUGE, "Items by state.", (*_GROUP, "state")),
    Metric("eaglefeed_oldest_ready_age_seconds", _GAUGE, "Since the ready item at the head was put.", _GROUP),
    Metric("eaglefeed_redelivered_total", _COUNTER, "Deliveries of items that were delivered before.", _GROUP),
    Metric("eaglefeed_committed_step", _GAUGE, "The step up to which samples are settled for good.", _GROUP),
    Metric("eaglefeed_resident_items", _GAUGE, "Items that the group furthest behind has not settled.", _QUEUE),
    Metric("eaglefeed_resident_bytes", _GAUGE, "Stored bytes of all that is not released.", _QUEUE),
    Metric("eaglefeed_limit_items", _GAUGE, "The watermarks by count.", (*_QUEUE, "mark")),
    Metric("eaglefeed_limit_bytes", _GAUGE, "The watermarks by stored bytes.", (*_QUEUE, "mark")),
    Metric("eaglefeed_full", _GAUGE, "1 while producers wait for room.", _QUEUE),
    Metric("eaglefeed_closed", _GAUGE, "1 once nothing new is put.", _QUEUE),
    Metric("eaglefeed_workers", _GAUGE, "Workers that showed a sign of life lately.", ("run", "role")),
    Metric(
        "eaglefeed_dead_letters",
        _GAUGE,
        "Dead letters by class of their reason, of the first 1,000 of a queue.",
        (*_GROUP, "reason"),
        when="something is dead",
    ),
    Metric(
        "eaglefeed_fed_rows_total",
        _COUNTER,
        "Rows of the files that were fed: accepted, duplicate, rejected.",
        ("run", "outcome"),
        when="the run was fed",
    ),
    Metric(
        "eaglefeed_rejected_rows_total",
        _COUNTER,
        "Rejected rows by reason; `other` beyond the 20 most frequent, and beyond the first 100 feeds.",
        ("run", "reason"),
        when="a row was rejected",
    ),
)
_WORKER_METRICS = (
    Metric(
        "eaglefeed_deliveries_total",
        _COUNTER,
        "This process's deliveries by outcome: done, dead, retried, returned, stale.",
        (*_GROUP, "outcome"),
        Shower.WORKER,
    ),
    Metric(
        "eaglefeed_queue_repeats_total",
        _COUNTER,
        "Calls to the queue that were sent again: its server was away or refused for a while, or a reply was lost.",
        ("run",),
        Shower.WORKER,
    ),
    Metric("eaglefeed_producer_samples_total", _COUNTER, "Samples handed off.", ("run",), Shower.PRODUCER),
    Metric("eaglefeed_producer_tokens_total", _COUNTER, "Tokens of those.", ("run",), Shower.PRODUCER),
    Metric("eaglefeed_producer_bytes_total", _COUNTER, "Stored bytes of those.", ("run",), Shower.PRODUCER),
    Metric("eaglefeed_producer_paused_seconds_total", _COUNTER, "Waited for room.", ("run",), Shower.PRODUCER),
    Metric(
        "eaglefeed_producer_write_wait_seconds_total",
        _COUNTER,
        "The target waited for the writer of the sample before.",
        ("run",),
        Shower.PRODUCER,
    ),
    Metric("eaglefeed_trainer_wait_seconds_total", _COUNTER, "The trainer waited for samples.", _GROUP, Shower.RANK),
    Metric("eaglefeed_trainer_samples_total", _COUNTER, "Samples delivered to the ranks.", _GROUP, Shower.FIRST),
    Metric("eaglefeed_trainer_padded_total", _COUNTER, "Places in rounds filled with nothing.", _GROUP, Shower.FIRST),
    Metric("eaglefeed_trainer_tokens_total", _COUNTER, "Tokens trained on, padding left out.", _GROUP, Shower.FIRST),
    Metric(
        "eaglefeed_trainer_step_duration_seconds",
        Kind.HISTOGRAM,
        "From one step's end to the next one's, the wait for samples included.",
        _GROUP,
        Shower.FIRST,
    ),
    Metric("eaglefeed_trainer_step", _GAUGE, "The newest step.", _GROUP, Shower.FIRST, "a step was made"),
    Metric("eaglefeed_trainer_loss", _GAUGE, "Its loss.", _GROUP, Shower.FIRST, "a step was made"),
    Metric(
        "eaglefeed_trainer_accuracy",
        _GAUGE,
        "Its share of draft tokens that are the target's, by how many were drafted before (0 is the first).",
        (*_GROUP, "depth"),
        Shower.FIRST,
        "a step was made",
    ),
)
_TARGET_METRICS = tuple(
    Metric(f"eaglefeed_target_{name}", kind, text, (), Shower.TARGET)
    for name, kind, text in (
        ("waiting", _GAUGE, "Requests that wait for a forward."),
        ("in_flight", _GAUGE, "Requests in a forward, and answers that are not sent yet."),
        ("forwards_total", _COUNTER, "Forwards of the target."),
        ("forward_seconds_total", _COUNTER, "In forwards and in making answers."),
        ("answered_total", _COUNTER, "Requests with an answer."),
        ("tokens_total", _COUNTER, "Tokens of those, padding counted."),
        ("failed_total", _COUNTER, "Requests that were not answered: impossible rows, or a forward that failed."),
        ("refused_total", _COUNTER, "Requests that found no room to wait."),
        ("timed_out_total", _COUNTER, "Requests dropped before their forward since they were late."),
        ("cancelled_total", _COUNTER, "Requests given up before their answer was made."),
        ("sessions", _GAUGE, "Sessions with a vocabulary map."),
        ("ready", _GAUGE, "1 after the warm-up."),
    )
)
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "eaglefeed_build_info",
            Kind.INFO,
            "1, with the versions of what runs.",
            ("role", "version", "python", "torch"),
            Shower.EACH,
        ),
        *_RUN_METRICS,
        *_WORKER_METRICS,
        *_TARGET_METRICS,
    )
}
"""Name → metric, in the order in which one asks."""


def families(readings: Iterable[Reading]) -> Iterator[Family]:
    """Readings as Prometheus' client wants them, those of one metric in a row; histograms are the client's own."""
    for name, group in groupby(readings, key=lambda reading: reading.name):
        metric = METRICS[name]
        family = Family(name.removesuffix("_total").removesuffix("_info"), metric.help, metric.kind)
        for reading in group:
            family.add_sample(name, dict(zip(metric.labels, reading.labels, strict=True)), reading.value)
        yield family


@cache
def build_reading(role: str) -> Reading:
    """What runs, as `role`; torch is not imported for it."""
    return Reading(
        "eaglefeed_build_info", 1.0, (role, _version("eaglefeed"), platform.python_version(), _version("torch"))
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
