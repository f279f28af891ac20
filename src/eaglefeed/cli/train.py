"""`eaglefeed train`: the reference trainer, on a run's samples or straight on a target."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from eaglefeed.access import loopback_of
from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    RunQueues,
    StoreOption,
    TargetOption,
    read_settings,
)
from eaglefeed.config import LaunchedRank, Settings, launched_rank
from eaglefeed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from eaglefeed.consumer.ranks import Ranks
    from eaglefeed.consumer.run import RunAssets
    from eaglefeed.consumer.source import BatchSource
    from eaglefeed.consumer.trainer import DraftTrainer

__all__ = ["TrainSource", "build_trainer", "check_usage", "train"]

_CONVERSATIONS_HELP = "JSONL with finished conversations, for --target-backend colocated or remote."
_BACKEND_HELP = "stream: the run's samples (the default); colocated: --target in this process; remote: its servers."
_URLS_HELP = "Addresses of target servers, http://HOST:PORT, with commas between them or as several options."
_DEPTH_HELP = "Samples that a remote target works on ahead of the trainer."
_VOCAB_HELP = "Vocabulary map, for a run that stores logits or last hidden states without a map, and for a target."


class TrainSource(Protocol):
    """What is trained on, opened: a run's samples, or a target.

    Args:
        assets: what is known of the target.
        idle_s: TrainingRun's.
        has_room: whether producers may go on; None where there is no queue that they wait for.
        queues: the run's, on the first rank; None where there are none.
    """

    assets: "RunAssets"
    idle_s: float | None
    has_room: "Callable[[], bool] | None"
    queues: "RunQueues | None"

    def stream(self, trainer: "DraftTrainer") -> "AbstractContextManager[BatchSource]":
        """Take over the newest checkpoint, and open the stream that goes on from there."""

    def drained(self, stream: "BatchSource") -> bool:
        """Whether everything was trained on, once the stream has ended."""

    def report(self) -> tuple[dict[str, Any], list[str]]:
        """What else the command tells: as a document, and as lines."""


def check_usage(settings: Settings, conversations: Path | None, launched: LaunchedRank) -> None:
    """Check that conversations are given where there is no queue, and only there, and to one process.

    Raises:
        ConfigError: says what to pass; or ranks on other machines would not find this one.
    """
    backend = settings.train.target_backend
    if backend == "stream" and conversations is not None:
        what = "a stream takes no conversations, its samples come from the run's queue"
        fix = "pass --target-backend colocated or remote; or `eaglefeed feed` them, and leave them out here"
        raise ConfigError(what, subject="train.target_backend", got=str(conversations), fix=fix)
    if backend != "stream" and conversations is None:
        what, fix = "no conversations to train on", f"eaglefeed train CONVERSATIONS --target-backend {backend}"
        raise ConfigError(what, subject=backend, wanted="a JSONL file", fix=fix)
    if backend != "stream" and launched.world_size > 1:
        what, fix = "only a stream is shared by the ranks of a job", "start it without torchrun, or feed and produce"
        wanted, got = "a job of 1 rank", f"rank {launched.rank} of {launched.world_size}"
        raise ConfigError(what, subject=f"train.target_backend={backend}", wanted=wanted, got=got, fix=fix)
    if launched.is_named:
        _check_name()
    if backend == "remote" and not settings.train.remote_urls:
        fix = "pass --remote-urls http://HOST:PORT, where `eaglefeed serve-target` listens"
        raise ConfigError("no address of a target server", subject="train.remote_urls", fix=fix)


def _check_name() -> None:
    """Check that the ranks of other machines, which gloo sends to what this one's name stands for, would find it."""
    if address := loopback_of(name := socket.gethostname()):
        what, wanted = "ranks on other machines would look for this one on their own", "an address that they reach"
        fix = "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface between them, or mend /etc/hosts"
        raise ConfigError(what, subject=name, wanted=wanted, got=address, fix=fix)


def train(
    ctx: typer.Context,
    conversations: Annotated[Path | None, typer.Argument(help=_CONVERSATIONS_HELP, show_default=False)] = None,
    target_backend: Annotated[str | None, typer.Option("--target-backend", help=_BACKEND_HELP)] = None,
    remote_urls: Annotated[list[str] | None, typer.Option("--remote-urls", help=_URLS_HELP)] = None,
    target_prefetch_depth: Annotated[int | None, typer.Option(min=0, help=_DEPTH_HELP)] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder of checkpoints and the draft.")] = None,
    vocab: Annotated[Path | None, typer.Option("--vocab", help=_VOCAB_HELP)] = None,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a draft on the run's samples until they are drained, and export it for servers.

    Under torchrun all processes train one draft together: torchrun --nproc-per-node 2 -m eaglefeed train run.id=RUN

    With --target-backend colocated or remote there is no queue: it trains on CONVERSATIONS, which the target answers.
    """
    settings = read_settings(
        ctx,
        config,
        run__id=run,
        redis_url=redis,
        store__uri=store,
        target__name=target,
        train__output=output,
        train__target_backend=target_backend,
        train__remote_urls=",".join(remote_urls) if remote_urls else None,
        train__target_prefetch_depth=target_prefetch_depth,
        draft__vocab=vocab,
    )
    launched = launched_rank()
    check_usage(settings, conversations, launched)
    from eaglefeed.cli.train_run import run_training

    run_training(settings, conversations, launched, as_json=as_json)


def build_trainer(settings: Settings, assets: "RunAssets", ranks: "Ranks | None" = None) -> "DraftTrainer":
    """A draft that fits the target, started from what the target knows, and its optimizer, as one of some ranks.

    Raises:
        SchemaError: the vocabulary map is another target's.
        ConfigError: the run has another map than the one that was given.
    """
    import torch

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
    dtype = getattr(torch, settings.train.dtype)
    return DraftTrainer(draft, optimizer, device=settings.train.device, dtype=dtype, ranks=ranks)


def _vocabulary(settings: Settings, assets: "RunAssets") -> "Tensor":
    import torch

    from eaglefeed.schema.contract import IMPORTED
    from eaglefeed.schema.vocab import VocabMapping

    of_run, path = assets.tensors.get("t2d"), settings.draft.vocab
    given, tokenizer = None, assets.contract.tokenizer_fingerprint
    if path:
        mapping = VocabMapping.load(path, vocab_size=assets.contract.vocab_size)
        given = (mapping if tokenizer.startswith(IMPORTED) else mapping.of_tokenizer(tokenizer)).t2d
    if of_run is not None and given is not None and not torch.equal(of_run, given):
        wanted, got = (f"{int(t2d.sum())} tokens" for t2d in (of_run, given))
        fix = "leave out --vocab: the run has its map"
        raise ConfigError("another vocabulary map than the run's", subject=str(path), wanted=wanted, got=got, fix=fix)
    if of_run is not None:
        return of_run
    return given if given is not None else torch.ones(assets.contract.vocab_size, dtype=torch.bool)
