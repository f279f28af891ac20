"""DraftTrainer: one optimizer step over one or several batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.loss import DraftOutput
from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.schema.batch import Eagle3TargetBatch

__all__ = ["DraftTrainer", "OptimizerSettings", "StepResult"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Args:
        lr: peak learning rate.
        betas: AdamW's.
        weight_decay: AdamW's.
        warmup_steps: steps over which the rate grows from 0.
        decay_steps: step at which the rate has fallen to a tenth, linearly after the warm-up; 0 keeps it.
        grad_clip: largest norm of the gradient.
    """

    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 10
    decay_steps: int = 0
    grad_clip: float = 5.0

    def lr_at(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay_steps <= self.warmup_steps:
            return self.lr
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.lr * max(0.1, 1.0 - 0.9 * done)


class StepResult(NamedTuple):
    """What a step did.

    Args:
        loss: sum over depths of 0.8^k · cross-entropy, in nats a supervised position; 0.0 without any.
        accuracies: per depth, the share of supervised positions whose best draft token is the target's.
        num_supervised: supervised positions of the first depth; 0 means that no weight was changed.
        grad_norm: norm of the gradient before clipping.
        step: updates so far, this one included.
    """

    loss: float
    accuracies: tuple[float, ...]
    num_supervised: int
    grad_norm: float
    step: int


class DraftTrainer:
    """Trains a draft, deterministically: equal batches give equal weights.

    Args:
        draft: moved to `device`.
        settings: of the optimizer.
        device: where to train.
    """

    def __init__(
        self, draft: Eagle3Draft, settings: OptimizerSettings | None = None, *, device: torch.device | str = "cpu"
    ) -> None:
        self.draft, self.device = draft.to(device), torch.device(device)
        self.settings = settings or OptimizerSettings()
        self.step_count = 0
        self.optimizer = torch.optim.AdamW(
            draft.parameters(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def step(self, batches: Sequence[Eagle3TargetBatch]) -> StepResult:
        """Train once on all of `batches`; positions count the same, whichever batch they stand in.

        Raises:
            SampleCorrupt: the loss or the gradient is not finite; names the samples, and no weight was changed.
        """
        self.draft.train()
        self.optimizer.zero_grad(set_to_none=True)
        outputs = [self._backward(batch) for batch in batches]
        counts = torch.stack([output.num_supervised for output in outputs]).sum(0).tolist()
        correct = torch.stack([output.num_correct for output in outputs]).sum(0).tolist()
        loss_sum = sum(output.loss_sum.item() for output in outputs)
        accuracies = tuple(right / max(count, 1) for right, count in zip(correct, counts, strict=True))
        # A depth never has more positions than the first, so this is 0 only where there is nothing at all.
        total = counts[0]
        grad_norm = self._update(total, batches) if total else 0.0
        return StepResult(loss_sum / max(total, 1), accuracies, total, grad_norm, self.step_count)

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights and AdamW's moments under flat names: `draft.NAME`, `optimizer.NAME.exp_avg` and so on."""
        tensors = {f"draft.{name}": tensor for name, tensor in self.draft.state_dict().items()}
        for name, parameter in self.draft.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}.{moment}": state[moment] for moment in _MOMENTS if moment in state}
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Take over what `state_tensors` gave after update `step`.

        Raises:
            SchemaError: names or shapes are not this draft's; nothing was changed.
        """
        names = dict(self.draft.named_parameters())
        shapes = {f"draft.{name}": parameter.shape for name, parameter in names.items()}
        if step > 0:
            moments = ((f"optimizer.{name}.{moment}", p.shape) for name, p in names.items() for moment in _MOMENTS)
            shapes.update(moments)
        _check_shapes(shapes, tensors)
        weights = {name.removeprefix("draft."): t for name, t in tensors.items() if name.startswith("draft.")}
        self.draft.load_state_dict(weights)
        self.optimizer.state.clear()
        for name, parameter in names.items() if step > 0 else ():
            moments_of = {m: tensors[f"optimizer.{name}.{m}"].to(self.device).clone() for m in _MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(step), device=self.device), **moments_of}
        self.step_count = step

    def _backward(self, batch: Eagle3TargetBatch) -> DraftOutput:
        output: DraftOutput = self.draft(**batch.to(self.device).to_trainer_inputs())
        if not torch.isfinite(output.loss_sum):
            raise _not_finite("loss", [batch], output.loss_sum.item())
        output.loss_sum.backward()  # type: ignore[no-untyped-call]
        return output._replace(loss_sum=output.loss_sum.detach())

    def _update(self, num_supervised: int, batches: Sequence[Eagle3TargetBatch]) -> float:
        gradients = [parameter.grad for parameter in self.draft.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, float(num_supervised))
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.grad_clip).item()
        if not torch.isfinite(torch.tensor(norm)):
            raise _not_finite("gradient", batches, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(self.step_count)
        self.optimizer.step()
        self.step_count += 1
        return norm


def _not_finite(name: str, batches: Sequence[Eagle3TargetBatch], got: float) -> SampleCorrupt:
    ids = ", ".join(sample_id for batch in batches for sample_id in batch.sample_ids)
    return SampleCorrupt(ids or "batch", f"{name} is not finite, no weight was changed", wanted="a number", got=got)


def _check_shapes(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise SchemaError("other tensors than this draft's", wanted=f"also {missing[:3]}", got=f"also {unknown[:3]}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise SchemaError("wrong shape", subject=name, wanted=list(shape), got=list(tensors[name].shape))
