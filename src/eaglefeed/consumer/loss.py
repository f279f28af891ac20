"""Soft cross-entropy over the unrolled steps, and how a batch's supervision is brought to the draft vocabulary.

B batch · S sequence · V target vocabulary · D draft vocabulary · K ttt_steps
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.errors import SchemaError

__all__ = ["DEPTH_WEIGHT", "DraftOutput", "Supervision", "count_supervised", "project_supervision", "unroll_loss"]

DEPTH_WEIGHT = 0.8
"""Step i counts 0.8^i: a token is drafted only after all those before it were."""


class Supervision(NamedTuple):
    """Target distributions [B, S, D] or [B, S, V] logits with `t2d`, and bool [B, S]: the rows that supervise."""

    targets: Tensor
    mask: Tensor
    t2d: Tensor | None

    def rows(self, start: int, chosen: Tensor) -> Tensor:
        """Distributions [n, D] of the chosen ones among the rows from `start` on."""
        picked = self.targets[:, start:][chosen].float()
        return picked if self.t2d is None else picked[:, self.t2d].softmax(-1)


class DraftOutput(NamedTuple):
    """Sums over a batch, so that batches and ranks add up exactly.

    Args:
        loss_sum: scalar, the sum over steps k of 0.8^k · cross-entropy of the supervised positions.
        num_supervised: [K] int64, supervised positions a step.
        num_correct: [K] int64, those where the draft's best token is the target's.
    """

    loss_sum: Tensor
    num_supervised: Tensor
    num_correct: Tensor


def project_supervision(
    *,
    loss_mask: Tensor,
    t2d: Tensor,
    target_logits: Tensor | None,
    target_probs: Tensor | None,
    position_mask: Tensor | None,
) -> Supervision:
    """Either encoding as one; rows whose best token the draft vocabulary lacks supervise nothing.

    Args:
        loss_mask: [B, S] shifted.
        t2d: [V] bool.
        target_logits: [B, S, V] shifted, or
        target_probs: [B, S, D] with
        position_mask: [B, S, 1] bool.

    Raises:
        SchemaError: neither encoding is there.
    """
    if target_logits is not None:
        return Supervision(target_logits, t2d[target_logits.argmax(-1)] & loss_mask.bool(), t2d)
    if target_probs is None or position_mask is None:
        raise SchemaError("no supervision", wanted="target_logits, or target_probs and position_mask")
    return Supervision(target_probs, position_mask[..., 0], None)


def unroll_loss(
    hidden: Sequence[Tensor],
    to_logits: Callable[[Tensor], Tensor],
    supervision: Supervision,
    doc_remaining: Tensor | None = None,
) -> DraftOutput:
    """Score each step's hidden states [B, S - k, H] against the supervision's rows from k on.

    Args:
        hidden: outputs of the K steps.
        to_logits: the draft's head, [n, H] → [n, D].
        supervision: of the whole batch.
        doc_remaining: [B, S] with packing: step k is supervised at t iff k < doc_remaining[t].
    """
    loss = hidden[0].new_zeros((), dtype=torch.float32)
    counts, correct = [], []
    for k, states in enumerate(hidden):
        chosen = supervision.mask[:, k:]
        if doc_remaining is not None:
            chosen = chosen & (doc_remaining[:, : states.shape[1]] > k)
        targets, logits = supervision.rows(k, chosen), to_logits(states[chosen]).float()
        # The head runs on supervised rows alone: it is most of the work.
        loss = loss - DEPTH_WEIGHT**k * (targets * logits.log_softmax(-1)).sum()
        counts.append(chosen.sum())
        correct.append((logits.argmax(-1) == targets.argmax(-1)).sum())
    return DraftOutput(loss, torch.stack(counts), torch.stack(correct))


def count_supervised(inputs: Mapping[str, Tensor], t2d: Tensor | None = None) -> Tensor:
    """How many positions of the first step supervise: what a step's summed loss is divided by, over all its batches.

    Args:
        inputs: of `to_trainer_inputs()`.
        t2d: [V] bool, the draft vocabulary, for batches with target_logits; None is the whole one.

    Returns:
        int64 scalar, on the inputs' device.
    """
    mask = inputs["position_mask"][..., 0] if "position_mask" in inputs else inputs["loss_mask"].bool()
    if "target_logits" in inputs and t2d is not None:
        mask = mask & t2d[inputs["target_logits"].argmax(-1)]
    if "doc_remaining" in inputs:
        mask = mask & (inputs["doc_remaining"] > 0)
    return mask.sum()
