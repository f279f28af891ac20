"""Hugging Face's Trainer on a stream: batches, loss, acknowledging and resuming; the rest stays the Trainer's."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.files import translated, write_whole
from eaglefeed.consumer.hf_checkpoints import LAST_FILE, STREAM_FILE, read_json, set_aside_later, whole_checkpoints
from eaglefeed.consumer.loss import DraftOutput, count_supervised
from eaglefeed.consumer.meter import StepMeter
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.errors import ConfigError, SampleCorrupt
from eaglefeed.schema.collate import collate

if TYPE_CHECKING:
    from eaglefeed.consumer.source import BatchSource

__all__ = ["DraftModule", "EaglefeedTrainerMixin"]

_Base: Any = Trainer if TYPE_CHECKING else object  # which Trainer is the user's choice


class DraftModule(nn.Module):
    """The reference draft for a Trainer, which would write into the draft's own `config`."""

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__()
        self.draft = draft

    @property
    def t2d(self) -> Tensor:
        """[V] bool: the draft vocabulary."""
        return self.draft.t2d

    def forward(self, **inputs: Tensor) -> DraftOutput:
        """The draft's own forward."""
        output: DraftOutput = self.draft(**inputs)
        return output


class EaglefeedTrainerMixin(_Base):  # type: ignore[misc]
    """Trains a Trainer, or a subclass of it, on a stream.

        class DraftTrainer(EaglefeedTrainerMixin, Trainer): ...

        trainer = DraftTrainer(model=DraftModule(draft), args=args, stream=stream)
        trainer.train(resume_from_checkpoint=True)

    An optimizer step takes per_device_train_batch_size · gradient_accumulation_steps samples on each rank, a round of
    the stream; a forward reads per_device_train_batch_size of them, padded together. Nothing goes through accelerate's
    loaders, which would send tensors from rank to rank, or lease ahead of the step. Training ends with the stream or at
    max_steps, whichever comes first; the learning rate follows max_steps.

    The model takes `to_trainer_inputs()` and returns a DraftOutput, or something else with its `loss_sum`: the sum over
    supervised positions, with a gradient (of 0) also where there are none. The loss is that sum · world size / the
    number of supervised positions of the whole step on all ranks, which an averaging DDP makes their mean. A step
    without any changes no weight. One that is not finite stops all ranks, and names the round's samples.

    A step's samples are acknowledged after it; a checkpoint holds the stream's state, and the oldest one that is kept
    is committed (one kept for being the best is not gone on from, and does not count). Going on from an earlier one
    renames those after it to later-checkpoint-N. When the queue waits for a commit, as at its end, the newest one is
    written and committed: keep at least one checkpoint, and set save_total_limit, or shards stay until the queue is
    full. With save_strategy "no" or save_only_model, samples are settled for good with their step, and a stopped
    training is not gone on with.

    Args:
        args: Trainer's.
        stream: a RoundStream; in a single process any BatchSource.
        idle_s: after this time without a round a checkpoint is written and committed, since producers may wait for
            room; None where nobody does.
        options: Trainer's.

    Raises:
        ConfigError: settings that a stream cannot be trained with.
    """

    def __init__(self, *args: Any, stream: "BatchSource", idle_s: float | None = 5.0, **options: Any) -> None:
        super().__init__(*args, **options)
        _check(self.args, stream)
        self.stream, self._idle_s, self._meter = stream, idle_s, StepMeter(stream.stats)
        self._keeps = self.args.save_strategy != "no" and not self.args.save_only_model
        self._unsaved, self._num_supervised, self._losses_are_finite = 0, 0, True
        self.args.ignore_data_skip = True  # the stream goes on from the checkpoint by itself
        # For an evaluation: a draft's forward does not name its inputs, and a loss is computed of what has labels.
        self.args.remove_unused_columns = False
        self.label_names = self.args.label_names or ["loss_mask"]
        self.model_accepts_loss_kwargs = True  # the loss is of the whole step: the Trainer must not divide it again
        self.add_callback(_Steps(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Trainer's, in which True goes on from the newest checkpoint that is whole, or begins where there is none.

        Raises:
            SchemaError: the checkpoint holds no stream's state.
            QueueError: the queue has committed a later step.
            SampleCorrupt: a loss or a gradient that is not finite; names the round's samples.
        """
        path = resume_from_checkpoint or None
        if path is True:
            path = self._newest()
        # Also at the beginning: what an earlier start held when it died comes again.
        self.stream.load_state_dict(read_json(Path(path) / STREAM_FILE) if path else self.stream.state_dict())
        if self.args.should_save and self._keeps:
            set_aside_later(Path(self.args.output_dir), self.stream.state_dict()["step"])
        return super().train(path, *args, **options)

    def get_train_dataloader(self) -> "_Micro":
        """The stream's batches, as they are."""
        return _Micro(self)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        """A step's inputs, and how many supervised positions they have on all ranks; [] ends the training."""
        batches = [] if self.state.global_step >= self.args.max_steps else list(islice(epoch_iterator, num_batches))
        if not batches:
            self._end()
            return [], None
        own = torch.stack([self.count_supervised(inputs) for inputs in batches]).sum().to(device)
        count: Tensor = self.accelerator.reduce(own, "sum")
        self._num_supervised, self._losses_are_finite = int(count), True
        return batches, count

    def count_supervised(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Supervised positions, int64 []; for another model than the draft, what its `loss_sum` sums over."""
        return count_supervised(inputs, getattr(self.accelerator.unwrap_model(self.model), "t2d", None))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """This forward's part of the step's loss; without `num_items_in_batch`, as in evaluation, its own mean."""
        output = model(**inputs)
        if num_items_in_batch is None:
            count, world_size = self.count_supervised(inputs), 1
        else:
            count, world_size = num_items_in_batch, self.args.world_size
        loss = output.loss_sum * world_size / count.clamp(min=1)
        self._losses_are_finite = self._losses_are_finite and bool(loss.isfinite())
        return (loss, {"loss_sum": output.loss_sum}) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Trainer's, with the share of the time that this rank waited for data, and what became of samples."""
        if "loss" in logs:
            stats = self.stream.stats
            logs["data_wait"] = self._meter.close().rounded()["data_wait"]
            logs |= {name: getattr(stats, name) for name in ("delivered", "redelivered", "stale", "dead")}
        super().log(logs, *args, **options)

    def _newest(self) -> str | None:
        """Of the whole checkpoints; all ranks must see the same."""
        whole = whole_checkpoints(Path(self.args.output_dir))
        step = max(whole, default=-1)
        steps = self.accelerator.gather(torch.tensor([step], device=self.args.device)).tolist()
        if len(set(steps)) > 1:
            fix = "put output_dir where all ranks see it, or copy the checkpoint there"
            got = f"checkpoints {steps} on ranks 0, 1, …"
            raise ConfigError("the ranks see different checkpoints", subject=self.args.output_dir, got=got, fix=fix)
        return str(whole[step]) if whole else None

    def _rounds(self) -> Iterator[list[dict[str, Tensor]]]:
        size, steps = self._train_batch_size, self.args.gradient_accumulation_steps
        while not self.stream.ended:
            batches = self.stream.take(size * steps, wait_s=self._idle_s)
            if batches:
                parts = [collate(batches[at : at + size]).to_trainer_inputs() for at in range(0, len(batches), size)]
                # Of a stream that does not fill its last round.
                yield parts + [_blank(parts[0])] * (steps - len(parts))
            elif not self.stream.ended:
                self._make_room()

    def _make_room(self) -> None:
        """Nothing comes: the queue has no room, or the store has none and producers wait for ours to go."""
        if self._unsaved and self._keeps:
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        self.stream.commit(self.state.global_step)

    def _end(self) -> None:
        """The Trainer's loop would go round until max_steps."""
        self.control.should_training_stop = True
        if self._unsaved and self._keeps:
            self.control.should_save = True
        elif self.stream.drained:
            self.stream.commit(self.state.global_step)

    def _check_step(self) -> None:
        """Before the update, in which all ranks have the same gradient."""
        is_finite = self._losses_are_finite
        if self.accelerator.scaler is None:  # a scaler expects overflows, and passes over them
            finite = [each.grad.isfinite().all() for each in self.model.parameters() if each.grad is not None]
            is_finite = is_finite and bool(torch.stack(finite).all())
        faults = torch.tensor(int(not is_finite), device=self.args.device)
        if self.accelerator.reduce(faults, "sum") > 0:
            ids = ", ".join(self.stream.round_ids)
            raise SampleCorrupt(ids, "loss or gradient is not finite, no weight was changed", wanted="numbers")
        if not self._num_supervised:
            self.model.zero_grad(set_to_none=True)  # with gradients of 0, momentum would move the weights

    def _acknowledge(self) -> None:
        self._unsaved += 1
        self.stream.ack(self.state.global_step if self._keeps else None, self.stream.round_ids)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial))
        path = folder / f"checkpoint-{self.state.global_step}"
        if self.args.should_save and self._keeps:
            with translated(path):
                path.mkdir(parents=True, exist_ok=True)
                (path / LAST_FILE).unlink(missing_ok=True)  # of an earlier start: not whole until it is all ours
            write_whole(path / STREAM_FILE, json.dumps(self.stream.state_dict()).encode())
        super()._save_checkpoint(model, trial)
        self._unsaved = 0
        if self._keeps:
            self.stream.commit(self.state.global_step if self.stream.drained else self._oldest(folder))

    def _oldest(self, folder: Path) -> int:
        best = self.state.best_model_checkpoint
        kept = [step for step, path in whole_checkpoints(folder).items() if best is None or path != Path(best)]
        return min(kept, default=self.state.global_step)


class _Micro:
    """What the Trainer takes for its loader: the inputs of one forward after the other."""

    def __init__(self, trainer: EaglefeedTrainerMixin) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for parts in self._trainer._rounds():
            yield from parts


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells the mixin where the Trainer is."""

    def __init__(self, trainer: EaglefeedTrainerMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer._check_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._acknowledge()


def _check(args: Any, stream: "BatchSource") -> None:
    world, own = args.world_size, stream.world_size if isinstance(stream, RoundStream) else 1
    alone = "ranks with streams of their own would get different numbers of batches: pass a RoundStream of the job"
    engine = "it makes a step before anybody looked at its loss: use DistributedDataParallel"
    faults: dict[str, tuple[bool, object, object, str]] = {
        "max_steps": (args.max_steps <= 0, "a number of steps", args.max_steps, "it may be more than will come"),
        "auto_find_batch_size": (args.auto_find_batch_size, False, True, "set per_device_train_batch_size"),
        "n_gpu": (args.n_gpu > 1, "a process a GPU", args.n_gpu, "start it with torchrun, or show it one device"),
        "deepspeed": (args.deepspeed is not None, None, args.deepspeed, engine),
        "stream": (own != world, f"for {world} ranks", f"a {type(stream).__name__} for {own}", alone),
    }
    for name, (is_fault, wanted, got, fix) in faults.items():
        if is_fault:
            raise ConfigError("cannot train on a stream so", subject=name, wanted=wanted, got=got, fix=fix)


def _blank(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A forward's inputs of one position that supervises nothing."""
    blank = {name: tensor.new_zeros(1, 1, *tensor.shape[2:]) for name, tensor in inputs.items()}
    if "seq_lens" in blank:
        blank["seq_lens"] = inputs["seq_lens"].new_ones(1, 1)
    return blank
