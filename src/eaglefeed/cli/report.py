"""`eaglefeed report`: what happened to a run, as a page and as JSON; training and demo write it by themselves."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError, EaglefeedError
from eaglefeed.logs import get_logger
from eaglefeed.ops.facts import RunFacts, read_run
from eaglefeed.queue.journal import RunJournal

__all__ = ["Reported", "report", "reported", "write_or_tell"]

_OUTAGE_S = 5.0

log = get_logger(__name__)


@dataclass
class Reported:
    """What a command adds of its report to what it tells; nothing where none was written."""

    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def report(
    ctx: typer.Context,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder; the run's by default.")] = None,
    run: RunOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html and report.json of a run, over or under way: what happened, and what holds it up.

    The page loads nothing and runs nothing; it can be mailed or put on any web server.
    """
    from eaglefeed.ops.report import write_report

    settings = read_settings(ctx, config, run__id=run, redis_url=redis)
    with open_queues(settings, max_wait_s=_OUTAGE_S, known=True) as queues:
        facts = read_run(queues)
    folder = output or settings.run_dir
    if not _is_known(facts) and not folder.is_dir():  # a look at a run never makes one
        fix = "check --run and --redis"
        raise ConfigError("nothing is known of this run", subject=facts.run, got=facts.address, fix=fix)
    written = write_report(facts, folder)
    document: dict[str, Any] = {"run": facts.run, "state": written.state, "sentence": written.sentence}
    document |= {"bottleneck": written.bottleneck, "report": str(written.page), "json": str(written.document)}
    emit(as_json, document, [f"run {facts.run}: {written.sentence}", str(written.page), str(written.document)])


def _is_known(facts: RunFacts) -> bool:
    journal = facts.journal
    return facts.is_fed or bool(journal.workers or journal.facts or journal.series)


@contextmanager
def reported(settings: Settings, queues: RunQueues | None) -> Iterator[Reported]:
    """Write the run's report when what is done meanwhile has ended, also by an error.

    Args:
        settings: name the run's folder.
        queues: of the run; None where there is none, and so no report.
    """
    told = Reported()
    try:
        yield told
    except Exception:
        _add(told, settings, queues)
        raise
    _add(told, settings, queues)


def _add(told: Reported, settings: Settings, queues: RunQueues | None) -> None:
    page = None if queues is None else write_or_tell(settings, queues)
    if page is not None:
        told.document["report"] = str(page)
        told.lines.append(f"report: {page}")


def write_or_tell(
    settings: Settings, queues: RunQueues, facts: Mapping[str, Mapping[str, Any]] | None = None
) -> Path | None:
    """Write the report of a run, after noting some facts of it; what keeps it from that is told, and raises nothing.

    Returns:
        Its page; None if it was not written.
    """
    try:
        from eaglefeed.ops.report import write_report  # what it needs may be missing too

        hasty = replace(queues, client=queues.client.impatient())
        for name, fact in (facts or {}).items():
            RunJournal(hasty.client, queues.run).note(name, fact)
        return write_report(read_run(hasty), settings.run_dir).page
    except Exception as error:  # noqa: BLE001  whatever it is, the work that it tells of is done
        log.warning("report_not_written", reason=EaglefeedError.text_of(error)[:300])
        return None
