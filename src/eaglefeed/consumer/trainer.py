"""DraftTrainer: one optimizer step over one or several batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.loss import DraftOutput
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.together import require_alike
from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.vocab import VocabMapping

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
    """What a step did, on all ranks together.

    Args:
        loss: sum over depths of 0.8^k · cross-entropy, in nats a supervised position; 0.0 without any.
        accuracies: per depth, the share of supervised positions whose best draft token is the target's.
        num_supervised: supervised positions of the first depth; 0 means that no weight was changed.
        num_tokens: real tokens, padding left out.
        grad_norm: norm of the gradient before clipping.
        step: updates so far, this one included.
    """

    loss: float
    accuracies: tuple[float, ...]
    num_supervised: int
    num_tokens: int
    grad_norm: float
    step: int


class DraftTrainer:
    """Trains a draft, deterministically: equal batches give equal weights, on every rank of a job the same.

    A step's gradient is the sum over all ranks of each one's loss sum, divided by the number of supervised positions on
    all ranks: what a data-parallel wrapper that averages gradients makes of the loss sum · world size / that number.

    Args:
        draft: moved to `device`.
        settings: of the optimizer.
        device: where to train.
        dtype: of the matrix products; bfloat16 is much faster where the hardware has it. Weights, moments, losses and
            what is exported stay float32.
        ranks: of the job; by default this process trains alone.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        settings: OptimizerSettings | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        self.draft, self.device, self.dtype = draft.to(device), torch.device(device), dtype
        self.ranks = ranks or Ranks.alone()
        self.settings = settings or OptimizerSettings()
        self.step_count = 0
        self.optimizer = torch.optim.AdamW(
            draft.parameters(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def step(self, batches: Sequence[Eagle3TargetBatch], round_ids: Sequence[str] = ()) -> StepResult:
        """Train once on all batches of all ranks; positions count the same, whichever batch they stand in.

        Args:
            batches: this rank's.
            round_ids: the samples of all ranks' batches, for an error's message; by default this rank's.

        Raises:
            SampleCorrupt: the loss or the gradient is not finite, on whichever rank; no weight was changed.
            RankGone: another rank did not come to the sum.
        """
        self.draft.train()
        self.optimizer.zero_grad(set_to_none=True)
        outputs = [self._backward(batch) for batch in batches]
        num_tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        loss_sum, (num_tokens, *positions) = self._add_up(outputs, num_tokens)
        counts, correct = positions[: len(positions) // 2], positions[len(positions) // 2 :]
        if not math.isfinite(loss_sum):
            spoilt = [b for b, output in zip(batches, outputs, strict=True) if not torch.isfinite(output.loss_sum)]
            raise _not_finite("loss", loss_sum, round_ids or _ids(batches), _ids(spoilt))
        accuracies = tuple(right / max(count, 1) for right, count in zip(correct, counts, strict=True))
        # A depth never has more positions than the first, so this is 0 only where there is nothing at all.
        total = counts[0]
        grad_norm = self._update(total, round_ids or _ids(batches)) if total else 0.0
        return StepResult(loss_sum / max(total, 1), accuracies, total, num_tokens, grad_norm, self.step_count)

    @property
    def vocab_digest(self) -> str:
        """Of the draft's vocabulary map."""
        t2d = self.draft.t2d.cpu()
        return VocabMapping.from_ids(t2d.nonzero().flatten(), vocab_size=len(t2d)).digest

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
        self._begin_at(step)
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])

    def share_state(self) -> None:
        """Take over the first rank's weights, moments and step.

        Raises:
            ConfigError: a rank has another draft, vocabulary map or optimizer.
            RankGone: a rank did not come.
        """
        setup = {name: str(value) for name, value in asdict(self.settings).items()}
        setup |= {"draft": self.draft.config.to_json(), "vocabulary map": self.vocab_digest, "dtype": str(self.dtype)}
        require_alike(self.ranks, setup)
        step = torch.tensor([self.step_count])
        self.ranks.share([step])
        if not self.ranks.is_first:
            self._begin_at(int(step))
        self.ranks.share(list(self.state_tensors().values()))

    def _begin_at(self, step: int) -> None:
        """Stand at a step, with moments of 0."""
        self.optimizer.state.clear()
        for parameter in self.draft.parameters() if step > 0 else ():
            moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(step), device=self.device), **moments}
        self.step_count = step

    def _backward(self, batch: Eagle3TargetBatch) -> DraftOutput:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            output: DraftOutput = self.draft(**batch.to(self.device).to_trainer_inputs())
        output.loss_sum.backward()  # type: ignore[no-untyped-call]
        return output._replace(loss_sum=output.loss_sum.detach())

    def _add_up(self, outputs: Sequence[DraftOutput], num_tokens: int) -> tuple[float, list[int]]:
        """Loss sum, then tokens, supervised and correct positions a depth, and gradients in place: over all ranks.

        All ranks come here, whatever their batches were like: one that raised before would leave the others waiting.
        """
        loss_sum = sum(output.loss_sum.item() for output in outputs)
        counts = torch.stack([torch.cat([output.num_supervised, output.num_correct]) for output in outputs]).sum(0)
        numbers = torch.tensor([loss_sum, num_tokens, *counts.tolist()], dtype=torch.float64)
        self.ranks.sum([*self._gradients(), numbers])
        loss_sum, *whole = numbers.tolist()
        return loss_sum, [int(number) for number in whole]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.draft.parameters() if parameter.grad is not None]

    def _update(self, num_supervised: int, round_ids: Sequence[str]) -> float:
        torch._foreach_div_(self._gradients(), float(num_supervised))
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.grad_clip).item()
        if not math.isfinite(norm):
            raise _not_finite("gradient", norm, round_ids)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(self.step_count)
        self.optimizer.step()
        self.step_count += 1
        return norm


def _ids(batches: Sequence[Eagle3TargetBatch]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def _not_finite(name: str, value: float, round_ids: Sequence[str], spoilt: Sequence[str] = ()) -> SampleCorrupt:
    got = f"{value} in {', '.join(spoilt)}" if spoilt else value
    what = f"{name} is not finite, no weight was changed"
    return SampleCorrupt(", ".join(round_ids) or "batch", what, wanted="a number", got=got)


def _check_shapes(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        wanted = f"also {missing[:3]}" if missing else "no others than this draft's"
        got = f"also {unknown[:3]}" if unknown else "no others"
        raise SchemaError("other tensors than this draft's", wanted=wanted, got=got)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise SchemaError("wrong shape", subject=name, wanted=list(shape), got=list(tensors[name].shape))
