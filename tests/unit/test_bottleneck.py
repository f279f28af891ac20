"""What is said of who waits for whom: a table of runs and the sentence that fits."""

from dataclasses import replace
from typing import Any

import pytest

from eaglefeed.ops.bottleneck import KINDS, bottleneck, waits
from eaglefeed.ops.facts import DeadFacts, RunFacts
from eaglefeed.ops.reasons import REASON_CLASSES, reason_class
from eaglefeed.ops.series import series_point
from eaglefeed.queue.base import QueueLimits, QueueStats
from eaglefeed.queue.journal import JournalView, WorkerView

NOW_S = 10_000.0
BOTH = {"producer": 1, "trainer": 1}


def stats(name: str, group: str = "main", **counts: Any) -> QueueStats:
    zero = ("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released", "redelivered")
    state = {"session": 0, "committed_step": 0, "stored_bytes": 0, "closed": False, "full": False}
    return QueueStats(name=name, group=group, **(dict.fromkeys(zero, 0) | state | counts))


def trainer(data_wait: float, group: str = "main", at_s: float = NOW_S, **values: Any) -> WorkerView:
    return WorkerView("trainer", f"t-{group}", at_s, {"group": group, "data_wait": data_wait, **values})


def run(
    prompts: dict[str, Any],
    samples: dict[str, Any],
    *,
    alive: dict[str, int] = BOTH,
    workers: tuple[WorkerView, ...] = (),
    series: tuple[dict[str, float], ...] = (),
    **more: Any,
) -> RunFacts:
    journal = JournalView(workers=workers, series=series)
    each = stats("samples", workers=alive, **samples)
    return RunFacts(
        "r",
        "a",
        NOW_S,
        stats("prompts", workers=alive, **prompts),
        {("samples", "main"): each},
        journal=journal,
        **more,
    )


def points_of(facts: RunFacts, *ages_s: float, **changes: float) -> tuple[dict[str, float], ...]:
    """Points as they would have been made of these very counts, so long ago; and with some values changed."""
    point = series_point(facts.stats, (), now_s=NOW_S)
    return tuple(point | changes | {"at_s": NOW_S - age_s} for age_s in ages_s)


def with_series(facts: RunFacts, *series: dict[str, float]) -> RunFacts:
    return replace(facts, journal=replace(facts.journal, series=series))


LOADING = WorkerView("producer", "p", NOW_S, {"state": "loading its target"})
WAITING = WorkerView("trainer", "t", NOW_S, {"state": "waiting for the first sample"})
BUSY = run({"ready": 50, "done": 50}, {"ready": 4, "done": 46})
PAUSED = ({"at_s": NOW_S - 100, "producers/paused_s": 10.0}, {"at_s": NOW_S, "producers/paused_s": 50.0})


@pytest.mark.parametrize(
    ("facts", "kind", "told"),
    [
        (run({}, {}, alive={}), "not_fed", "`eaglefeed feed`"),
        (run({"done": 9, "closed": True}, {"done": 9, "closed": True}), "drained", "everything was trained on"),
        (
            run({"done": 8, "dead": 1, "closed": True}, {"done": 8, "closed": True}, alive={}),
            "drained",
            "1 dead letter left",
        ),
        (run({"dead": 9, "closed": True}, {"closed": True}), "drained", "nothing was trained on; 9 dead letters left"),
        (run({"done": 9}, {"done": 9}), "fed_out", "--keep-open"),
        (run({"ready": 3}, {}, alive={}, refuses_writes="its memory is full: x"), "server_refuses", "memory is full"),
        (run({"ready": 3}, {}, alive={}), "no_workers", "`eaglefeed produce` and `eaglefeed train`"),
        (
            run({"done": 9, "closed": True}, {"tentative": 9, "closed": True}, alive={}),
            "no_workers",
            "start `eaglefeed train`",
        ),
        (run({"ready": 3}, {"ready": 2}, alive={"trainer": 1}), "no_producers", "3 prompts and 2 samples"),
        (run({"ready": 3}, {}, alive={}, workers=(LOADING,)), "starting", "loads its target: 3 prompts and 0 samples"),
        (run({"ready": 3}, {}, alive={}, workers=(LOADING,)), "starting", "meanwhile start `eaglefeed train`"),
        (run({"ready": 3}, {}, alive={}, workers=(LOADING, WAITING)), "starting", "0 samples are left"),
        (run({"ready": 3}, {}, alive={}, workers=(WAITING,)), "no_workers", "nobody works"),
        (run({"ready": 3}, {"ready": 2}, alive={"producer": 1}, workers=(WAITING,)), "starting", "is about to begin"),
        (run({"ready": 3}, {}, alive={}, workers=(replace(LOADING, at_s=NOW_S - 99),)), "no_workers", "nobody works"),
        (run({"ready": 3}, {"ready": 1}, alive={"producer": 1}), "no_trainers", "3 prompts and 1 sample are left"),
        (run({"done": 9, "closed": True}, {"leased": 1, "done": 8}, alive={"trainer": 1}), "balanced", "in balance"),
        (with_series(BUSY, *points_of(BUSY, *range(200, 0, -10))), "stalled", "moved for 200 s although 1 producer"),
        (with_series(BUSY, *points_of(BUSY, *range(170, 0, -10))), "balanced", ""),
        (with_series(BUSY, *points_of(BUSY, 300, *range(100, 0, -10))), "balanced", ""),  # nobody lived in between
        (
            with_series(
                BUSY,
                *points_of(BUSY, *range(250, 150, -10)),
                *points_of(BUSY, 150, **{"queue/samples/main/done": 45}),
                *points_of(BUSY, *range(140, 0, -10)),
            ),
            "balanced",
            "",
        ),
        (run({"ready": 9}, {"full": True, "tentative": 5}), "commit_due", "5 samples wait for a checkpoint"),
        (
            run(
                {"ready": 9},
                {"full": True, "ready": 5, "stored_bytes": 60 * 2**30},
                limits={"samples": QueueLimits()},
            ),
            "store_full",
            "60.0 GiB of 64.0 GiB stored",
        ),
        (
            run({"ready": 9}, {"full": True, "ready": 70, "stored_bytes": 3}, limits={"samples": QueueLimits()}),
            "producers_wait",
            "70 samples are not trained on: train on more ranks",
        ),
        (run({"done": 9, "closed": True}, {"full": True, "ready": 70}, alive={"trainer": 1}), "balanced", "in balance"),
        (run({"ready": 9}, {"leased": 1}, workers=(trainer(0.62),)), "trainers_wait", "data 62% of the time: add prod"),
        (run({"ready": 9}, {"ready": 8}, workers=(trainer(0.5),)), "trainers_wait", "reading them is slow"),
        (run({"ready": 9}, {"ready": 8}, workers=(trainer(0.5, epoch=1),)), "trainers_wait", "add producers"),
        (run({"ready": 9}, {"ready": 8}, workers=(trainer(0.5, "b"),)), "trainers_wait", "add producers"),
        (run({"done": 9}, {"leased": 8}, workers=(trainer(0.5),)), "trainers_wait", "no prompts are left, feed more"),
        (run({"held": 8, "closed": True}, {"leased": 8}, workers=(trainer(0.5),)), "trainers_wait", "end of the run"),
        (run({"ready": 9}, {"leased": 8}, workers=(trainer(float("nan")),)), "trainers_wait", "as they come"),
        (run({"ready": 9}, {"leased": 8}), "trainers_wait", "add producers"),
        (
            run({"ready": 9}, {"leased": 8}, workers=(trainer(0.03),)),
            "balanced",
            "trainers wait for data 3% of the time",
        ),
        (run({"ready": 9}, {"leased": 8}, workers=(trainer(0.9, at_s=NOW_S - 60),)), "trainers_wait", "as they come"),
        (run({"ready": 9}, {"leased": 8}, workers=(trainer(0.9, state="ended"),)), "trainers_wait", "as they come"),
    ],
)
def test_a_run_is_told_by_what_holds_it_up(facts: RunFacts, kind: str, told: str) -> None:
    found = bottleneck(facts)
    assert (found.kind, told in found.sentence) == (kind, True), found
    assert found.kind in KINDS


FAST, SLOW = stats("samples", "a", full=True, tentative=5), stats("samples", "b", full=True, ready=90, tentative=5)


def of_groups(facts: RunFacts, *samples: QueueStats) -> RunFacts:
    return replace(facts, samples={(each.name, each.group): each for each in samples})


@pytest.mark.parametrize("samples", [(FAST, SLOW), (SLOW, FAST)])
def test_a_queue_without_room_is_told_by_the_group_that_is_furthest_behind(samples: tuple[QueueStats, ...]) -> None:
    facts = of_groups(BUSY, *samples)
    told = "95 samples are not trained on by group b"
    assert bottleneck(facts).sentence == f"producers wait for room, {told}: train on more ranks"
    still = bottleneck(with_series(facts, *points_of(facts, *range(200, 0, -10))))
    assert still.kind == "stalled"
    assert still.sentence.endswith(f"; samples has no room, {told}")


def test_a_group_that_has_no_trainer_is_told_while_another_one_trains() -> None:
    busy = replace(BUSY, journal=replace(BUSY.journal, workers=(trainer(0.0, "a"),)))
    facts = of_groups(busy, stats("samples", "a", leased=1), stats("samples", "b", ready=37, leased=1))
    told = "no trainer of group b lives: 38 samples left; start `eaglefeed train train.group=b`"
    assert bottleneck(facts) == ("no_trainers", told)
    both = replace(facts, journal=replace(facts.journal, workers=(trainer(0.0, "a"), trainer(0.0, "b"))))
    assert bottleneck(both).kind == "balanced"
    starting = replace(facts, prompts=replace(facts.prompts, workers=BOTH | {"trainer": 2}))
    assert bottleneck(starting).kind == "balanced"  # the second one has not told its group yet


def test_the_groups_that_are_left_are_named_where_nobody_trains() -> None:
    nobody = run({"done": 40, "closed": True}, {}, alive={})
    of_b = of_groups(nobody, stats("samples", "a", done=40), stats("samples", "b", ready=40))
    assert bottleneck(of_b).sentence.endswith("; start `eaglefeed train train.group=b`")
    of_both = of_groups(nobody, stats("samples", "a", tentative=4), stats("samples", "b", ready=40))
    fix = "; start `eaglefeed train train.group=a` and `eaglefeed train train.group=b`"
    assert bottleneck(of_both).sentence.endswith(fix)


def test_a_run_that_ended_with_dead_letters_says_so_and_where_they_are() -> None:
    over = run({"done": 9, "closed": True}, {"done": 5, "closed": True}, alive={})
    samples = stats("samples", done=9, closed=True), stats("samples", "b", done=5, dead=4, closed=True)
    sentence = "done: all that could be was trained on; 4 dead letters left, see "
    assert bottleneck(of_groups(over, *samples)).sentence == sentence + (
        "`eaglefeed queue dead ls --queue samples --group b`"
    )


def test_nobody_waits_for_room_in_a_later_epoch_s_queue() -> None:
    later = stats("samples.e1", full=True, ready=70, stored_bytes=80 * 2**30)
    facts = of_groups(run({"done": 9, "closed": True}, {}, alive={"trainer": 1}), stats("samples", done=9), later)
    assert bottleneck(replace(facts, limits={later.name: QueueLimits()})).kind == "balanced"
    due = of_groups(facts, stats("samples.e1", full=True, tentative=70))
    assert bottleneck(due).kind == "commit_due"


def test_producers_that_have_ended_wait_for_no_room() -> None:
    series = tuple(point | {"producers/alive": 1} for point in PAUSED)
    facts = run({"done": 9, "closed": True}, {"ready": 8}, alive={"trainer": 1}, workers=(trainer(0.1),))
    found = bottleneck(with_series(facts, *series))
    assert found == ("balanced", "in balance: trainers wait for data 10% of the time")


def test_dead_letters_that_grow_are_told_with_their_class_and_where_to_look() -> None:
    facts = run(
        {"ready": 50, "done": 50},
        {"ready": 4, "done": 40, "dead": 6},
        dead={("samples", "main"): DeadFacts(6, 6, {"SampleCorrupt": 6})},
    )
    before = points_of(facts, 100, 50, **{"queue/samples/main/dead": 1, "queue/samples/main/done": 30})
    found = bottleneck(with_series(facts, *before))
    assert found.kind == "dead_growing"
    assert found.sentence == (
        "5 dead letters more in the last 100 s, mostly SampleCorrupt: see `eaglefeed queue dead ls --queue samples`"
    )
    few = points_of(facts, 100, 50, **{"queue/samples/main/dead": 5, "queue/samples/main/done": 20})
    assert bottleneck(with_series(facts, *few)).kind == "balanced"  # 1 of 21


@pytest.mark.parametrize(("alive", "share"), [(1, 0.4), (2, 0.2)])
def test_the_wait_for_room_is_a_share_of_all_producers_time(alive: int, share: float) -> None:
    series = tuple(point | {"producers/alive": alive} for point in PAUSED)
    facts = with_series(run({"ready": 9}, {"ready": 8}, workers=(trainer(0.1),)), *series)
    assert waits(facts) == (0.1, pytest.approx(share))
    found = bottleneck(facts)
    assert (found.kind, f"{share:.0%} of the time" in found.sentence) == ("producers_wait", True)


def test_the_wait_for_data_is_the_mean_of_all_groups_newest_trainers() -> None:
    told = (trainer(0.2, "a"), trainer(0.6, "b"), trainer(0.9, "b", at_s=NOW_S - 5))
    assert waits(run({"ready": 9}, {}, workers=told)).data == pytest.approx(0.4)


def test_waits_are_unknown_where_nobody_told() -> None:
    assert waits(run({"ready": 9}, {})) == (None, None)
    assert waits(run({"ready": 9}, {}, workers=(trainer("much"),))).data is None  # type: ignore[arg-type]


def test_a_fuller_wait_wins_over_a_smaller_one() -> None:
    series = tuple(point | {"producers/alive": 1} for point in PAUSED)
    facts = with_series(run({"ready": 9}, {"leased": 8}, workers=(trainer(0.7),)), *series)
    assert bottleneck(facts).kind == "trainers_wait"


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("SampleCorrupt: bad", "SampleCorrupt"),
        ("OutOfMemoryError: CUDA", "OutOfMemoryError"),
        ("ValueError: x: y", "ValueError"),
        ("its lease ran out 5 times while it was leased alone; last error: ValueError: x", "crashed"),
        ("no such thing", "other"),
        ("Evil<script>Error: x", "other"),
        ("", "other"),
    ],
)
def test_reasons_fall_into_few_known_classes(reason: str, wanted: str) -> None:
    assert reason_class(reason) == wanted
    assert wanted in REASON_CLASSES
