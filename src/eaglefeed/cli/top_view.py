"""How `eaglefeed queue top` draws a look: as a panel that fills the terminal, or as plain lines."""

from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eaglefeed.ops.live import Look
from eaglefeed.ops.live_text import Part, parts_of
from eaglefeed.ops.wording import plain, timestamp

__all__ = ["Panes", "plain_lines"]

_BAD = ("server_refuses", "no_workers", "stalled", "dead_growing")
_COLORS = dict.fromkeys(("balanced", "drained"), "green") | dict.fromkeys(_BAD, "red")
_ELSE, _GAP = "yellow", 2


class Panes:
    """The whole terminal, drawn anew at each look and when its size changes; the last look stays behind it as lines.

    Args:
        console: where; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, screen=True, refresh_per_second=4)
        self._look: Look | None = None

    def __enter__(self) -> "Panes":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._look is not None:
            self._console.out("\n".join(plain_lines(self._look)), highlight=False)

    def show(self, look: Look) -> None:
        """Draw a look."""
        self._look = look
        self._live.update(_panel(look, ""))

    def away(self, seconds: float, reason: str) -> None:
        """Say so above the last look."""
        told = f"the queue is away for {seconds:.0f} s: {reason}"
        self._live.update(_panel(self._look, told) if self._look else Text(told, style="bold red"))


def plain_lines(look: Look) -> list[str]:
    """A look without a terminal."""
    facts = look.facts
    lines = [f"run {facts.run} at {facts.address}, {timestamp(facts.at_s)}", look.bottleneck.sentence]
    for part in parts_of(look):
        widths = [max(map(len, column)) for column in zip(*part.rows, strict=True)]
        rows = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in part.rows)
        lines += ["", part.title, *(f"  {row}".rstrip() for row in rows)]
    return [plain(line, len(line)) for line in lines]


def _panel(look: Look, outage: str) -> Panel:
    said = Text(look.bottleneck.sentence, style=f"bold {_COLORS.get(look.bottleneck.kind, _ELSE)}")
    told: list[RenderableType] = [Text(outage, style="bold red")] if outage else []
    title = Text(f"{look.facts.run} · {look.facts.address} · {timestamp(look.facts.at_s)} UTC")
    return Panel(Group(*told, said, *map(_Rows, parts_of(look))), title=title, border_style="cyan")


class _Rows:
    """A part as a table, or where the terminal is too narrow for it a paragraph a row."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's own interface, called at each drawing."""
        heads, *rows = self._part.rows
        yield Text(self._part.title, style="bold cyan")
        if sum(max(map(len, column)) + _GAP for column in zip(*self._part.rows, strict=True)) > options.max_width:
            yield from (_paragraph(heads, row) for row in rows)
            return
        table = Table(box=None, padding=(0, _GAP, 0, 0))
        for head in heads:
            table.add_column(Text(head, style="dim"), no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        yield table


def _paragraph(heads: tuple[str, ...], row: tuple[str, ...]) -> Text:
    cells = [f"{head} {cell}".strip() for head, cell in zip(heads, row, strict=True) if cell]
    return Text(", ".join(cells))
