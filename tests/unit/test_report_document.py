"""report.json: what a run's facts make of it, reckoned here by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

import report_runs
from eaglefeed.ops.facts import DeadFacts, RunFacts
from eaglefeed.ops.report_document import report_document
from eaglefeed.ops.report_outcome import lanes, outcome
from eaglefeed.ops.report_page import render
from eaglefeed.ops.report_panels import accept_length
from eaglefeed.ops.report_sections import report_page
from eaglefeed.queue.journal import JournalView
from report_runs import START_S, stats


def _document(facts: RunFacts) -> dict[str, Any]:
    document = report_document(facts, version="0")
    json.dumps(document, allow_nan=False)
    return document


def _ended(prompts: dict[str, Any], *samples: dict[str, Any], alive: int = 0, stuck: bool = False) -> tuple[str, str]:
    found = lanes(stats("prompts", **prompts), [stats(each.pop("name", "samples"), **each) for each in samples])
    is_open = not prompts.get("closed", True)
    return tuple(vars(outcome(found, is_stuck=stuck, num_alive=alive, is_open=is_open)).values())  # type: ignore[return-value]


def test_the_outcome_says_in_one_sentence_what_happened() -> None:
    assert _ended({}, {}) == ("not_fed", "Nothing has been fed yet.")
    assert _ended({"done": 5}, {"done": 5}) == ("done", "All 5 items are produced and trained on.")
    assert _ended({"done": 4, "dead": 1}, {"done": 3, "dead": 1}) == (
        "done",
        "3 of 5 items are trained on, 2 are dead letters.",
    )
    # 6 prompts to produce, 1 dead one, 8 samples: 3 ready, 1 leased, 2 tentative, 2 done
    middle = ({"ready": 5, "leased": 1, "dead": 1, "done": 8}, {"ready": 3, "leased": 1, "tentative": 2, "done": 2})
    assert _ended(*map(dict, middle)) == ("stopped", "Stopped with 10 of 15 items left.")
    assert _ended(*map(dict, middle), alive=2) == ("under_way", "4 of 15 items are trained on, 10 are left.")
    assert _ended(*map(dict, middle), alive=2, stuck=True) == (
        "stuck",
        "4 of 15 items are trained on, and it is stuck with 10 left.",
    )


def test_items_that_wait_for_a_commit_are_not_done() -> None:
    assert _ended({"done": 5}, {"done": 3, "tentative": 2})[0] == "stopped"
    assert "2 trained items waiting for a checkpoint's commit" in _ended({"done": 5}, {"done": 3, "tentative": 2})[1]


def test_a_run_that_is_open_for_more_says_so() -> None:
    assert _ended({"done": 5, "closed": False}, {"done": 5})[1].endswith("; more may be fed.")


def test_of_several_groups_the_one_that_is_furthest_behind_is_told() -> None:
    a, b = {"group": "a", "done": 9}, {"group": "b", "done": 2, "ready": 7}
    assert _ended({"done": 9}, a, b, alive=1)[1] == "In epoch 0, group b, 2 of 9 items are trained on, 7 are left."
    later = {"name": "samples.e1", "ready": 4, "done": 5}
    assert _ended({"done": 9}, {"done": 9}, later, alive=1)[1] == "In epoch 1, 5 of 9 items are trained on, 4 are left."


def test_parked_and_held_items_are_counted_once() -> None:
    (lane,) = lanes(stats("prompts", ready=2, held=3, done=1), [stats("samples", parked=2, ready=3, done=1)])
    assert (lane.total, lane.to_produce, lane.left) == (6, 2, 5)


@pytest.mark.parametrize(("accuracies", "length"), [([], 1.0), ([0.5], 1.5), ([0.6, 0.5, 0.1], 1.93)])
def test_the_estimated_length_is_the_sum_of_products(accuracies: list[float], length: float) -> None:
    assert accept_length(accuracies) == pytest.approx(length)


def test_the_usual_run_is_told_in_numbers() -> None:
    document = _document(report_runs.usual())
    # total 400: 220 produced, of which 160 trained, 1 dead, 2 leased, 57 ready; 180 to produce
    (lane,) = document["lanes"]
    assert (lane["total"], lane["trained"], lane["left"], lane["dead"]) == (400, 160, 239, 1)
    assert document["produced"] == 220
    assert (document["fed"]["rejected"], document["fed"]["reasons"]) == (2, {"no assistant turn": 2})
    producers = document["producers"]
    assert (producers["produced"], producers["num_tokens"], producers["paused_s"]) == (220, 110_000, 45.0)
    assert producers["paused_share"] == pytest.approx(45 / (897 + 400))
    (trainer,) = document["trainers"]
    assert trainer["wait_share"] == pytest.approx(220 / 878)
    assert trainer["accept_length_estimate"] == pytest.approx(1 + 0.57 + 0.57 * 0.475)  # the last ten points of 90
    assert document["dead"][0]["classes"] == [
        {"class": "SampleCorrupt", "letters": 1, "first": [["c-17", "SampleCorrupt: c-17: digest differs"]]}
    ]
    assert (document["storage"]["stored_bytes"], document["storage"]["peak_bytes"]) == (57 * 2**22, 57 * 2**22)
    assert document["storage"]["high_bytes"] == 2**30


def test_the_rest_is_reckoned_at_the_pace_of_the_last_minutes() -> None:
    document = _document(report_runs.usual())
    # 160 in 900 s, so 239 take 1344 s; counts are whole, the last 300 s give that to 2 %
    assert document["outcome"]["eta_s"] == pytest.approx(239 * 900 / 160, rel=0.02)


def test_the_timeline_holds_comings_goings_and_facts_in_order() -> None:
    told = [(event["at_s"] - START_S, event["what"]) for event in _document(report_runs.usual())["timeline"]]
    assert told == [
        (0.0, "producer gpu-1-4711 started"),
        (0.0, "producer gpu-2-42 started"),
        (0.0, "fed answers.jsonl: 400 new items, 2 rows rejected"),
        (20.0, "trainer gpu-3-7 started"),
        (400.0, "producer gpu-2-42 ended"),
    ]


def test_what_is_not_known_is_said() -> None:
    facts = report_runs.usual()
    dead = {("samples", "main"): DeadFacts(5000, 1000, {"other": 1000}, {})}
    journal = replace(facts.journal, series=(), totals={"forgotten_workers": 7, "feed.count": 103}, unreadable=2)
    told = "\n".join(_document(replace(facts, dead=dead, journal=journal, contract=None))["unknown"])
    for part in ("No plots", "first 1,000 of 5,000", "7 workers", "2 entries", "first 1 of 103", "The contract"):
        assert part in told


def test_sums_of_feeds_hold_those_that_are_not_kept() -> None:
    facts = report_runs.usual()
    journal = replace(facts.journal, totals={"feed.count": 200, "feed.rejected": 77, "feed.tokens": 10**9})
    fed = _document(replace(facts, journal=journal))["fed"]
    assert (fed["calls"], fed["rejected"], fed["tokens"], fed["queued"]) == (200, 77, 10**9, 400)


def test_tokens_of_what_was_fed_again_or_refused_are_not_counted_twice() -> None:
    facts = report_runs.usual()
    first = facts.journal.facts["feed:1"]
    again, refused = {**first, "queued": 0, "known": first["items"]}, {**first, "queued": None, "refused": "closed"}
    part = {**first, "items": 4, "queued": 1, "tokens": 800}
    journal = replace(facts.journal, facts={f"feed:{n}": each for n, each in enumerate((first, again, refused, part))})
    document = _document(replace(facts, journal=journal))
    assert document["fed"]["queued_tokens"] == 400_000 + 200
    assert "400,200 tokens" in render(report_page(document))


def test_an_empty_run_has_a_report() -> None:
    document = _document(report_runs.empty())
    assert document["outcome"]["state"] == "not_fed"
    assert "Nothing has been fed yet." in render(report_page(document))


def test_a_run_without_a_journal_has_a_report() -> None:
    document = _document(replace(report_runs.usual(), journal=JournalView(), contract=None))
    assert "No trainer has told of itself yet." in render(report_page(document))


def test_nothing_that_a_writer_of_the_queue_says_becomes_markup() -> None:
    page = render(report_page(_document(report_runs.hostile())))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert not set(page) & set("‮‬﻿\x1b\x00")
    assert len(page) < 300_000


@pytest.mark.parametrize("started_s", [-1.0, 253_402_300_800, 1e300, math.inf, "yesterday"])
def test_a_worker_that_tells_an_impossible_time_leaves_the_page_as_it_is(started_s: object) -> None:
    facts = report_runs.usual()
    liar = report_runs.producer("liar", facts.at_s, started_s=started_s)
    told = replace(facts, journal=replace(facts.journal, workers=(*facts.journal.workers, liar)))
    assert "liar" in render(report_page(_document(told)))


def test_a_long_series_makes_a_page_of_bounded_size() -> None:
    document = _document(report_runs.usual(num_points=2500))
    assert len(document["series"]) == 2500
    assert len(render(report_page(document))) < 200_000


def test_steps_that_training_took_back_are_not_drawn() -> None:
    facts = report_runs.usual()
    steps = [1, 2, 3, 4, 5, 3, 4]
    series = [
        {"at_s": START_S + n, "trainer/main/step": step, "trainer/main/loss": float(n)} for n, step in enumerate(steps)
    ]
    page = report_page(_document(replace(facts, journal=replace(facts.journal, series=tuple(series)))))
    (training,) = (section for section in page.sections if section.id == "training")
    # 3, 4 of the second time; loss is the place in the series
    assert training.drawings[0].rows == [["1", "0.00"], ["2", "1.00"], ["3", "5.00"], ["4", "6.00"]]
