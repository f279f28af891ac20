"""`eaglefeed store`: look at a run's shards, and set them right."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    RunQueues,
    StoreOption,
    emit,
    open_queues,
    opened_store,
    read_settings,
)
from eaglefeed.cli.letters import one_line
from eaglefeed.cli.limits import configure_queues, queue_limits
from eaglefeed.cli.peers import refuse_peers
from eaglefeed.cli.reports import human_bytes
from eaglefeed.cli.shards import count_shards, describe_shards, show_counts, show_shard
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.producer.rebuild import Rebuilt, check_empty
from eaglefeed.producer.rebuild import rebuild as rebuild_queue
from eaglefeed.producer.replay import check_over
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.storage.base import FeatureStore
from eaglefeed.storage.janitor import Collected, collect

__all__ = ["app"]

app = typer.Typer(help="Look at a run's shards, and set them right.", no_args_is_help=True, rich_markup_mode=None)

_RETAINED_HELP = "Also what trainers retained, once every epoch is over: no other can be replayed then."
_OUTAGE_S = 5.0
_SHOWN = 20
_FAILED = 3


@app.command("gc")
def gc(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, say what would go.")] = False,
    retained: Annotated[bool, typer.Option("--retained", help=_RETAINED_HELP)] = False,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete what crashes left: shards of released samples, orphans that nobody will hand off, stale temporaries."""
    settings = read_settings(ctx, config, run__id=run, redis_url=redis, store__uri=store)
    refuse_peers(settings, "nothing to collect")
    with _opened(settings) as (queues, shards):
        ledger = QueueLedger(queues.run, queues.named, lifted=retained)
        for samples in ledger.releases() if retained else ():
            check_over(queues.named, samples.name)
        found = collect(shards, ledger, dry_run=dry_run)
        if dry_run:
            found.released = sum(_first_group(queues, samples.name).stats().released for samples in ledger.releases())
    document = {"run": queues.run, "store": shards.uri, "dry_run": dry_run} | asdict(found)
    emit(as_json, document, _tell(found, shards.uri, dry_run=dry_run))


def _tell(found: Collected, uri: str, *, dry_run: bool) -> list[str]:
    did = "would delete" if dry_run else "deleted"
    stuck = f" ({found.temporaries_left} more could not be deleted)" if found.temporaries_left else ""
    left = ("kept", "leased", "young", "foreign", "unreadable", "failed")
    counts = ", ".join(f"{getattr(found, name)} {name}" for name in left if getattr(found, name) or name == "kept")
    gone = f"{found.released} released, {found.orphans} orphans ({human_bytes(found.orphan_bytes)})"
    return [
        *(f"{one_line(key)}: unreadable, left where it is" for key in found.unreadable_keys),
        f"{uri}: {did} {gone}, {found.temporaries} temporaries{stuck}; left {counts}",
    ]


@app.command("rebuild")
def rebuild(
    ctx: typer.Context,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put the refs of the run's shards into its empty queue, after its server lost its data, or a purge."""
    settings = read_settings(ctx, config, run__id=run, redis_url=redis, store__uri=store)
    refuse_peers(settings, "nothing to rebuild a queue from")
    if not settings.store.uri and not settings.run_dir.is_dir():  # before the folder is made
        raise ConfigError(f"no shards of run {settings.run.id}", subject=settings.store_uri, fix="check --run")
    with opened_store(settings) as shards, open_queues(settings) as queues:
        check_empty(*(_first_group(queues, name) for name in ("prompts", "samples")))
        configure_queues(settings, queues, queue_limits(settings, shards.health()))
        found = rebuild_queue(shards, queues.prompts, _first_group(queues, "samples"), queues.run)
    emit(as_json, {"run": queues.run, "store": shards.uri} | asdict(found), _tell_rebuilt(found, queues.run))


def _tell_rebuilt(found: Rebuilt, run: str) -> list[str]:
    lines = [one_line(f"{key}: damaged, left where it is: {reason}") for key, reason in found.damaged.items()]
    more = len(lines) - _SHOWN
    left = f"{found.older} older ones of the same ids, {found.foreign} of other runs, {len(lines)} damaged"
    return [
        *lines[:_SHOWN],
        *([f"{more} more damaged; --json lists them"] if more > 0 else []),
        f"run {run}: {found.refs} samples are ready again ({human_bytes(found.num_bytes)}); left out {left}",
        "what trainers had learned of them may come again: from here on, at least once",
        "now feed the same conversations: those whose samples are here are skipped, the others are produced",
    ]


@app.command("inspect")
def inspect(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY|PATH]...", help="Shards; counts of all of them by default.")
    ] = None,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the store's shards by their state, or show what single ones say of themselves."""
    settings = read_settings(ctx, config, run__id=run, redis_url=redis, store__uri=store)
    if names:
        with opened_store(settings) as shards:
            documents, faults = describe_shards(shards, names)
        document = {"shards": documents, "faults": faults}
        emit(as_json, document, [line for each in documents for line in show_shard(each)])
        sys.stderr.write("".join(one_line(f"{each['name']}: {each['fault']}") + "\n" for each in faults))
        if faults:
            raise typer.Exit(_FAILED)
        return
    refuse_peers(settings, "no shards to count")
    with _opened(settings) as (queues, shards):
        counts = count_shards(queues, shards)
    emit(as_json, {"run": queues.run, "store": shards.uri} | counts, show_counts(counts, shards.uri))


@contextmanager
def _opened(settings: Settings) -> Iterator[tuple[RunQueues, FeatureStore]]:
    with open_queues(settings, max_wait_s=_OUTAGE_S, known=True) as queues, opened_store(settings) as store:
        yield queues, store


def _first_group(queues: RunQueues, name: str) -> LeaseQueue:
    """The queue as a group sees it that it has: they all count alike what is put and released."""
    return queues.named(name, queues.named(name).groups()[0])
