"""What a report's page is made of: sections with figures, shares, plots, tables and events. The template draws them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eaglefeed.ops.report_plots import Drawing

__all__ = ["Column", "Event", "Figure", "Flow", "Page", "Part", "Section", "Table", "columns"]


class Figure(NamedTuple):
    """A number at the top."""

    name: str
    value: str
    note: str = ""
    is_trouble: bool = False


class Part(NamedTuple):
    """A part of a whole, from 0 to 1, in one of the page's seven colours."""

    name: str
    words: str
    share: float
    color: int


class Flow(NamedTuple):
    """A whole and its parts, as a bar."""

    title: str
    summary: str
    parts: Sequence[Part]


class Column(NamedTuple):
    """A table's column; numbers stand at the right, wide ones are not squeezed, times not broken."""

    name: str
    is_number: bool = False
    is_wide: bool = False
    is_time: bool = False


class Table(NamedTuple):
    """A table; the first cell of a row names it. A folded one is opened by its title."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_folded: bool = False


class Event(NamedTuple):
    """Something that happened once."""

    at: str
    iso: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page; what is empty is not drawn."""

    id: str
    title: str
    note: str = ""
    flows: Sequence[Flow] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    pairs: Sequence[tuple[str, str]] = ()
    events: Sequence[Event] = ()
    items: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole page.

    Args:
        run: the run's id.
        state: done, under_way, stopped, stuck or not_fed; `state_words` as people read it.
        sentence: what happened, and `why` the bottleneck.
        when: when it was, and of when this report is.
        figures: the numbers at the top.
        sections: in the order in which one asks.
        version: of eaglefeed.
    """

    run: str
    state: str
    state_words: str
    sentence: str
    why: str
    when: str
    figures: Sequence[Figure]
    sections: Sequence[Section]
    version: str


def columns(*names: str) -> list[Column]:
    """Columns by name: "#" at the beginning makes one of numbers, "~" a wide one, "@" one of times."""
    return [Column(name.lstrip("#~@"), *(name.startswith(mark) for mark in "#~@")) for name in names]
