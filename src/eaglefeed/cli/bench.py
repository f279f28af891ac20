"""`eaglefeed bench`: what the queue does a second, and what it costs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from eaglefeed import logs
from eaglefeed.cli.common import JsonOption, emit
from eaglefeed.errors import EaglefeedError

__all__ = ["app"]

app = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Measure what the queue does a second, and what it costs."""


@app.command("queue")
def queue(
    redis: Annotated[
        str | None, typer.Option("--redis", help="An empty database, which is emptied; else a server of its own.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often each measurement is repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: does it run?")] = False,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Compare with nobody.")] = False,
    peers_folder: Annotated[Path, typer.Option(help="The peers' environments, as make bench-peers makes them.")] = Path(
        ".bench-peers"
    ),
    as_json: JsonOption = False,
) -> None:
    """Measure the queue against its bounds and its peers; fails if a bound is missed or a peer is missing."""
    from eaglefeed.bench.bed import opened_bed
    from eaglefeed.bench.comparison import find_peers
    from eaglefeed.bench.musts import missed
    from eaglefeed.bench.plan import FULL, QUICK
    from eaglefeed.bench.run import run_bench
    from eaglefeed.bench.table import render

    logs.configure("ERROR")
    plan = QUICK if quick else FULL
    found = () if no_peers else find_peers(peers_folder)
    with opened_bed(redis) as bed:
        document = run_bench(bed, replace(plan, rounds=rounds or plan.rounds), found, tell=_tell)
    emit(as_json, document, render(document))
    if faults := missed(document["must"]):
        fix = "run it on an idle machine; if it stays, `server_scripts` says whether the scripts have become slower"
        raise EaglefeedError("a bound is missed", subject="bench queue", got="; ".join(faults), fix=fix)


def _tell(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
