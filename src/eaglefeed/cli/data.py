"""`eaglefeed data`: other projects' offline features into a run, and a run's samples into such a folder."""

import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eaglefeed import logs
from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    StoreOption,
    TargetOption,
    VocabOption,
    emit,
    open_queues,
    opened_store,
    read_settings,
    stop_on_signals,
    worker_name,
)
from eaglefeed.cli.letters import one_line
from eaglefeed.cli.limits import check_limits, configure_queues, queue_limits
from eaglefeed.cli.peers import refuse_peers
from eaglefeed.cli.reports import human_bytes
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from eaglefeed.interop.exporting import Exported
    from eaglefeed.interop.folder import FeatureFolder
    from eaglefeed.interop.importing import Imported
    from eaglefeed.schema.contract import RunContract

__all__ = ["app"]

app = typer.Typer(help="Other projects' offline features: into a run, and out of one.", no_args_is_help=True)

_FAILED = 3
_SHOWN = 20
_TIDY_S = 600.0
_PARTIAL_HELP = "speculators: leave out rows that have no file."


@app.command("import")
def import_(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder that the other project wrote.")],
    form: Annotated[Literal["speculators", "specforge"], typer.Option("--format", help="Whose features they are.")],
    partial: Annotated[bool, typer.Option("--partial", help=_PARTIAL_HELP)] = False,
    vocab: VocabOption = None,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make each file a sample of a run of its own, to be trained on like any other; only --target's ends are loaded.

    Files that do not fit end it with an error; the next call goes on where it ended.
    """
    settings = read_settings(
        ctx, config, run__id=run, redis_url=redis, store__uri=store, target__name=target, produce__vocab=vocab
    )
    _check_import(settings, folder, partial and form != "speculators")
    refuse_peers(settings, "nowhere to import to")
    from eaglefeed.cli.import_target import TargetEnds
    from eaglefeed.interop.importing import Importer
    from eaglefeed.interop.specforge import SpecForgeFolder
    from eaglefeed.interop.speculators import SpeculatorsFolder
    from eaglefeed.producer.agreement import agree_on_run
    from eaglefeed.producer.ledger import QueueLedger
    from eaglefeed.storage.janitor import Janitor

    ends = TargetEnds(settings, form)
    contract, name = ends.target.contract, worker_name()
    logs.bind(role="producer", worker=name)
    files: FeatureFolder = (
        SpeculatorsFolder(folder, contract, is_partial=partial) if form == "speculators" else SpecForgeFolder(folder)
    )
    stop = threading.Event()
    with opened_store(settings) as shards, open_queues(settings) as queues, stop_on_signals(stop.set):

        def agree(largest_bytes: int) -> None:
            health = shards.health()
            limits = queue_limits(settings, health)
            check_limits(limits, settings, largest_bytes, health)
            agree_on_run(shards, queues.samples, contract, ends.assets, run_id=queues.run, who=f"import {name}")
            configure_queues(settings, queues, limits)

        importer = Importer(
            files,
            ends.target,
            prompts=queues.prompts,
            samples=queues.samples,
            store=shards,
            run_id=queues.run,
            name=name,
            agree=agree,
            visibility_timeout_s=settings.queue.visibility_timeout_s,
            stall_timeout_s=settings.queue.stall_timeout_s,
            tidy=Janitor(shards, QueueLedger(queues.run, queues.named), interval_s=_TIDY_S).maybe_run,
        )
        done = importer.run(stop)
    emit(as_json, {"run": settings.run.id} | asdict(done), _tell_import(done, settings.run.id))
    if done.dead:
        raise typer.Exit(_FAILED)


def _check_import(settings: Settings, folder: Path, is_stray_partial: bool) -> None:
    if not folder.is_dir():
        raise ConfigError("no such folder", subject=str(folder))
    if is_stray_partial:
        raise ConfigError("rows and files are one there", subject="--partial", fix="leave it out")
    produce = settings.produce
    if "supervision" in produce.model_fields_set and produce.supervision != "last_hidden_states":
        what, fix = "imported samples keep the last hidden states of their files", "leave it out"
        wanted, got = "last_hidden_states", produce.supervision
        raise ConfigError(what, subject="produce.supervision", wanted=wanted, got=got, fix=fix)


def _tell_import(done: "Imported", run: str) -> list[str]:
    share = done.agreed / done.supervised if done.supervised else 0.0
    size = human_bytes(done.num_bytes)
    left = [
        f"{count} {what}"
        for count, what in (
            (done.known, "were queued by an earlier call"),
            (done.left_out, "rows without a file were left out"),
            (done.stale, "went to another import, as their leases had run out"),
            (done.dead, "are dead letters: see `eaglefeed queue dead ls`"),
        )
        if count
    ]
    return [
        f"run {run}: {done.files} files, imported {done.imported} ({done.num_tokens} tokens, {size})",
        *left,
        *([f"the target itself would have said {share:.0%} of the supervised tokens"] if done.supervised else []),
        *([] if done.drained else ["stopped before the last file: the same command goes on"]),
    ]


@app.command("export")
def export(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    form: Annotated[Literal["speculators"], typer.Option("--format", help="Who is to read it.")],
    run: RunOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the samples that lie in a run's store, retained ones and those not trained yet, for another project."""
    settings = read_settings(ctx, config, run__id=run, store__uri=store)
    refuse_peers(settings, "nothing to export")
    if not settings.store.uri and not settings.run_dir.is_dir():  # before the folder is made
        raise ConfigError(f"no shards of run {settings.run.id}", subject=settings.store_uri, fix="check --run")
    from eaglefeed.consumer.run import load_run_assets
    from eaglefeed.interop.exporting import SpeculatorsExport, check_exportable
    from eaglefeed.producer.rebuild import Rebuilt, newest_refs, no_shards

    with opened_store(settings) as shards:
        assets, found = load_run_assets(shards), Rebuilt()
        check_exportable(assets.contract, folder)
        refs = list(newest_refs(shards, settings.run.id, found))
        if not refs:
            raise no_shards(shards, settings.run.id, found)
        done = SpeculatorsExport(folder, assets.contract, assets.tensors).write(shards, refs)
    done.left_out |= found.damaged
    document = (
        {"run": settings.run.id, "folder": str(folder)} | asdict(done) | _options(assets.contract, assets.tensors)
    )
    emit(as_json, document, _tell_export(done, document, form))
    if done.left_out:
        raise typer.Exit(_FAILED)


def _options(contract: "RunContract", assets: "Mapping[str, Tensor]") -> dict[str, Any]:
    """What a training on the folder must be told; an id of speculators' is that of the layer that states enter."""
    draft_size = {"draft_vocab_size": int(assets["t2d"].sum())} if "t2d" in assets else {}
    return {"target_layer_ids": [layer + 1 for layer in sorted(contract.aux_layer_ids)]} | draft_size


def _tell_export(done: "Exported", document: dict[str, Any], form: str) -> list[str]:
    lines = [one_line(f"{name}: left out: {reason}") for name, reason in done.left_out.items()]
    more = len(lines) - _SHOWN
    ids = " ".join(map(str, document["target_layer_ids"]))
    size = f" --draft-vocab-size {document['draft_vocab_size']}" if "draft_vocab_size" in document else ""
    wrote = f"{done.rows} rows of {done.samples} samples ({done.num_tokens} tokens, {human_bytes(done.num_bytes)})"
    return [
        *lines[:_SHOWN],
        *([f"{more} more left out; --json lists them"] if more > 0 else []),
        f"{document['folder']}: {wrote}, {len(lines)} left out",
        f"for {form}: --data-path {document['folder']} --on-missing raise --target-layer-ids {ids}{size}",
    ]
