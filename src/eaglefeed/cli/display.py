"""What a person sees of a run: one panel on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from eaglefeed.clock import SYSTEM_CLOCK, Clock

__all__ = ["RunDisplay"]

_PLAIN_EVERY_S = 10.0
_KEPT_EVENTS = 6


class RunDisplay:
    """Rows of a run (produce, queue, store, train, bottleneck) and the last events below them, on stderr.

    Args:
        title: the panel's.
        clock: spaces the plain lines.
    """

    def __init__(self, title: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console = Console(stderr=True)
        self._title, self._clock = title, clock
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._rows: dict[str, str] = {}
        self._events: list[str] = []
        self._printed_s = clock.monotonic()

    def __enter__(self) -> "RunDisplay":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, rows: dict[str, str]) -> None:
        """Show these rows; without a terminal as one line every ten seconds."""
        self._rows |= rows
        if self._live:
            self._live.update(self._panel())
        elif self._clock.monotonic() - self._printed_s >= _PLAIN_EVERY_S:
            self._printed_s = self._clock.monotonic()
            sys.stderr.write(" | ".join(f"{name}: {text}" for name, text in self._rows.items()) + "\n")

    def event(self, text: str) -> None:
        """Show something that happened once."""
        self._events = [*self._events, text][-_KEPT_EVENTS:]
        if self._live:
            self._live.update(self._panel())
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, text in self._rows.items():
            table.add_row(f"[bold cyan]{name}", text)
        for text in self._events:
            table.add_row("", f"[dim]{text}")
        return Panel(table, title=self._title, border_style="cyan")
