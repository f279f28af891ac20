"""`eaglefeed queue top`: a run as it goes, in a live panel or in lines."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Annotated, Protocol

import typer

from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    RunQueues,
    open_queues,
    read_settings,
)
from eaglefeed.cli.top_view import Panes, plain_lines
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import QueueUnavailable
from eaglefeed.ops.facts import LOOK_AT, read_run
from eaglefeed.ops.live import LAST_POINTS, Look, Watch
from eaglefeed.ops.live_text import line_of
from eaglefeed.ops.wording import plain
from eaglefeed.queue.journal import MAX_POINTS
from eaglefeed.signals import interrupted_by_term

__all__ = ["top", "watch_run"]

_OUTAGE_S = 5.0
_LOOK_AT = 200
"""Dead letters of a queue whose reasons each tick reads."""


class View(Protocol):
    """Where looks go."""

    def show(self, look: Look) -> None:
        """A new one."""

    def away(self, seconds: float, reason: str) -> None:
        """There is none, for so long by now."""


def top(
    ctx: typer.Context,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and print what there is.")] = False,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a run: how fast it goes, who works, who waits for whom, and what holds it up.

    Without a terminal a line a look; with --json one JSON object a line. Ctrl-C ends it, and touches nothing else.
    """
    settings = read_settings(ctx, config, run__id=run, redis_url=redis)
    with ExitStack() as stack:
        queues = stack.enter_context(open_queues(settings, max_wait_s=_OUTAGE_S, known=True))
        if once:
            look = Watch().look(read_run(queues, look_at=LOOK_AT, last_points=MAX_POINTS if as_json else LAST_POINTS))
            _write([json.dumps(look.to_json(series=True))] if as_json else plain_lines(look))
            return
        view = _JsonLines() if as_json else stack.enter_context(Panes()) if sys.stdout.isatty() else _Lines()
        with _until_interrupted() as stop:
            watch_run(replace(queues, client=queues.client.impatient()), view, every_s=every, stop=stop)


def watch_run(
    queues: RunQueues,
    view: View,
    *,
    every_s: float,
    stop: Callable[[float], bool],
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Show a look every `every_s` until `stop` says so; it waits as long as it is told. An outage is shown, and borne.

    Args:
        queues: of the run, over a client that repeats no call.
        view: where looks go.
        every_s: between two looks.
        stop: waits, and says whether it is to end.
        clock: measures outages.
    """
    watch, seen_s = Watch(), clock.monotonic()
    while True:
        try:
            look = watch.look(read_run(queues, look_at=_LOOK_AT, last_points=LAST_POINTS))
        except QueueUnavailable as error:
            view.away(clock.monotonic() - seen_s, error.reason)
        else:
            seen_s = clock.monotonic()
            view.show(look)
        if stop(every_s):
            return


class _Lines:
    def show(self, look: Look) -> None:
        _write([line_of(look)])

    def away(self, seconds: float, reason: str) -> None:
        _write([plain(f"the queue is away for {seconds:.0f} s: {reason}")])


class _JsonLines:
    def show(self, look: Look) -> None:
        _write([json.dumps(look.to_json(series=False))])

    def away(self, seconds: float, reason: str) -> None:
        _write([json.dumps({"queue_away_s": round(seconds, 1), "reason": reason})])


def _write(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def _until_interrupted() -> Iterator[Callable[[float], bool]]:
    """Ctrl-C, or a SIGTERM, ends what is watched: nothing is under way that could be lost."""
    with interrupted_by_term(), suppress(KeyboardInterrupt):
        yield threading.Event().wait
