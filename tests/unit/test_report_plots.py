"""Plots: where points land, which labels stand where, and what stays of many points."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest

from eaglefeed.ops.report_plots import Drawing, Line, Mark, Plot, Point, draw
from eaglefeed.ops.wording import count, human_bytes, percent


def _drawn(*lines: Line, **options: Any) -> Drawing:
    drawing = draw(Plot(id="p", title="A plot", lines=lines, **options))
    assert drawing is not None
    return drawing


def _line(*values: float, name: str = "a", every: float = 10.0) -> Line:
    return Line(name, [Point(at * every, value) for at, value in enumerate(values)])


def _coordinates(d: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.-]+) ([\d.-]+)", d)]


def test_a_line_spans_the_box_from_the_first_to_the_last_point() -> None:
    (path,) = _drawn(_line(0, 50, 100)).paths
    # 1000 wide; 0 to 100 in 300 with a margin of 6 at either side
    assert _coordinates(path.d)[:3] == [(0, 294), (500, 150), (1000, 6)]
    assert path.newest == "100"


def test_ticks_are_round_numbers_around_all_values() -> None:
    assert [tick.words for tick in _drawn(_line(3, 97)).y_ticks] == ["0", "25", "50", "75", "100"]
    assert [tick.words for tick in _drawn(_line(2.1, 2.42), from_zero=False).y_ticks] == [
        "2.1",
        "2.2",
        "2.3",
        "2.4",
        "2.5",
    ]
    assert [tick.words for tick in _drawn(_line(0, 0.4), words=percent, tick_words=percent, top=1.0).y_ticks] == [
        *("0", "25 %", "50 %", "75 %", "100 %")
    ]


def test_a_higher_value_stands_higher() -> None:
    percents = [tick.percent for tick in _drawn(_line(0, 10)).y_ticks]
    assert percents == sorted(percents, reverse=True)
    assert 0 <= percents[-1] < percents[0] <= 100


def test_bytes_have_ticks_at_whole_units() -> None:
    drawing = _drawn(_line(0, 3.1 * 2**30), words=human_bytes, tick_words=human_bytes, in_bytes=True)
    assert [tick.words for tick in drawing.y_ticks] == ["0", "1.0 GiB", "2.0 GiB", "3.0 GiB", "4.0 GiB"]


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (60, ["0", "15 s", "30 s", "45 s", "60 s"]),
        (1500, ["0", "5 min", "10 min", "15 min", "20 min", "25 min"]),
        (200_000, ["0", "12 h", "24 h", "36 h", "48 h"]),
        (230_000, ["0", "1 d", "2 d"]),
    ],
)
def test_time_is_told_in_units_that_fit(seconds: float, wanted: list[str]) -> None:
    told = [tick.words for tick in _drawn(_line(1, 2, every=seconds)).x_ticks]
    assert told == wanted


def test_a_mark_near_the_values_is_drawn_and_a_far_one_only_named() -> None:
    levels = _drawn(_line(0, 80), marks=[Mark("high", 100), Mark("cap", 1_000_000)], words=count).levels
    assert [(level.name, level.words, level.is_drawn) for level in levels] == [
        ("high", "100", True),
        ("cap", "1,000,000", False),
    ]


def test_a_line_has_a_gap_where_nothing_was_measured() -> None:
    points = [Point(x, 1) for x in (0, 10, 20, 30, 500, 510, 520)]
    (path,) = _drawn(Line("a", points)).paths
    assert path.d.count("M") == 2


def test_of_many_points_the_peaks_stay() -> None:
    values = [5.0] * 20_000
    values[12_345], values[17_001] = 90.0, 1.0
    (path,) = _drawn(_line(*values)).paths
    drawn = _coordinates(path.d)
    assert len(drawn) < 1000
    heights = {y for _, y in drawn}
    assert {34.8, 291.1} <= heights  # 294 - 288 * 90 / 100, and the same of 1
    assert all(before[0] <= after[0] for before, after in pairwise(drawn))


def test_numbers_that_are_not_finite_are_left_out() -> None:
    line = Line("a", [Point(0, 1), Point(1, math.nan), Point(2, math.inf), Point(3, 2)])
    (path,) = _drawn(line).paths
    assert "nan" not in path.d
    assert "inf" not in path.d


def test_without_two_points_there_is_no_plot() -> None:
    assert draw(Plot(id="p", title="t", lines=[])) is None
    assert draw(Plot(id="p", title="t", lines=[_line(1)])) is None


def test_all_values_alike_are_still_a_plot() -> None:
    for value in (0.0, 7.0, 1e-9, 1e300):
        assert _drawn(_line(value, value, value), from_zero=False).paths


def test_a_plot_is_told_in_words_and_numbers_too() -> None:
    drawing = _drawn(_line(4, 9, 2, name="ready"), words=count)
    assert drawing.summary == "ready between 2 and 9, 2 at the end"
    assert drawing.header == ["time", "ready"]
    assert drawing.rows == [["0:00:00", "4"], ["0:00:10", "9"], ["0:00:20", "2"]]
    assert len(_drawn(_line(*range(5000))).rows) == 20
