"""A Hugging Face Trainer over a tiny draft, for tests."""

import os
import signal
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import draft_samples
import pipeline
import samples
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.hf_trainer import DraftModule, EaglefeedTrainerMixin
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.consumer.source import BatchSource
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer, OptimizerSettings
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.storage.base import FeatureStore, open_store

SIZES = {"hidden_size": samples.H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
CONFIG = replace(draft_samples.CONFIG, **SIZES, vocab_size=pipeline.VOCAB, draft_vocab_size=pipeline.VOCAB)
LENGTHS = (3, 9, 4, 12, 6)


class HFDraftTrainer(EaglefeedTrainerMixin, Trainer):  # type: ignore[misc]
    pass


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 100,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "save_steps": 2,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**(options | changes))


def hf_trainer(stream: BatchSource, folder: Path, *, callbacks: Any = None, **changes: Any) -> HFDraftTrainer:
    model = DraftModule(Eagle3Draft(CONFIG, seed=0))
    options = {name: changes.pop(name) for name in ("idle_s", "eval_dataset", "data_collator") if name in changes}
    return HFDraftTrainer(model=model, args=arguments(folder, **changes), stream=stream, callbacks=callbacks, **options)


def round_stream(samples: LeaseQueue | None, store: FeatureStore, ranks: Ranks, **options: Any) -> RoundStream:
    """Rounds of two samples for each rank."""
    return RoundStream(
        samples,
        store,
        ranks=ranks,
        samples_per_step=2,
        contract=pipeline.contract(max_length=16),
        draft_vocab_size=pipeline.VOCAB,
        consumer="t",
        **options,
    )


def prompt(index: int, *, supervised: bool = True) -> Any:
    """Prompts of several lengths, so that samples count by their positions and not one by one."""
    length = LENGTHS[index % len(LENGTHS)]
    tokens = (1 + index, *(2 + (index + place) % (pipeline.VOCAB - 2) for place in range(length - 1)))
    mask = (0, *([int(supervised)] * (length - 1)))
    return pipeline.prompt(index, rows=(pipeline.PromptRow(tokens, mask),))


def weights_of(trainer: HFDraftTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.draft.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Learned(NamedTuple):
    """Weights, and each step's loss and norm of the gradient, which AdamW and the clipping hide from the weights."""

    weights: dict[str, Tensor]
    steps: list[tuple[float, float]]


def learned_by(trainer: HFDraftTrainer) -> Learned:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return Learned(weights_of(trainer), [(row["loss"], row["grad_norm"]) for row in rows])


def reference(run: pipeline.Run, step_sizes: list[int]) -> Learned:
    """What the reference trainer learns in steps of so many samples, with AdamW as the Trainer sets it."""
    optimizer = OptimizerSettings(lr=0.01, betas=(0.9, 0.999), warmup_steps=0, grad_clip=1.0)
    trainer, steps = DraftTrainer(Eagle3Draft(CONFIG, seed=0), optimizer), []
    with SampleStream(run.samples, run.store, consumer="reference", clock=run.clock) as stream:
        for size in step_sizes:
            result = trainer.step(stream.take(size))
            steps.append((result.loss, result.grad_norm))
            stream.ack()
    return Learned(trainer.draft.state_dict(), steps)


def assert_close(learned: Learned, wanted: Learned) -> None:
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(learned.weights[name], tensor, rtol=1e-4, atol=1e-5)
    assert not same(wanted.weights, Eagle3Draft(CONFIG, seed=0).state_dict())
    torch.testing.assert_close(torch.tensor(learned.steps), torch.tensor(wanted.steps), rtol=1e-3, atol=1e-4)


@dataclass
class RankPlan:
    """A life of a job of several ranks.

    Args:
        folder: of shards and checkpoints.
        redis_url: of the queue.
        kill_after: the step after whose update each rank kills itself; None never.
        spoil_at: the step in which rank 1's loss is not a number; None never.
    """

    folder: Path
    redis_url: str
    kill_after: int | None = None
    spoil_at: int | None = None


class Spoil(TrainerCallback):  # type: ignore[misc]
    """Makes the losses of a step something else than numbers; their gradients, which all ranks share, stay finite."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, _args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
        if state.global_step + 1 == self._step:
            model.register_forward_hook(lambda _m, _i, output: output._replace(loss_sum=output.loss_sum + torch.nan))


class Kill(TrainerCallback):  # type: ignore[misc]
    """A SIGKILL between a step's update and its acknowledgement."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_rank(pipe: Connection, plan: RankPlan) -> None:
    """Train as one rank, and tell the weights, the ids of each step's own samples, and the stream's counts."""
    with Ranks.of_job(timeout_s=20.0) as ranks, closing(connect(plan.redis_url)) as client:
        samples = open_queue(client, plan.folder.name, "samples") if ranks.is_first else None
        with round_stream(samples, open_store(f"file://{plan.folder / 'shards'}"), ranks) as stream:
            callbacks: list[TrainerCallback] = [Kill(plan.kill_after)]
            if plan.spoil_at is not None and ranks.rank == 1:
                callbacks.append(Spoil(plan.spoil_at))
            trainer = hf_trainer(stream, plan.folder / "out", callbacks=callbacks, save_steps=1)
            trainer.train(resume_from_checkpoint=True)
            learned = learned_by(trainer)
            weights = {name: tensor.tolist() for name, tensor in learned.weights.items()}
            pipe.send((trainer.state.global_step, weights, learned.steps, asdict(stream.stats)))
