"""`eaglefeed queue`: look at a run's queues."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
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
from eaglefeed.errors import ConfigError
from eaglefeed.queue.base import DeadLetter, LeaseQueue, QueueStats

__all__ = ["app"]

app = typer.Typer(help="Look at a run's queues.", no_args_is_help=True, rich_markup_mode=None)
dead_app = typer.Typer(help="Dead letters: items that were set aside.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(dead_app, name="dead")

QueueOption = Annotated[str, typer.Option("--queue", help="prompts or samples.")]
IdsArgument = Annotated[list[str] | None, typer.Argument(help="Ids; all of them by default.")]
_OUTAGE_S = 5.0


@app.command("stats")
def stats(
    ctx: typer.Context,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exact counts of both queues."""
    with _looked_at(ctx, config, run, redis) as queues:
        found = [queues.prompts.stats(), queues.samples.stats()]
    emit(as_json, {each.name: asdict(each) for each in found}, [_line(each) for each in found])


@dead_app.command("ls")
def dead_ls(
    ctx: typer.Context,
    queue: QueueOption = "samples",
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters with their reasons."""
    with _looked_at(ctx, config, run, redis) as queues:
        letters = list(_chosen(queues, queue).dead_letters())
    documents = [_document(letter) for letter in letters]
    lines = [f"{letter.id}: {letter.reason} (delivery {letter.delivery_count})" for letter in letters]
    emit(as_json, {"queue": queue, "dead": documents}, [*lines, f"{queue}: {len(letters)} dead letters"])


@dead_app.command("requeue")
def dead_requeue(
    ctx: typer.Context,
    ids: IdsArgument = None,
    queue: QueueOption = "samples",
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make dead letters ready again, once what broke them is mended."""
    with _looked_at(ctx, config, run, redis) as queues:
        chosen = _chosen(queues, queue)
        requeued = chosen.requeue(ids or [letter.id for letter in chosen.dead_letters()])
    emit(as_json, {"queue": queue, "requeued": requeued}, [f"{queue}: {requeued} ready again"])


@contextmanager
def _looked_at(ctx: typer.Context, config: Path | None, run: str | None, redis: str | None) -> Iterator[RunQueues]:
    settings = read_settings(ctx, config, run__id=run, redis_url=redis)
    with open_queues(settings, max_wait_s=_OUTAGE_S, known=True) as queues:
        yield queues


def _chosen(queues: RunQueues, name: str) -> LeaseQueue:
    if name not in ("prompts", "samples"):
        raise ConfigError("no such queue", subject=name, wanted="prompts or samples")
    return queues.prompts if name == "prompts" else queues.samples


def _document(letter: DeadLetter) -> dict[str, Any]:
    return {"id": letter.id, "reason": letter.reason, "delivery_count": letter.delivery_count}


def _line(stats: QueueStats) -> str:
    state = " closed" * stats.closed + " full" * stats.full
    workers = ", ".join(f"{count} {role}s" for role, count in sorted(stats.workers.items())) or "nobody"
    return (
        f"{stats.name}:{state or ' open'}; ready {stats.ready}, leased {stats.leased}, delayed {stats.delayed}, "
        f"done {stats.done}, dead {stats.dead}, redelivered {stats.redelivered}; alive: {workers}"
    )
