"""The table of metrics, and what is shown of a process and its run: right, bounded, and never waited for."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eaglefeed.clock import ManualClock
from eaglefeed.consumer.round_queue import RoundStats
from eaglefeed.consumer.trainer import StepResult
from eaglefeed.errors import QueueUnavailable
from eaglefeed.metrics import METRICS, Kind, Reading, families
from eaglefeed.ops.collector import BoundedLook, Shown
from eaglefeed.ops.readings import StepWatch, producer_readings, rank_readings
from eaglefeed.ops.run_readings import feed_readings, queue_readings
from eaglefeed.producer.accounts import ProducerStats
from eaglefeed.queue.values import QueueLimits, QueueStats

LABELS = ("run", "samples", "main")
NOTHING = dict.fromkeys(
    ("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released", "redelivered"), 0
)


def queue_stats(name: str = "samples", group: str = "main", **changes: Any) -> QueueStats:
    fields = NOTHING | {"session": 0, "committed_step": 0, "stored_bytes": 0, "closed": False, "full": False}
    return QueueStats(name=name, group=group, **{**fields, **changes})


def labels_of(sample: Any) -> list[str]:
    """In the table's order; a histogram's buckets have one more."""
    name = next(name for name in METRICS if sample.name.startswith(name))
    return [*METRICS[name].labels, *({"le"} & sample.labels.keys())]


def scraped(shown: Shown) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and labels' values → value, of what eaglefeed itself shows."""
    found = {}
    for family in text_string_to_metric_families(shown.text().decode()):
        for sample in family.samples:
            if sample.name.startswith("eaglefeed_"):
                key = (sample.name, tuple(sample.labels[label] for label in labels_of(sample)))
                assert key not in found, "shown twice"
                found[key] = sample.value
    return found


def by_labels(readings: Any, name: str) -> dict[tuple[str, ...], float]:
    return {reading.labels: reading.value for reading in readings if reading.name == name}


# the table


def test_names_say_what_is_counted_and_in_which_base_unit() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("eaglefeed_")
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert name.endswith("_info") == (metric.kind is Kind.INFO), name
        assert not any(unit in name for unit in ("_ms", "_mb", "_minutes", "_percent", "_s_")), name
        assert metric.help.endswith("."), name


def test_no_label_is_an_id_or_a_worker() -> None:
    allowed = {"run", "queue", "group", "state", "outcome", "role", "reason", "mark", "depth"}
    versions = {"version", "python", "torch"}
    for metric in METRICS.values():
        assert set(metric.labels) <= allowed | (versions if metric.kind is Kind.INFO else set()), metric.name


def test_a_reading_with_other_labels_than_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(families([Reading("eaglefeed_items", 1.0, ("run",))]))
    with pytest.raises(KeyError):
        list(families([Reading("eaglefeed_unknown", 1.0)]))


# of a process


def test_a_producers_accounts_are_shown_as_they_are_when_scraped() -> None:
    stats, shown = ProducerStats(), Shown("producer", "run")
    shown.add(lambda: producer_readings("run", "main", stats))
    assert scraped(shown)["eaglefeed_producer_samples_total", ("run",)] == 0
    stats.produced, stats.num_tokens, stats.num_bytes, stats.dead, stats.retried = 7, 700, 7000, 2, 3
    stats.returned, stats.stale, stats.paused_s, stats.write_wait_s = 4, 5, 1.5, 0.25
    found = scraped(shown)
    for name, value in (
        ("samples", 7),
        ("tokens", 700),
        ("bytes", 7000),
        ("paused_seconds", 1.5),
        ("write_wait_seconds", 0.25),
    ):
        assert found[f"eaglefeed_producer_{name}_total", ("run",)] == value
    outcomes = {"done": 7, "dead": 2, "retried": 3, "returned": 4, "stale": 5}
    for outcome, count in outcomes.items():
        assert found["eaglefeed_deliveries_total", ("run", "prompts", "main", outcome)] == count


def test_a_ranks_accounts_and_its_newest_step_are_shown() -> None:
    clock, stats = ManualClock(), RoundStats(delivered=9, acked=8, stale=1, wait_s=2.5, padded=3)
    watch, shown = StepWatch(LABELS, clock=clock), Shown("trainer", "run")
    shown.add(lambda: rank_readings(LABELS, stats, is_first=True))
    shown.add(watch.readings)
    shown.add_families(watch.durations)
    assert ("eaglefeed_trainer_loss", LABELS) not in scraped(shown)
    for step, took_s in enumerate((5.0, 0.3, 40.0), start=1):
        clock.advance(took_s)
        watch.step(StepResult(1.0 / step, (0.5, 0.25), 10, 100, 1.0, step))
    found = scraped(shown)
    for name, value in (
        ("trainer_samples_total", 9),
        ("trainer_wait_seconds_total", 2.5),
        ("trainer_padded_total", 3),
        ("trainer_tokens_total", 300),
        ("trainer_step", 3),
        ("trainer_loss", pytest.approx(1 / 3)),
        ("trainer_step_duration_seconds_count", 2),  # the first one has no step before it
        ("trainer_step_duration_seconds_sum", pytest.approx(40.3)),
    ):
        assert found[f"eaglefeed_{name}", LABELS] == value, name
    assert found["eaglefeed_trainer_accuracy", (*LABELS, "1")] == 0.25
    assert found["eaglefeed_trainer_step_duration_seconds_bucket", (*LABELS, "0.5")] == 1
    assert found["eaglefeed_trainer_step_duration_seconds_bucket", (*LABELS, "60.0")] == 2
    assert found["eaglefeed_deliveries_total", (*LABELS, "done")] == 8


def test_another_rank_shows_its_wait_alone_for_the_first_one_counts_the_whole_job() -> None:
    readings = rank_readings(LABELS, RoundStats(delivered=9, acked=8, wait_s=2.5), is_first=False)
    assert list(readings) == [Reading("eaglefeed_trainer_wait_seconds_total", 2.5, LABELS)]


# of a run


def test_the_queues_counts_and_limits_are_shown_for_each_queue_and_group() -> None:
    stats = [
        queue_stats("prompts", ready=5, closed=True, oldest_ready_s=61.5, workers={"producer": 2, "trainer": 1}),
        queue_stats(group="a", ready=3, leased=2, done=7, stored_bytes=900, full=True, redelivered=4),
        queue_stats(group="b", ready=1, dead=1, done=10, stored_bytes=900, full=True, committed_step=40),
    ]
    limits = {"prompts": QueueLimits(), "samples": QueueLimits(high_count=8, low_count=4, high_bytes=2000)}
    dead = {("samples", "b"): {"SampleCorrupt": 1}}
    readings = list(queue_readings("r", stats, limits, dead))
    list(families(readings))  # every label is the table's
    items = by_labels(readings, "eaglefeed_items")
    assert items["r", "samples", "a", "leased"] == 2
    assert items["r", "samples", "b", "dead"] == 1
    assert len(items) == 3 * 9
    for name, labels, value in (
        ("oldest_ready_age_seconds", ("prompts", "main"), 61.5),
        ("redelivered_total", ("samples", "a"), 4),
        ("committed_step", ("samples", "b"), 40),
        ("resident_items", ("samples",), 5),
        ("resident_bytes", ("samples",), 900),
        ("full", ("samples",), 1),
        ("full", ("prompts",), 0),
        ("closed", ("prompts",), 1),
        ("limit_items", ("samples", "high"), 8),
        ("limit_items", ("samples", "low"), 4),
        ("limit_bytes", ("samples", "high"), 2000),
        ("workers", ("producer",), 2),
        ("dead_letters", ("samples", "b", "SampleCorrupt"), 1),
    ):
        assert by_labels(readings, f"eaglefeed_{name}")["r", *labels] == value, name


def test_rows_that_were_fed_are_added_up_and_their_reasons_bounded() -> None:
    many = {f"reason {index:03}": 1 for index in range(100)}
    feeds = [
        {"reasons": {"not JSON": 5, "x" * 500: 2}},
        {"reasons": many},
        {"reasons": ["broken"]},  # by whoever may write to the server
        {"reasons": {"not JSON": "many"}},
    ]
    totals = {"feed.accepted": 7, "feed.duplicates": 1, "feed.rejected": 107, "feed.count": 4}
    readings = list(feed_readings("r", feeds, totals))
    list(families(readings))
    rows = by_labels(readings, "eaglefeed_fed_rows_total")
    assert rows == {("r", "accepted"): 7, ("r", "duplicate"): 1, ("r", "rejected"): 107}
    reasons = by_labels(readings, "eaglefeed_rejected_rows_total")
    assert (reasons["r", "not JSON"], reasons["r", "x" * 80], len(reasons)) == (5, 2, 21)
    assert sum(reasons.values()) == 107
    more = by_labels(feed_readings("r", feeds, totals | {"feed.rejected": 130}), "eaglefeed_rejected_rows_total")
    assert more == reasons | {("r", "other"): reasons["r", "other"] + 23}  # of feeds that the journal does not keep
    assert list(feed_readings("r", [], {})) == []


def test_without_the_queue_a_scrape_shows_the_processs_own_numbers_and_that_it_is_away() -> None:
    def away() -> list[Reading]:
        raise QueueUnavailable("redis://there", "gone")

    stats, shown = ProducerStats(produced=3), Shown("producer", "run")
    shown.add(lambda: producer_readings("run", "main", stats))
    with shown.of_run(away):
        found = scraped(shown)
    assert found["eaglefeed_queue_up", ("run",)] == 0
    assert found["eaglefeed_producer_samples_total", ("run",)] == 3
    with shown.of_run(lambda: [Reading("eaglefeed_workers", 2.0, ("run", "producer"))]):
        found = scraped(shown)
    assert (found["eaglefeed_queue_up", ("run",)], found["eaglefeed_workers", ("run", "producer")]) == (1, 2)
    assert ("eaglefeed_queue_up", ("run",)) not in scraped(shown)


# looks at what may be away


@pytest.fixture
def gate() -> Any:
    """What a look waits for."""
    opened = threading.Event()
    yield opened
    opened.set()


def counted(look: Callable[[], int]) -> tuple[Callable[[], int], list[int]]:
    calls: list[int] = []

    def counting() -> int:
        calls.append(1)
        return look()

    return counting, calls


def test_a_look_is_kept_for_a_second_and_then_made_again() -> None:
    clock = ManualClock()
    look, calls = counted(lambda: len(calls))
    bounded = BoundedLook(look, clock=clock)
    assert [bounded.get(), bounded.get()] == [1, 1]
    clock.advance(1.1)
    assert bounded.get() == 2


def test_a_look_that_hangs_is_not_waited_for_and_not_begun_again(gate: threading.Event) -> None:
    clock = ManualClock()
    look, calls = counted(lambda: int(gate.wait(30)))
    bounded = BoundedLook(look, wait_s=0.01, clock=clock)
    for _ in range(5):
        assert bounded.get() is None
        clock.advance(10.0)
    assert calls == [1]
    gate.set()
    while bounded.get() is None:
        pass
    assert bounded.get() == 1


def test_a_look_that_found_no_thread_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bounded = BoundedLook(lambda: 1, wait_s=5)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            bounded.get()
    assert bounded.get() == 1


def test_an_error_that_is_no_outage_is_raised() -> None:
    def broken() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BoundedLook(broken).get()
