"""How `eaglefeed train` runs: in one process, or as one rank of a job, of which the first writes and tells."""

import shutil
import threading
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eaglefeed import logs
from eaglefeed.cli.common import emit, stop_on_signals, worker_name
from eaglefeed.cli.journaling import add_fact, journaled
from eaglefeed.cli.report import reported
from eaglefeed.cli.showing import show_training, showing
from eaglefeed.cli.snapshots import TrainerSnapshot
from eaglefeed.cli.train import TrainSource, build_trainer
from eaglefeed.cli.train_progress import progress_of
from eaglefeed.config import LaunchedRank, Settings
from eaglefeed.consumer.export import export_draft
from eaglefeed.consumer.files import translated
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.reporting import check_installed
from eaglefeed.consumer.run import RunAssets, TrainingRun, only_trainer_of
from eaglefeed.consumer.trainer import DraftTrainer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from eaglefeed.ops.collector import Shown

__all__ = ["run_training"]


def run_training(settings: Settings, conversations: Path | None, launched: LaunchedRank, *, as_json: bool) -> None:
    """Train until the end, and export the draft.

    Raises:
        EaglefeedError: what kept it from that; each class says whether to start again.
    """
    logs.bind(role="trainer", worker=worker_name(), rank=str(launched.rank))
    check_installed(settings.train.report_to)  # on every rank: none waits for one that ends here
    if settings.train.num_threads:
        torch.set_num_threads(settings.train.num_threads)
    settings, stop = _of_rank(settings, launched), threading.Event()
    with (
        showing(settings, "trainer", local_rank=launched.local_rank) as shown,
        _joined(settings, launched) as ranks,
        _source(settings, conversations, ranks, stop, shown) as source,
        stop_on_signals(stop.set),
    ):
        if source is None:
            document, lines = {"steps": 0, "drained": False}, ["stopped before the run had its first sample"]
        else:
            with (
                reported(settings, source.queues if ranks.is_first else None) as report,
                only_trainer_of(settings.train_output) if ranks.is_first else nullcontext(),
            ):
                document, lines = _train(settings, source, ranks, stop, shown)
            document, lines = document | report.document, lines + report.lines
    if ranks.is_first:
        emit(as_json, document, lines)


def _of_rank(settings: Settings, launched: LaunchedRank) -> Settings:
    """Each rank of a machine has a GPU of its own."""
    if launched.world_size == 1 or settings.train.device != "cuda":
        return settings
    device = f"cuda:{launched.local_rank}"
    return settings.model_copy(update={"train": settings.train.model_copy(update={"device": device})})


def _joined(settings: Settings, launched: LaunchedRank) -> Ranks:
    if launched.world_size == 1:
        return Ranks.alone()
    return Ranks.of_job(timeout_s=settings.train.collective_timeout_s, device=settings.train.device)


def _source(
    settings: Settings, conversations: Path | None, ranks: Ranks, stop: threading.Event, shown: "Shown"
) -> "AbstractContextManager[TrainSource | None]":
    if conversations is None:
        from eaglefeed.cli.train_stream import run_source

        return run_source(settings, ranks, stop, shown)
    from eaglefeed.cli.train_backends import target_source

    return target_source(settings, conversations)


def _train(
    settings: Settings, source: TrainSource, ranks: Ranks, stop: threading.Event, shown: "Shown"
) -> tuple[dict[str, Any], list[str]]:
    train = settings.train
    trainer = build_trainer(settings, source.assets, ranks)
    with (
        source.stream(trainer) as stream,
        stop_on_signals(stream.stop),
        progress_of(settings, trainer, stream, has_room=source.has_room) as progress,
        journaled(source.queues, "trainer", worker_name(), TrainerSnapshot(settings, trainer, stream, progress)),
    ):
        if stop.is_set():
            stream.stop()
        training = TrainingRun(
            trainer,
            stream,
            settings.train_output,
            contract=source.assets.contract.id,
            samples_per_step=train.samples_per_step,
            samples_per_batch=train.samples_per_batch,
            ack_policy=train.ack_policy,
            checkpoint_every=train.checkpoint_every,
            keep_checkpoints=train.keep_checkpoints,
            idle_s=source.idle_s,
            meter=progress.meter,
            on_step=progress.tell,
        )
        show_training(shown, settings, stream, progress if ranks.is_first else None)
        steps = training.train()
        pace, drained = progress.meter.total(), ranks.is_first and source.drained(stream)
    document, lines = source.report()
    document |= asdict(stream.stats) | {"steps": steps, "step": trainer.step_count, "drained": drained}
    document |= pace.rounded()
    acked, dead = stream.stats.acked, stream.stats.dead
    lines.append(f"trained {steps} steps on {acked} samples, at step {trainer.step_count}, {dead} dead")
    lines += [str(pace)] if steps else []
    if drained:
        document["draft"] = str(_export(settings, trainer, source.assets, is_trained=bool(steps)))
        lines.append(f"draft for servers: {document['draft']}")
        if source.queues is not None and steps:
            fact = {"group": train.group, "epoch": train.epoch, "step": trainer.step_count}
            add_fact(source.queues, "export", fact | {"path": document["draft"]})
    else:
        lines.append("stopped before the samples were drained: start it again to go on")
    return document, lines


def _export(settings: Settings, trainer: DraftTrainer, assets: RunAssets, *, is_trained: bool) -> Path:
    folder = settings.train_output / f"export-{trainer.step_count:09d}"
    if folder.exists():
        if not is_trained:  # of an earlier call on this finished run
            return folder
        with translated(folder):
            shutil.rmtree(folder)  # of steps that train.from_step took back
    return export_draft(trainer.draft, folder, target_config=assets.config, aux_layer_ids=assets.contract.aux_layer_ids)
