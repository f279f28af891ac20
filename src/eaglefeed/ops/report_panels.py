"""A report's plots, from the points that `ops.series` names: what a run measured over time, and over steps."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from eaglefeed.ops.report_plots import Drawing, Line, Mark, Plot, Point, draw
from eaglefeed.ops.report_values import number
from eaglefeed.ops.series import queue_key, trainer_key
from eaglefeed.ops.wording import count, human_bytes, percent, significant

__all__ = ["accept_length", "recent_accuracies", "time_panels", "training_panels"]

_Series = Sequence[Mapping[str, Any]]
_MAX_LINES = 4
_MAX_DEPTH = 16
_RECENT = 10
_MADE = ("ready", "delayed", "leased", "tentative", "done", "dead")
_LEARNED = ("tentative", "done")


def accept_length(accuracies: Iterable[float]) -> float:
    """Tokens a verifying forward would give if training's accuracies were its chances: 1 + a1 + a1 a2 + ...

    Args:
        accuracies: by depth, each the share of positions whose next token was guessed.
    """
    length = chance = 1.0
    for accuracy in accuracies:
        chance *= accuracy
        length += chance
    return length


def recent_accuracies(series: _Series, group: str) -> list[float]:
    """A group's accuracies by depth, means over its last points: those of ten seconds alone jump about."""
    told = [depths for point in series if (depths := _depths(point, group))][-_RECENT:]
    return [fmean(of_depth) for of_depth in zip(*told, strict=False)]


def time_panels(document: Mapping[str, Any]) -> list[Drawing]:
    """Progress, depth, room, waits, pace and workers over time, as far as they were measured."""
    series, shown = document["series"], document["lanes"][-_MAX_LINES:]
    makers = (_progress, _depth, _stored, _waits, _pace, _alive)
    return _drawn(make(series, shown, document) for make in makers)


def training_panels(document: Mapping[str, Any]) -> list[Drawing]:
    """Loss, estimated acceptance length and accuracies over steps, of each group."""
    series, groups = document["series"], list(dict.fromkeys(lane["group"] for lane in document["lanes"]))[:_MAX_LINES]
    return _drawn(
        [
            Plot(
                id="loss",
                title="Loss",
                lines=[
                    _by_step(series, group, [number(p, trainer_key(group, "loss")) for p in series]) for group in groups
                ],
                over_time=False,
                from_zero=False,
            ),
            _lengths(series, groups, document["evaluation"] or {}),
            *(_accuracies(series, group) for group in groups[:1]),
        ]
    )


def _drawn(plots: Iterable[Plot]) -> list[Drawing]:
    return [drawing for drawing in map(draw, plots) if drawing is not None]


def _progress(series: _Series, shown: _Series, document: Mapping[str, Any]) -> Plot:
    lines = [_produced(series)]
    lines += [_counts(series, lane, _LEARNED, _trained(lane, shown)) for lane in shown]
    fed = max((lane["total"] for lane in document["lanes"]), default=0)
    return Plot(
        id="progress",
        title="Progress",
        lines=lines,
        words=count,
        least_step=1.0,
        marks=[Mark("fed", fed)] if fed else [],
    )


def _trained(lane: Mapping[str, Any], shown: _Series) -> str:
    return f"trained, {lane['title']}" if len(shown) > 1 else "trained"


def _depth(series: _Series, shown: _Series, document: Mapping[str, Any]) -> Plot:
    if len(shown) == 1:
        named = (("ready", "ready"), ("leased", "leased"), ("tentative", "waiting for a commit"))
        lines = [_counts(series, shown[0], [name], title) for name, title in named]
    else:
        lines = [_counts(series, lane, ["ready"], f"ready, {lane['title']}") for lane in shown]
    marks = _marks(document, "count")
    return Plot(id="depth", title="Samples in the queue", lines=lines, words=count, least_step=1.0, marks=marks)


def _stored(series: _Series, shown: _Series, document: Mapping[str, Any]) -> Plot:
    queues = {lane["queue"]: lane for lane in shown}
    lines = [
        _line(series, f"stored, epoch {lane['epoch']}" if len(queues) > 1 else "stored", _key(lane, "stored_bytes"))
        for lane in queues.values()
    ]
    return Plot(
        id="stored",
        title="Bytes in the store",
        lines=lines,
        words=human_bytes,
        tick_words=human_bytes,
        marks=_marks(document, "bytes"),
        in_bytes=True,
    )


def _marks(document: Mapping[str, Any], unit: str) -> list[Mark]:
    values = ((name, number(document["storage"], f"{name}_{unit}")) for name in ("high", "low"))
    return [Mark(f"{name} mark", value, is_minor=name == "low") for name, value in values if value is not None]


def _waits(series: _Series, shown: _Series, document: Mapping[str, Any]) -> Plot:  # noqa: ARG001  as its neighbours
    groups = list(dict.fromkeys(lane["group"] for lane in shown))
    of_groups = [
        (f"trainers of {group} for data" if len(groups) > 1 else "trainers for data", group) for group in groups
    ]
    lines = [_line(series, name, trainer_key(group, "data_wait")) for name, group in of_groups]
    lines.append(_room_wait(series))
    note = "Shares of the time. The side that waits is not the bottleneck; the other one is."
    return Plot(id="waits", title="Who waits", lines=lines, words=percent, tick_words=percent, top=1.0, note=note)


def _pace(series: _Series, shown: _Series, document: Mapping[str, Any]) -> Plot:  # noqa: ARG001
    lines = [_growth(_produced(series), "produced")]
    lines += [_growth(_counts(series, lane, _LEARNED, ""), _trained(lane, shown)) for lane in shown]
    return Plot(id="pace", title="Samples a second", lines=lines, words=significant)


def _alive(series: _Series, shown: _Series, document: Mapping[str, Any]) -> Plot:  # noqa: ARG001
    lines = [_line(series, name, f"{name}/alive") for name in ("producers", "trainers")]
    return Plot(id="alive", title="Workers alive", lines=lines, words=count, top=2.0, least_step=1.0)


def _produced(series: _Series) -> Line:
    """Samples of the first epoch; any group tells how many there are."""
    fields = [key for key in (series[-1] if series else {}) if key.startswith("queue/samples/")]
    lane = {"queue": "samples", "group": fields[0].split("/")[2]} if fields else {"queue": "samples", "group": ""}
    return _counts(series, lane, _MADE, "produced")


def _key(lane: Mapping[str, Any], name: str) -> str:
    return queue_key(lane["queue"], lane["group"], name)


def _counts(series: _Series, lane: Mapping[str, Any], names: Iterable[str], title: str) -> Line:
    return _sum(title, [_line(series, name, _key(lane, name)) for name in names])


def _line(series: _Series, name: str, field: str) -> Line:
    """A field as it stands in the points."""
    start_s = series[0]["at_s"] if series else 0.0
    found = ((point["at_s"] - start_s, number(point, field)) for point in series)
    return Line(name, [Point(x, y) for x, y in found if y is not None])


def _sum(name: str, lines: Sequence[Line]) -> Line:
    totals: dict[float, float] = {}
    for x, y in (point for line in lines for point in line.points):
        totals[x] = totals.get(x, 0.0) + y
    return Line(name, [Point(x, totals[x]) for x in sorted(totals)])


def _growth(line: Line, name: str) -> Line:
    """How fast a count grew a second; where it fell, a restore or a lost worker took it back, and nothing is known."""
    rises = [(a, b) for a, b in pairwise(line.points) if b.x > a.x and b.y >= a.y]
    return Line(name, [Point(b.x, (b.y - a.y) / (b.x - a.x)) for a, b in rises])


def _room_wait(series: _Series) -> Line:
    """The share of their time that the producers which lived paused."""
    paused = _growth(_line(series, "", "producers/paused_s"), "producers for room")
    alive = dict(_line(series, "", "producers/alive").points)
    shares = [Point(x, min(1.0, y / alive[x])) for x, y in paused.points if alive.get(x)]
    return Line(paused.name, shares)


def _by_step(series: _Series, group: str, values: Sequence[float | None]) -> Line:
    """A value over steps; where training went back, what it took back is left out."""
    kept: list[Point] = []
    for point, y in zip(series, values, strict=True):
        x = number(point, trainer_key(group, "step"))
        if x is None or y is None:
            continue
        while kept and kept[-1].x >= x:
            kept.pop()
        kept.append(Point(x, y))
    return Line(group, kept)


def _depths(point: Mapping[str, Any], group: str) -> list[float]:
    """The accuracies of a point, by depth, up to the first that is not there."""
    found = [number(point, trainer_key(group, f"accuracy/{depth}")) for depth in range(_MAX_DEPTH)]
    known = found[: found.index(None)] if None in found else found
    return [value for value in known if value is not None]


def _lengths(series: _Series, groups: Sequence[str], evaluation: Mapping[str, Any]) -> Plot:
    lines = []
    for group in groups:
        depths = [_depths(point, group) for point in series]
        lines.append(_by_step(series, group, [accept_length(each) if each else None for each in depths]))
    named = (("accept_length", "measured"), ("accept_length_prompt_lookup", "prompt lookup"))
    marks = [Mark(name, y) for field, name in named if (y := number(evaluation, field)) is not None]
    note = "Estimated from training's accuracies: 1 + a1 + a1·a2 + …; tokens a verifying forward would give."
    return Plot(
        id="lengths",
        title="Acceptance length, estimated",
        lines=lines,
        marks=marks,
        over_time=False,
        from_zero=False,
        note=note,
    )


def _accuracies(series: _Series, group: str) -> Plot:
    depths = [_depths(point, group) for point in series]
    deepest = min(max(map(len, depths), default=0), _MAX_LINES)
    lines = [
        _by_step(series, group, [each[depth] if depth < len(each) else None for each in depths])._replace(
            name=f"token {depth + 1}"
        )
        for depth in range(deepest)
    ]
    title = "Accuracy by place of the guessed token"
    return Plot(
        id="accuracies", title=title, lines=lines, words=percent, tick_words=percent, over_time=False, from_zero=True
    )
