"""`eaglefeed doctor`: look at all that a run needs, before it starts or while it goes on."""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    StoreOption,
    TargetOption,
    access_token,
    connected,
    emit,
    read_settings,
)
from eaglefeed.cli.doctor_settings import examine_settings
from eaglefeed.cli.letters import one_line
from eaglefeed.config import Settings, launched_rank
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.ops.doctor import Finding, Said, look, ok
from eaglefeed.queue import EmbeddedServer
from eaglefeed.queue.connection import QueueClient, open_client
from eaglefeed.signals import interrupted_by_term

__all__ = ["Part", "doctor"]

_FAILED = 3
_WAIT_S, _START_S = 2.0, 40.0

log = get_logger(__name__)


class Part(StrEnum):
    """What can be looked at."""

    SETTINGS = "settings"
    QUEUE = "queue"
    STORE = "store"
    TARGET = "target"
    GPU = "gpu"


_LOAD_HELP = "Load the target's weights too, and run them."


def doctor(
    ctx: typer.Context,
    only: Annotated[list[Part] | None, typer.Option("--only", help="Look at this part; may be repeated.")] = None,
    load: Annotated[bool, typer.Option("--load", help=_LOAD_HELP)] = False,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check settings, queue, store, target and GPUs, each finding with its fix. Nothing is left behind; exits 0, or 3.

    What a machine does not need can be left out: --only queue --only store --only gpu where trainers run.
    """
    settings = read_settings(ctx, config, run__id=run, redis_url=redis, store__uri=store, target__name=target)
    findings = []
    with interrupted_by_term():
        for finding in _Visit(settings, load=load).look_at(only or list(Part)):
            findings.append(finding)
            if not as_json:
                sys.stdout.write(_line(finding) + "\n")
                sys.stdout.flush()
    counts = Counter(finding.status for finding in findings)
    document = {
        "run": settings.run.id,
        "failed": counts["fail"] > 0,
        "counts": {status: counts[status] for status in ("ok", "warn", "fail", "skipped")},
        "findings": [asdict(finding) for finding in findings],
    }
    told = f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures, {counts['skipped']} skipped"
    emit(as_json, document, [told])
    if counts["fail"]:
        raise typer.Exit(_FAILED)


def _line(finding: Finding) -> str:
    fix = f"\n         fix: {one_line(finding.fix)}" * bool(finding.fix)
    return f"{finding.status:<8} {finding.check}: {one_line(finding.what)}{fix}"


class _Visit:
    """One visit to all that some settings name; what the queue says of the run's size is the store's need."""

    def __init__(self, settings: Settings, *, load: bool) -> None:
        self._settings, self._load = settings, load
        self._size: tuple[int, int, int] | None = None

    def look_at(self, parts: list[Part]) -> Iterator[Finding]:
        """The findings, as they come."""
        looks: dict[Part, Callable[[], Iterator[Finding]]] = {
            Part.SETTINGS: lambda: examine_settings(self._settings),
            Part.QUEUE: self._queue,
            Part.STORE: self._store,
            Part.TARGET: self._target,
            Part.GPU: self._gpu,
        }
        for part, examine in looks.items():
            if part in parts:
                yield from examine()

    def _queue(self) -> Iterator[Finding]:
        from eaglefeed.ops.doctor_queue import examine_queue

        settings = self._settings
        with _server(settings) as (findings, opened):
            yield from findings
            if opened is not None:
                count = settings.queue.high_count
                yield from examine_queue(opened, settings.run.id, high_count=count, learned=self._learn)

    def _learn(self, size: tuple[int, int, int]) -> None:
        self._size = size

    def _store(self) -> Iterator[Finding]:
        from eaglefeed.ops.doctor_store import Need, examine_store

        need = Need(self._settings.queue.high_bytes, is_kept=self._settings.train.retain)
        if self._size is not None:
            num_items, num_bytes, num_left = self._size
            need = need._replace(num_items=num_left, num_bytes=num_bytes * num_left // num_items)
        yield from examine_store(self._settings.store_uri, need)

    def _target(self) -> Iterator[Finding]:
        from eaglefeed.cli.targets import opened_target
        from eaglefeed.ops.doctor_servers import EnginePlan, examine_engine, examine_servers
        from eaglefeed.ops.doctor_target import TargetPlan, examine_target

        settings, target = self._settings, self._settings.target
        plan = TargetPlan(
            name=target.name,
            dtype=target.dtype,
            cache_dir=target.cache_dir,
            trust_remote_code=target.trust_remote_code,
            aux_layer_ids=target.aux_layer_ids,
            max_length=settings.feed.max_length,
            supervision=settings.produce.supervision,
            aux_storage=settings.produce.aux_storage,
            vocab=settings.produce.vocab,
            draft_vocab=settings.draft.vocab,
            draft_vocab_size=settings.draft.vocab_size,
            template_values=target.chat_template_kwargs,
            template_date=target.chat_template_date,
        )
        yield from examine_target(plan, partial(opened_target, settings) if self._load else None)
        yield from examine_engine(EnginePlan(target.engine, target.engine_url, target.engine_dir, target.engine_python))
        with suppress(ConfigError):  # settings.secrets tells it
            yield from examine_servers(settings.train.remote_urls, access_token(settings))

    def _gpu(self) -> Iterator[Finding]:
        from eaglefeed.ops.doctor_gpu import GpuPlan, examine_gpus

        settings, launched = self._settings, launched_rank()
        planes = {
            "store.data_plane": settings.store.data_plane,
            "train.remote_data_plane": settings.train.remote_data_plane,
        }
        plan = GpuPlan(
            devices={"target.device": settings.target.device, "train.device": settings.train.device},
            nccl=[f"{name}=nccl" for name, plane in planes.items() if plane == "nccl"],
            local_rank=launched.local_rank,
            world_size=launched.world_size,
        )
        yield from examine_gpus(plan)


@contextmanager
def _server(settings: Settings) -> Iterator[tuple[list[Finding], Callable[[], QueueClient] | None]]:
    """How to connect to the run's server; without an address its local one, or one in a folder that goes again."""
    if settings.redis_url:
        yield [], partial(connected, settings, max_wait_s=_WAIT_S, connect_by=open_client)
        return
    own = settings.run_dir / "queue"
    temporary = None if own.is_dir() else Path(tempfile.mkdtemp(prefix="eaglefeed-doctor-"))
    server = EmbeddedServer(temporary or own)
    try:
        where = "in a folder that goes again: the run has none yet" if temporary else f"in {own}"
        findings = look("queue.server", partial(_start, server, where), _START_S)
        started = all(finding.status == "ok" for finding in findings)
        yield findings, (lambda: open_client(server.url, max_wait_s=_WAIT_S)) if started else None
    finally:
        _stop(server)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _start(server: EmbeddedServer, where: str) -> Iterator[Said]:
    server.start()
    yield ok(f"a local server runs {where}")


def _stop(server: EmbeddedServer) -> None:
    try:
        server.close()
    except QueueUnavailable as error:  # the other parts are looked at all the same
        log.warning("server_not_stopped", reason=str(error))
