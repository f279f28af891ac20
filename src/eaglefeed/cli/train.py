"""`eaglefeed train`: the reference trainer on a stream."""

import threading
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    stop_on_signals,
    worker_name,
)
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.consumer.run import RunAssets
    from eaglefeed.consumer.stream import SampleStream
    from eaglefeed.consumer.trainer import DraftTrainer, StepResult
    from eaglefeed.storage.base import FeatureStore

__all__ = ["build_trainer", "train"]

_LEASE_BATCH = 4
_VOCAB_HELP = "Vocabulary map, for a run that stores logits or last hidden states without a map."


def train(
    ctx: typer.Context,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder of checkpoints and the draft.")] = None,
    vocab: Annotated[Path | None, typer.Option("--vocab", help=_VOCAB_HELP)] = None,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a draft on the run's samples until they are drained, and export it for servers."""
    settings = read_settings(
        ctx, config, run__id=run, redis_url=redis, store__uri=store, train__output=output, draft__vocab=vocab
    )
    import torch

    from eaglefeed.consumer.resume import resume
    from eaglefeed.consumer.run import TrainingRun, check_record, only_trainer_of, wait_for_run

    if settings.train.num_threads:
        torch.set_num_threads(settings.train.num_threads)
    stop = threading.Event()
    with (
        opened_store(settings) as shards,
        open_queues(settings, group=settings.train.group) as queues,
        stop_on_signals(stop.set),
    ):
        assets = wait_for_run(shards, timeout_s=settings.train.start_timeout_s, stop=stop)
        if assets is None:
            emit(as_json, {"steps": 0, "drained": False}, ["stopped before the run had its first sample"])
            return
        check_record(queues.samples, assets.contract)
        trainer = build_trainer(settings, assets)
        with ExitStack() as stack:
            stack.enter_context(only_trainer_of(settings.train_output))
            _check_room(settings, queues)
            session = resume(settings.train_output, trainer, queues.samples, contract=assets.contract.id)
            stream = stack.enter_context(_stream(settings, queues, shards, assets, trainer, session))
            stack.enter_context(stop_on_signals(stream.stop))
            if stop.is_set():
                stream.stop()
            training = TrainingRun(
                trainer,
                stream,
                settings.train_output,
                contract=assets.contract.id,
                samples_per_step=settings.train.samples_per_step,
                checkpoint_every=settings.train.checkpoint_every,
                keep_checkpoints=settings.train.keep_checkpoints,
                on_step=_say_step,
            )
            steps = training.train()
            drained = queues.samples.stats().drained
    document: dict[str, Any] = asdict(stream.stats) | {"steps": steps, "step": trainer.step_count, "drained": drained}
    acked, dead = stream.stats.acked, stream.stats.dead
    lines = [f"trained {steps} steps on {acked} samples, at step {trainer.step_count}, {dead} dead"]
    if drained:
        document["draft"] = str(_export(settings, trainer, assets))
        lines.append(f"draft for servers: {document['draft']}")
    else:
        lines.append("stopped before the samples were drained: start it again to go on")
    emit(as_json, document, lines)


def build_trainer(settings: Settings, assets: "RunAssets") -> "DraftTrainer":
    """A draft that fits the target, started from what the target knows, and its optimizer.

    Raises:
        SchemaError: the vocabulary map is another target's.
        ConfigError: the run has another map than the one that was given.
    """
    from eaglefeed.consumer.draft import Eagle3Draft
    from eaglefeed.consumer.draft_config import DraftConfig
    from eaglefeed.consumer.trainer import DraftTrainer, OptimizerSettings

    t2d = _vocabulary(settings, assets)
    draft_config = DraftConfig.from_target_config(
        assets.config,
        draft_vocab_size=int(t2d.sum()),
        ttt_steps=settings.draft.ttt_steps,
        intermediate_size=settings.draft.intermediate_size,
    )
    draft = Eagle3Draft(draft_config, seed=settings.train.seed)
    draft.initialize_from_target(
        embed_tokens=assets.tensors["embed_tokens.weight"],
        lm_head=assets.tensors["lm_head.weight"],
        norm=assets.tensors.get("norm.weight"),
        t2d=t2d,
    )
    optimizer = OptimizerSettings(
        lr=settings.train.lr,
        weight_decay=settings.train.weight_decay,
        warmup_steps=settings.train.warmup_steps,
        decay_steps=settings.train.decay_steps,
        grad_clip=settings.train.grad_clip,
    )
    return DraftTrainer(draft, optimizer, device=settings.train.device)


def _vocabulary(settings: Settings, assets: "RunAssets") -> "Tensor":
    import torch

    from eaglefeed.schema.vocab import VocabMapping

    of_run, path = assets.tensors.get("t2d"), settings.draft.vocab
    given = VocabMapping.load(path, vocab_size=assets.contract.vocab_size).t2d if path else None
    if of_run is not None and given is not None and not torch.equal(of_run, given):
        wanted, got = (f"{int(t2d.sum())} tokens" for t2d in (of_run, given))
        fix = "leave out --vocab: the run has its map"
        raise ConfigError("another vocabulary map than the run's", subject=str(path), wanted=wanted, got=got, fix=fix)
    if of_run is not None:
        return of_run
    return given if given is not None else torch.ones(assets.contract.vocab_size, dtype=torch.bool)


def _check_room(settings: Settings, queues: RunQueues) -> None:
    from eaglefeed.consumer.room import check_room

    check_room(
        queues.samples,
        consumer=worker_name(),
        lease_batch=_LEASE_BATCH,
        prefetch=settings.train.prefetch,
        samples_per_step=settings.train.samples_per_step,
    )


def _stream(
    settings: Settings,
    queues: RunQueues,
    store: "FeatureStore",
    assets: "RunAssets",
    trainer: "DraftTrainer",
    session: int,
) -> "SampleStream":
    from eaglefeed.consumer.stream import SampleStream

    device = settings.train.device
    return SampleStream(
        queues.samples,
        store,
        consumer=worker_name(),
        session=session,
        contract=assets.contract,
        prompts=queues.prompts,
        visibility_timeout_s=settings.queue.visibility_timeout_s,
        stall_timeout_s=settings.queue.stall_timeout_s,
        max_lease_age_s=settings.queue.max_lease_age_s,
        lease_batch=_LEASE_BATCH,
        prefetch=settings.train.prefetch,
        held=2 * settings.train.samples_per_step,
        max_attempts=settings.queue.max_deliveries,
        values=settings.store.values,
        fail_without_producers=settings.train.no_producers == "fail",
        producer_grace_s=settings.train.producer_grace_s,
        device=device,
        head=assets.head(trainer.draft.t2d, device=device),
    )


def _say_step(result: "StepResult") -> None:
    accuracies = " ".join(f"{accuracy:.3f}" for accuracy in result.accuracies)
    typer.echo(f"step {result.step} loss {result.loss:.4f} accuracy {accuracies}", err=True)


def _export(settings: Settings, trainer: "DraftTrainer", assets: "RunAssets") -> Path:
    from eaglefeed.consumer.export import export_draft

    folder = settings.train_output / f"export-{trainer.step_count:09d}"
    if folder.exists():  # of an earlier call on this finished run
        return folder
    return export_draft(trainer.draft, folder, target_config=assets.config, aux_layer_ids=assets.contract.aux_layer_ids)
