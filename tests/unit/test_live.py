"""What is shown of a run as it goes: rates that are worked out by hand, and words that no data can break."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from eaglefeed.cli.top import watch_run
from eaglefeed.cli.top_view import Panes, plain_lines
from eaglefeed.clock import ManualClock
from eaglefeed.errors import QueueUnavailable
from eaglefeed.ops.facts import DeadFacts, RunFacts
from eaglefeed.ops.live import Look, Watch
from eaglefeed.ops.live_text import line_of, parts_of, waits_of
from eaglefeed.ops.series import series_point
from eaglefeed.queue.base import QueueLimits, QueueStats
from eaglefeed.queue.journal import JournalView, WorkerView

NOW_S = 10_000.0
BOTH = {"producer": 1, "trainer": 1}


def stats(name: str, group: str = "main", **counts: Any) -> QueueStats:
    zero = ("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released", "redelivered")
    state = {"session": 0, "committed_step": 0, "stored_bytes": 0, "closed": False, "full": False, "workers": BOTH}
    return QueueStats(name=name, group=group, **(dict.fromkeys(zero, 0) | state | counts))


def facts(prompts: QueueStats, *samples: QueueStats, at_s: float = NOW_S, **more: Any) -> RunFacts:
    return RunFacts("demo", "unix:///q", at_s, prompts, {(each.name, each.group): each for each in samples}, **more)


def after(watch: Watch, seconds: float, **counts: int) -> Look:
    """A look at 100 prompts, of which so many were made, learned and so on."""
    made, learned = counts.get("made", 0), counts.get("learned", 0)
    prompts = stats("prompts", ready=100 - made, done=made, closed=True)
    samples = stats("samples", ready=made - learned, tentative=learned)
    return watch.look(facts(prompts, samples, at_s=NOW_S + seconds, started_s=NOW_S - 100))


def speeds(look: Look) -> dict[str, tuple[int, float | None, float | None]]:
    return {speed.name: (speed.total, speed.recent, speed.mean) for speed in look.speeds}


def test_a_rate_is_of_the_last_half_minute_and_since_the_start() -> None:
    watch = Watch()
    first = after(watch, 0, made=10)
    assert speeds(first) == {"fed": (100, None, 1.0), "produced": (10, None, 0.1), "trained": (0, None, 0.0)}
    assert speeds(after(watch, 0.5, made=10))["produced"] == (10, None, pytest.approx(10 / 100.5))  # too early
    after(watch, 10, made=30)
    assert speeds(after(watch, 20, made=50, learned=10)) == {
        "fed": (100, 0.0, 100 / 120),
        "produced": (50, 2.0, 50 / 120),
        "trained": (10, 0.5, 10 / 120),
    }
    assert speeds(after(watch, 50, made=50, learned=25))["trained"] == (25, 0.5, 25 / 150)  # against 20 s, not 0 s


def test_the_time_that_is_left_is_that_of_all_that_was_fed_at_the_rate_of_the_last_half_minute() -> None:
    watch = Watch()
    after(watch, 0, made=40)
    look = after(watch, 10, made=60, learned=20)
    assert look.eta_s == (40 + 40) / 2.0
    assert after(watch, 45, made=60, learned=20).eta_s is None  # nothing is trained on any more
    over = after(watch, 46, made=100, learned=100)
    assert (over.eta_s, parts_of(over)[0].title) == (0, "items")


def test_no_time_is_told_for_what_nobody_is_left_to_do() -> None:
    watch, alone = Watch(), {"trainer": 1}
    prompts = stats("prompts", ready=15, done=25, workers=alone)
    watch.look(facts(prompts, stats("samples", ready=20, done=5)))
    look = watch.look(facts(prompts, stats("samples", ready=10, done=15), at_s=NOW_S + 10))
    assert (look.bottleneck.kind, speeds(look)["trained"][1], look.eta_s) == ("no_producers", 1.0, None)


def test_the_slowest_group_says_how_long_it_takes() -> None:
    watch = Watch()
    prompts, other = stats("prompts", done=20, closed=True), stats("samples", "b", ready=20)
    watch.look(facts(prompts, stats("samples", "a", ready=20), other))
    groups = stats("samples", "a", ready=10, done=10), stats("samples", "b", ready=15, tentative=2, done=3)
    look = watch.look(facts(prompts, *groups, at_s=NOW_S + 10))
    assert {speed.name: speed.recent for speed in look.speeds if "trained" in speed.name} == {
        "trained a": 1.0,
        "trained b": 0.5,
    }
    assert look.eta_s == 30.0


def test_a_trainer_that_goes_back_has_no_rate_below_nothing() -> None:
    watch = Watch()
    after(watch, 0, made=50, learned=20)
    assert speeds(after(watch, 10, made=50, learned=15))["trained"][1] is None


def test_the_first_look_takes_its_rates_from_the_journal() -> None:
    early = series_point([stats("prompts", ready=90, done=10), stats("samples", ready=10)], (), now_s=NOW_S)
    points = (early | {"at_s": NOW_S - 5000}, early | {"at_s": NOW_S - 40}, early | {"at_s": NOW_S - 10})
    now = facts(stats("prompts", ready=50, done=50), stats("samples", ready=30, tentative=20))
    look = Watch().look(replace(now, journal=JournalView(series=points)))
    assert {speed.name: speed.recent for speed in look.speeds} == {"fed": 0.0, "produced": 1.0, "trained": 0.5}


def test_a_watch_of_a_week_keeps_no_more_than_minutes() -> None:
    watch = Watch()
    for tick in range(2000):
        after(watch, 10 * tick, made=50)
    assert len(watch._marks) == 31


def hostile(**more: Any) -> Look:
    """A run in which everything that comes from others would break a terminal."""
    evil = "a\x1b[2J[bold]\u202eb\n" + "x" * 500
    workers = (
        WorkerView("producer", evil, NOW_S - 3, {"host": evil, "state": evil, "produced": "many", "dead": 2}),
        WorkerView("trainer", "t", NOW_S - 4, {"state": "working", "step": 7, "loss": float("nan"), "data_wait": 0.62}),
        WorkerView("trainer", "gone", NOW_S - 400, {"state": "working", "group": "b", "epoch": 1, "loss": 2.5}),
        *(WorkerView("producer", f"old-{n}", NOW_S - 900, {"state": "ended"}) for n in range(20)),
    )
    journal = JournalView(
        workers=workers,
        facts={"feed:1": {"at_s": 1.0, "reasons": {evil: 3, "y": "?"}}, "feed:2": {"at_s": 2.0, "reasons": [4]}},
        totals={"feed.rejected": 3},
    )
    prompts = stats("prompts", ready=3, done=5, workers={"producer": 1, "trainer": 3})
    samples = stats("samples", ready=2, delayed=1, tentative=1, dead=1500, stored_bytes=3 * 2**30, oldest_ready_s=75.0)
    found = facts(
        prompts,
        samples,
        journal=journal,
        limits={"samples": QueueLimits()},
        dead={("samples", "main"): DeadFacts(1500, 1000, {evil: 999, "other": 1})},
        **more,
    )
    return Watch().look(found)


def test_texts_from_data_are_spelled_out_and_cut() -> None:
    shown = "\n".join(plain_lines(hostile()))
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert max(map(len, shown.split("\n"))) < 500
    assert "a\\x1b[2J[bold]\\u202eb\\nxxx" in shown
    json.dumps(hostile().to_json(series=True), allow_nan=False)


def test_a_look_tells_who_works_and_who_does_not() -> None:
    (rows,) = [part.rows for part in parts_of(hostile()) if part.title.startswith("workers")]
    told = {row[1][:6]: row for row in rows[1:]}
    assert told["t"][2:] == ("", "4.0 s ago", "working, step 7")
    assert told["gone"][3:] == ("6 min 40 s ago", "no sign of life, step 0, loss 2.50, group b, epoch 1")
    assert told["old-0"][4] == "ended, 0 samples"
    assert [row[1] for row in rows if "more" in row[1]] == ["and 11 more", "2 more"]
    assert len(rows) == 1 + 12 + 2


def test_a_look_tells_counts_room_dead_letters_and_rejected_rows() -> None:
    parts = {part.title: part.rows for part in parts_of(hostile())}
    samples = parts["queues"][2]
    assert samples[:8] == ("samples", "open", "2 + 1 later", "0", "1", "0", "1,500", "1 min 15 s")
    assert samples[8:] == ("4 of 100,000", "3.0 GiB of 64.0 GiB")
    assert [row[2] for row in parts["dead letters"][1:]] == ["999", "1", "of 1,500"]
    assert [row[1] for row in parts["3 rows rejected by feed"][1:]] == ["3", "0"]
    assert waits_of(hostile()) == "trainers wait for data 62 %, producers wait for room -"


def test_a_line_tells_all_of_a_look() -> None:
    assert line_of(hostile()).startswith(
        "1970-01-01 02:46:40 fed 8 (-), produced 1,504 (-), trained 1 (-); 1 producer, 3 trainers; "
        "trainers wait for data 62 %, producers wait for room -; "
    )
    assert line_of(hostile()).endswith(hostile().bottleneck.sentence)


def test_a_run_that_nobody_fed_is_shown_as_such() -> None:
    look = Watch().look(facts(stats("prompts", workers={}), stats("samples", workers={})))
    assert (look.bottleneck.kind, look.eta_s) == ("not_fed", None)
    assert "nobody works" in line_of(look)
    assert [part.title for part in parts_of(look)] == ["items", "queues"]


# The panel


def drawn(width: int, *, outage: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=60, color_system=None)
    panes = Panes(console)
    if outage:
        panes.show(hostile())
        panes.away(12.3, "Connection refused")
    else:
        panes.show(hostile())
    console.print(panes._live.renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200, 400])
def test_the_panel_fits_its_terminal_and_loses_no_number(width: int) -> None:
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b[2J" not in text
    assert [number for number in ("1,500", "999", "1,504") if number not in text.replace("│", " ")] == []


def test_the_panel_keeps_the_last_look_while_the_queue_is_away() -> None:
    text = drawn(120, outage=True)
    assert "the queue is away for 12 s: Connection refused" in text
    assert hostile().bottleneck.sentence[:40] in text


# The loop


class Seen:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def show(self, look: Look) -> None:
        self.told.append(look.facts.at_s)

    def away(self, seconds: float, reason: str) -> None:
        self.told.append((seconds, reason))


def test_an_outage_is_told_with_how_long_it_lasts_and_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, view = ManualClock(), Seen()
    answers: list[RunFacts | None] = [facts(stats("prompts"), at_s=1.0), None, None, facts(stats("prompts"), at_s=7.0)]

    def read(_queues: object, **_options: int) -> RunFacts:
        found = answers.pop(0)
        if found is None:
            raise QueueUnavailable("redis://there", "ConnectionError: refused")
        return found

    def stop(seconds: float) -> bool:
        clock.advance(seconds)
        return not answers

    monkeypatch.setattr("eaglefeed.cli.top.read_run", read)
    watch_run(None, view, every_s=2.0, stop=stop, clock=clock)  # type: ignore[arg-type]
    assert view.told == [1.0, (2.0, "ConnectionError: refused"), (4.0, "ConnectionError: refused"), 7.0]
