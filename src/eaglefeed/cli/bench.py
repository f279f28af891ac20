"""`eaglefeed bench`: what the queue, the stores and a remote target do a second, and what it costs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from eaglefeed import logs
from eaglefeed.cli.common import JsonOption, emit
from eaglefeed.errors import EaglefeedError

__all__ = ["app"]

RoundsOption = Annotated[int | None, typer.Option(min=1, help="How often each measurement is repeated.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes: does it run? Bounds may be missed.")]
NoPeersOption = Annotated[bool, typer.Option("--no-peers", help="Compare with nobody.")]
PeersOption = Annotated[Path, typer.Option(help="The peers' environments, as make bench-peers makes them.")]
_PEERS = Path(".bench-peers")

app = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Measure what the queue, the stores and a remote target do a second, and what it costs."""


@app.command("queue")
def queue(
    redis: Annotated[
        str | None, typer.Option("--redis", help="An empty database, which is emptied; else a server of its own.")
    ] = None,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    no_peers: NoPeersOption = False,
    peers_folder: PeersOption = _PEERS,
    as_json: JsonOption = False,
) -> None:
    """Measure the queue against its bounds and its peers; fails if a bound is missed or a peer is missing."""
    from eaglefeed.bench.bed import opened_bed
    from eaglefeed.bench.comparison import find_peers
    from eaglefeed.bench.plan import FULL, QUICK
    from eaglefeed.bench.run import run_bench
    from eaglefeed.bench.table import render

    logs.configure("ERROR")
    plan = QUICK if quick else FULL
    found = () if no_peers else find_peers(peers_folder)
    with opened_bed(redis) as bed:
        document = run_bench(bed, replace(plan, rounds=rounds or plan.rounds), found, tell=_tell)
    emit(as_json, document, render(document))
    _require(document["must"], "bench queue", "`server_scripts` says whether the scripts became slower", quick=quick)


@app.command("storage")
def storage(
    folder: Annotated[
        Path, typer.Option("--dir", help="Where to measure: a folder on the file system in question.")
    ] = (Path("runs")),
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    no_peers: NoPeersOption = False,
    peers_folder: PeersOption = _PEERS,
    as_json: JsonOption = False,
) -> None:
    """Measure the store against its bounds and its peers; fails if a bound is missed or a peer is missing."""
    from eaglefeed.bench.storage_peers import find_store_peers
    from eaglefeed.bench.storage_plan import FULL, QUICK
    from eaglefeed.bench.storage_run import run_storage_bench
    from eaglefeed.bench.storage_table import render

    logs.configure("ERROR")
    plan = QUICK if quick else FULL
    found = () if no_peers else find_store_peers(peers_folder)
    document = run_storage_bench(folder, replace(plan, rounds=rounds or plan.rounds), found, tell=_tell)
    emit(as_json, document, render(document))
    _require(document["must"], "bench storage", "`memmove` says how fast this machine was meanwhile", quick=quick)


@app.command("remote")
def remote(
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    no_peers: NoPeersOption = False,
    peers_folder: PeersOption = _PEERS,
    as_json: JsonOption = False,
) -> None:
    """Measure a remote target against its bounds and its peer; fails if a bound is missed or the peer is missing."""
    from eaglefeed.bench.remote_peers import find_remote_peer
    from eaglefeed.bench.remote_plan import FULL, QUICK
    from eaglefeed.bench.remote_run import run_remote_bench
    from eaglefeed.bench.remote_table import render

    logs.configure("ERROR")
    plan = QUICK if quick else FULL
    found = None if no_peers else find_remote_peer(peers_folder)
    document = run_remote_bench(replace(plan, rounds=rounds or plan.rounds), found, tell=_tell)
    emit(as_json, document, render(document))
    _require(document["must"], "bench remote", "`bare` says how fast loopback was meanwhile", quick=quick)


@app.command("pipeline")
def pipeline(
    folder: Annotated[Path, typer.Option("--dir", help="Where shards go: a folder on the file system in question.")] = (
        Path("runs")
    ),
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what streaming costs a training, beside the same batches in memory; fails if a bound is missed."""
    from eaglefeed.bench.bed import opened_bed
    from eaglefeed.bench.pipeline_plan import FULL, QUICK
    from eaglefeed.bench.pipeline_run import run_pipeline_bench
    from eaglefeed.bench.pipeline_table import render
    from eaglefeed.cli.bench_observation import observed

    logs.configure("ERROR")
    plan = QUICK if quick else FULL
    with opened_bed(None) as bed:
        sizes = replace(plan, rounds=rounds or plan.rounds)
        document = run_pipeline_bench(bed, folder, sizes, observe=observed, tell=_tell)
    emit(as_json, document, render(document))
    _require(
        document["must"], "bench pipeline", "`device.ceiling` says how fast samples come without a step", quick=quick
    )


def _require(must: list[dict[str, Any]], subject: str, hint: str, *, quick: bool) -> None:
    from eaglefeed.bench.musts import missed

    faults = missed(must)
    if faults and quick:
        _tell(f"bounds that these sizes miss, which says nothing: {'; '.join(faults)}")
    elif faults:
        fix = f"run it on an idle machine; if it stays, {hint}"
        raise EaglefeedError("a bound is missed", subject=subject, got="; ".join(faults), fix=fix)


def _tell(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
