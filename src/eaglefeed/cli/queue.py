"""`eaglefeed queue`: look at a run's queues, and set them right."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any

import typer

from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    RunQueues,
    emit,
    open_queues,
    read_settings,
)
from eaglefeed.cli.letters import describe, describe_payload, given_words, one_line, requeue_command, show
from eaglefeed.cli.reports import human_bytes
from eaglefeed.cli.top import top
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, LeaseQueue, QueueStats
from eaglefeed.queue.journal import RunJournal

__all__ = ["app"]

app = typer.Typer(help="Look at a run's queues, and set them right.", no_args_is_help=True, rich_markup_mode=None)
dead_app = typer.Typer(help="Dead letters: items that were set aside.", no_args_is_help=True, rich_markup_mode=None)
app.command("top")(top)
app.add_typer(dead_app, name="dead")

_QUEUE_HELP = "prompts, samples, or samples.e1 and so on for a later epoch's"
QueueOption = Annotated[str, typer.Option("--queue", help=f"{_QUEUE_HELP}.")]
GroupOption = Annotated[str, typer.Option("--group", help="Group of trainers.")]
IdsArgument = Annotated[list[str] | None, typer.Argument(help="Ids; all of them by default.")]
_OUTAGE_S = 5.0
_COUNTS = ("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released", "redelivered")
_ALWAYS = ("ready", "leased", "done", "dead")


@app.command("stats")
def stats(
    ctx: typer.Context,
    group: Annotated[str | None, typer.Option("--group", help="Group of trainers; all by default.")] = None,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exact counts of the prompts, and of each epoch's samples for each group."""
    with _looked_at(read_settings(ctx, config, run__id=run, redis_url=redis)) as queues:
        prompts = queues.prompts.stats()
        samples, *later = [
            [queues.named(name, group).stats()] if group else _by_group(queues, name) for name in _epoch_names(queues)
        ]
    document: dict[str, Any] = {"prompts": asdict(prompts), "samples": asdict(samples[0]), "groups": _grouped(samples)}
    document["epochs"] = {each[0].name: _grouped(each) for each in later}
    emit(as_json, document, [_line(each) for each in (prompts, *samples, *chain(*later))])


@dead_app.command("ls")
def dead_ls(
    ctx: typer.Context,
    queue: QueueOption = "samples",
    group: GroupOption = MAIN_GROUP,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters with their reasons."""
    with _looked_at(read_settings(ctx, config, run__id=run, redis_url=redis)) as queues:
        letters = list(_chosen(queues, queue, group).dead_letters())
    lines = [one_line(f"{each.id}: {each.reason} (delivery {each.delivery_count})") for each in letters]
    document = {"queue": queue, "group": group, "dead": [describe(letter) for letter in letters]}
    emit(as_json, document, [*lines, f"{queue}: {len(letters)} dead letters"])


@dead_app.command("show")
def dead_show(
    ctx: typer.Context,
    item_id: Annotated[str, typer.Argument(metavar="ID", help="The dead letter's id.")],
    queue: QueueOption = "samples",
    group: GroupOption = MAIN_GROUP,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a dead letter: its reason, what its payload says, and how it is made ready again."""
    with _looked_at(read_settings(ctx, config, run__id=run, redis_url=redis)) as queues:
        letters = _chosen(queues, queue, group).dead_letters()
        letter = next((each for each in letters if each.id == item_id), None)
    if letter is None:
        raise _no_letter([item_id], queue)
    payload = describe_payload(queue, letter.payload)
    given = given_words(redis, config, ctx.obj or [])
    command = requeue_command(item_id, queue=queue, group=group, run=queues.run, given=given)
    document = describe(letter) | {"queue": queue, "group": group, "payload": payload, "requeue": command}
    emit(as_json, document, show(queue, letter, payload, command))


@dead_app.command("requeue")
def dead_requeue(
    ctx: typer.Context,
    ids: IdsArgument = None,
    queue: QueueOption = "samples",
    group: GroupOption = MAIN_GROUP,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make dead letters ready again, once what broke them is mended."""
    with _looked_at(read_settings(ctx, config, run__id=run, redis_url=redis)) as queues:
        chosen = _chosen(queues, queue, group)
        dead = dict.fromkeys(letter.id for letter in chosen.dead_letters())
        requeued = chosen.requeue([each for each in ids or dead if each in dead])
    unknown = [each for each in ids or () if each not in dead]
    document = {"queue": queue, "group": group, "requeued": requeued, "unknown": unknown}
    emit(as_json, document, [f"{queue}: {requeued} ready again"])
    if unknown:
        raise _no_letter(unknown, queue)


@app.command("purge")
def purge(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Option("--queue", help=f"{_QUEUE_HELP}; all of them by default.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while workers live.")] = False,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete all that a run's queues hold and know, for every group. Shards stay until you rebuild or delete them.

    Without --queue the run's journal goes too.
    """
    if not yes and not sys.stdin.isatty():
        raise ConfigError("purge asks first, and there is no terminal to ask on", fix="pass --yes; nothing was deleted")
    settings = read_settings(ctx, config, run__id=run, redis_url=redis)
    with _looked_at(settings) as queues:
        names = (queue,) if queue else ("prompts", *_epoch_names(queues))
        chosen = [_chosen(queues, name) for name in names]
        _say_what_goes(settings, queues, names, force=force)
        if not yes and not _agreed("Delete it for good? [y/N] "):
            emit(as_json, {"run": queues.run, "purged": {}}, ["nothing was deleted"])
            raise typer.Exit(1)
        purged = {each.name: each.purge() for each in chosen}  # prompts first: then nobody hands a sample off any more
        if not queue:
            RunJournal(queues.client, queues.run).delete()
    told = [f"{name}: deleted, {count} were not done" for name, count in purged.items()]
    if any(map(rules.prompts_of, purged)):
        told.append(f"before you feed: `eaglefeed store rebuild` uses the shards again, or delete {settings.store_uri}")
    emit(as_json, {"run": queues.run, "purged": purged}, told)


def _say_what_goes(settings: Settings, queues: RunQueues, names: tuple[str, ...], *, force: bool) -> None:
    found = [each for name in names for each in _by_group(queues, name)]
    if found[0].workers and not force:
        fix = f"stop them (a killed one counts for {rules.WORKER_GRACE_S:g} s more), or pass --force"
        raise ConfigError("workers live, nothing was deleted", subject=queues.run, got=_alive(found[0]), fix=fix)
    lines = [
        f"run {queues.run} at {queues.address}, to be deleted with all dead letters and the memory of what is done:",
        *(_line(each) for each in found),
        f"shards stay{', and no janitor deletes them' * any(map(rules.prompts_of, names))}: {settings.store_uri}",
    ]
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def _agreed(question: str) -> bool:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def _looked_at(settings: Settings) -> Iterator[RunQueues]:
    with open_queues(settings, max_wait_s=_OUTAGE_S, known=True) as queues:
        yield queues


def _chosen(queues: RunQueues, name: str, group: str = MAIN_GROUP) -> LeaseQueue:
    if rules.samples_of(name) is None and rules.prompts_of(name) is None:
        raise ConfigError("no such queue", subject=name, wanted="prompts or samples")
    return queues.named(name, group)


def _epoch_names(queues: RunQueues) -> tuple[str, ...]:
    """The samples queues of the run, that of the first epoch first."""
    names = [samples.name for samples in QueueLedger(queues.run, queues.named).releases()]
    return tuple(sorted(names, key=lambda name: rules.epoch_of(name) or 0))


def _grouped(stats: list[QueueStats]) -> dict[str, Any]:
    return {each.group: asdict(each) for each in stats}


def _by_group(queues: RunQueues, name: str) -> list[QueueStats]:
    return [queues.named(name, group).stats() for group in queues.named(name).groups()]


def _no_letter(ids: list[str], queue: str) -> ConfigError:
    fix = f"`eaglefeed queue dead ls --queue {queue}` lists them"
    return ConfigError(f"no such dead letter in {queue}", subject=one_line(", ".join(ids)), fix=fix)


def _line(stats: QueueStats) -> str:
    name = stats.name if stats.group == MAIN_GROUP else f"{stats.name}/{stats.group}"
    state = f"{'closed' if stats.closed else 'open'}{' full' * stats.full}"
    counts = ((count, getattr(stats, count)) for count in _COUNTS)
    told = ", ".join(f"{count} {value}" for count, value in counts if value or count in _ALWAYS)
    stored = f"; {human_bytes(stats.stored_bytes)} stored" if stats.stored_bytes else ""
    step = f"; committed step {stats.committed_step}" if stats.committed_step else ""
    return f"{name}: {state}; {told}{stored}{step}; alive: {_alive(stats)}"


def _alive(stats: QueueStats) -> str:
    told = (f"{count} {role}{'s' * (count != 1)}" for role, count in sorted(stats.workers.items()))
    return ", ".join(told) or "nobody"
