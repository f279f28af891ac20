"""Small line plots for pages that load nothing: the lines are SVG that stretches, the labels HTML that does not.

A plot is drawn into a box of 1000 by 300 units whatever its size on the page; strokes keep their width. Labels lie
beside it at percentages of its width and height, so they stay readable at any width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from eaglefeed.ops.wording import count, significant

__all__ = ["Drawing", "Line", "Mark", "Plot", "Point", "draw"]

_WIDTH, _HEIGHT, _MARGIN = 1000.0, 300.0, 6.0
_BUCKETS, _TABLE_ROWS, _MAX_TICKS = 300, 20, 5
_GAP = 4.0
_MARK_REACH = 2.0
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TIMES_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
_UNITS_S = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_KIB = 1024


class Point(NamedTuple):
    """A measurement: seconds since the run's first one, or a step, and the value there."""

    x: float
    y: float


class Line(NamedTuple):
    """One line; `points` in the order of their x."""

    name: str
    points: Sequence[Point]


class Mark(NamedTuple):
    """A level to compare with, such as a watermark; a minor one is named only where it is drawn."""

    name: str
    y: float
    is_minor: bool = False


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What is drawn.

    Args:
        id: unique in its page.
        title: what it shows.
        lines: those without points are left out.
        words: a value as people read it,
        tick_words: and at the y axis, where nothing but the number is needed.
        marks: drawn where the lines come near them, and named in any case.
        top: the y axis ends here at least.
        from_zero: the y axis begins with 0.
        least_step: of the y axis; 1 for what is counted.
        over_time: x is seconds; else steps.
        in_bytes: ticks at whole KiB, MiB and so on.
        note: how to read it.
    """

    id: str
    title: str
    lines: Sequence[Line]
    words: Callable[[float], str] = significant
    tick_words: Callable[[float], str] | None = None
    marks: Sequence[Mark] = ()
    top: float = 0.0
    from_zero: bool = True
    least_step: float = 0.0
    over_time: bool = True
    in_bytes: bool = False
    note: str = ""


class _Path(NamedTuple):
    name: str
    d: str
    dot: str
    area: str
    newest: str


class _Level(NamedTuple):
    name: str
    words: str
    percent: float
    is_drawn: bool
    is_minor: bool


class _Tick(NamedTuple):
    percent: float
    words: str


class Drawing(NamedTuple):
    """A plot as the page's template writes it; percentages are from the left and from the top."""

    id: str
    title: str
    note: str
    summary: str
    paths: list[_Path]
    levels: list[_Level]
    x_ticks: list[_Tick]
    y_ticks: list[_Tick]
    x_name: str
    header: list[str]
    rows: list[list[str]]
    num_points: int


class _Scale(NamedTuple):
    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def draw(plot: Plot) -> Drawing | None:
    """The plot's drawing; None where no line has two points."""
    lines = [Line(name, finite) for name, points in plot.lines if (finite := _finite(points))]
    if not any(len(line.points) > 1 for line in lines):
        return None
    x, y_ticks_at = _x_scale(lines), _y_ticks(plot, lines)
    y = _Scale(y_ticks_at[0], y_ticks_at[-1])
    levels = [_Level(m.name, plot.words(m.y), _down(y, m.y), y.low <= m.y <= y.high, m.is_minor) for m in plot.marks]
    words = plot.tick_words or _decimals(y_ticks_at[1] - y_ticks_at[0])
    return Drawing(
        id=plot.id,
        title=plot.title,
        note=plot.note,
        summary=_summary(plot, lines),
        paths=[_path(line, x, y, plot.words) for line in lines],
        levels=levels,
        x_ticks=_x_ticks(x, over_time=plot.over_time),
        y_ticks=[_Tick(_down(y, value), words(value) if value else "0") for value in y_ticks_at],
        x_name="time since the first measurement" if plot.over_time else "step",
        header=["time" if plot.over_time else "step", *(line.name for line in lines)],
        rows=_rows(plot, lines),
        num_points=max(len(line.points) for line in lines),
    )


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.x) and math.isfinite(point.y)]


def _x_scale(lines: Sequence[Line]) -> _Scale:
    low = min(line.points[0].x for line in lines)
    high = max(line.points[-1].x for line in lines)
    return _Scale(low, high if high > low else low + 1)


def _y_ticks(plot: Plot, lines: Sequence[Line]) -> list[float]:
    """Round numbers around everything that is drawn."""
    values = [point.y for line in lines for point in line.points]
    high = max(*values, plot.top)
    low = min(0.0, *values) if plot.from_zero else min(values)
    near = [mark.y for mark in plot.marks if low / _MARK_REACH <= mark.y <= _MARK_REACH * high]
    low, high = min(low, *near, low), max(high, *near, high)
    if high - low <= abs(high) * 1e-9:
        high = low + (abs(low) or 1.0)
    unit = float(_KIB ** int(math.log(max(high, 1), _KIB))) if plot.in_bytes else 1.0
    step = max(_round_step((high - low) / unit) * unit, plot.least_step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _round_step(span: float) -> float:
    rough = span / (_MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * 0.999)


def _x_ticks(x: _Scale, *, over_time: bool) -> list[_Tick]:
    span = x.high - x.low
    days = 86_400 * max(1.0, math.ceil(span / 86_400 / _MAX_TICKS))
    step = next((s for s in _TIMES_S if span / s <= _MAX_TICKS), days) if over_time else max(1.0, _round_step(span))
    numbers = range(math.ceil(x.low / step), math.floor(x.high / step) + 1)
    return [_Tick(100 * x.share(n * step), _time(n * step, step) if over_time else count(n * step)) for n in numbers]


def _time(seconds: float, step_s: float) -> str:
    if not seconds:
        return "0"
    unit_s, unit = next((each for each in _UNITS_S if step_s >= each[0]), _UNITS_S[-1])
    return f"{seconds / unit_s:,.0f} {unit}"


def _decimals(step: float) -> Callable[[float], str]:
    """Numbers with as many decimals as multiples of `step` need, which has at most two digits."""
    power = math.floor(math.log10(step))
    decimals = max(0, -power + (round(step / 10.0 ** (power - 1)) % 10 > 0))
    return lambda value: f"{value:,.{decimals}f}" if decimals else count(value)


def _down(y: _Scale, value: float) -> float:
    """Percent from the top of the box, which has a margin for the stroke."""
    return 100 * _y(y, value) / _HEIGHT


def _y(y: _Scale, value: float) -> float:
    return _HEIGHT - _MARGIN - y.share(value) * (_HEIGHT - 2 * _MARGIN)


def _path(line: Line, x: _Scale, y: _Scale, words: Callable[[float], str]) -> _Path:
    pieces = [[(_WIDTH * x.share(p.x), _y(y, p.y)) for p in piece] for piece in _pieces(_thinned(line.points, x))]
    last = pieces[-1][-1]
    base = _y(y, 0.0)
    return _Path(
        line.name,
        "".join(_polyline([*piece, piece[-1]]) for piece in pieces),  # twice its end: a lone point is a dot
        _polyline([last, last]),
        "".join(f"{_polyline([(piece[0][0], base), *piece, (piece[-1][0], base)])}Z" for piece in pieces if y.low <= 0),
        words(line.points[-1].y),
    )


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _thinned(points: Sequence[Point], x: _Scale) -> list[Point]:
    """At most two points a bucket of x, the lowest and the highest: peaks stay."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    buckets: dict[int, list[Point]] = {}
    for point in points:
        buckets.setdefault(int(x.share(point.x) * (_BUCKETS - 1)), []).append(point)
    return [each for bucket in buckets.values() for each in sorted({min(bucket, key=_value), max(bucket, key=_value)})]


def _value(point: Point) -> float:
    return point.y


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Where nothing was measured for long, the line has a gap."""
    steps = [after.x - before.x for before, after in pairwise(points)]
    widest = _GAP * median(steps) if steps else 0.0
    pieces = [[points[0]]]
    for point, step in zip(points[1:], steps, strict=True):
        if step > widest > 0:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def _summary(plot: Plot, lines: Sequence[Line]) -> str:
    """The lines in words, for those who do not see them."""
    told = []
    for name, points in lines:
        values = [point.y for point in points]
        span = f"between {plot.words(min(values))} and {plot.words(max(values))}"
        told.append(f"{name} {span}, {plot.words(values[-1])} at the end")
    return "; ".join(told)


def _rows(plot: Plot, lines: Sequence[Line]) -> list[list[str]]:
    """Some of the numbers, evenly spread; all of them stand in report.json."""
    places = sorted({point.x for line in lines for point in line.points})
    last = len(places) - 1
    chosen = sorted({round(at * last / (_TABLE_ROWS - 1)) for at in range(_TABLE_ROWS)}) if last else [0]
    values = [dict(line.points) for line in lines]
    return [
        [
            _clock(places[at]) if plot.over_time else count(places[at]),
            *(plot.words(column[places[at]]) if places[at] in column else "" for column in values),
        ]
        for at in chosen
    ]


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
