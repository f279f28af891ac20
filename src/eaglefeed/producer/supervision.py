"""The supervision encodings, made of a target's last hidden states a chunk of positions at a time.

B batch · S sequence · H hidden size · V target vocabulary · D draft vocabulary

Row t is made of position t + 1, and is zero where that is no real token (`next_real`, [B, S] bool). A row of logits
with a NaN or +inf, or of -inf alone, becomes NaN in every encoding, also in one that leaves out that column: its best
token is a matter of chance. The check of a sample's values finds it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from eaglefeed.schema.values import shift_left

__all__ = ["compact_supervision", "draft_supervision", "logits_supervision"]

_CHUNK_TOKENS = 256
ToLogits = Callable[[Tensor], Tensor]
"""[B, n, H] → [B, n, V]."""


def logits_supervision(last: Tensor, to_logits: ToLogits, next_real: Tensor, *, vocab_size: int) -> dict[str, Tensor]:
    """Encoding 1: `logits` [B, S, V] of last hidden states [B, S, H]."""
    values = last.new_zeros(*next_real.shape, vocab_size)
    for rows, logits in _chunks(last, to_logits):
        values[:, rows] = logits
    return {"logits": values.masked_fill_(~next_real[..., None], 0)}


def draft_supervision(
    last: Tensor, to_logits: ToLogits, next_real: Tensor, *, next_loss: Tensor, selected: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Encoding 2: `target_probs` [B, S, D] and `position_mask` [B, S, 1].

    Args:
        last: [B, S, H].
        to_logits: the target's head.
        next_real: [B, S].
        next_loss: [B, S] shifted loss mask.
        selected: the draft vocabulary, ids [D] and mask [V].
    """
    ids, mask = selected
    values = last.new_zeros(*next_real.shape, len(ids))
    best = torch.zeros_like(next_real)
    for rows, logits in _chunks(last, to_logits):
        top = logits.max(-1)
        probs = logits[..., ids].float().softmax(-1).to(values.dtype)
        values[:, rows] = probs.masked_fill_(~top.values.isfinite()[..., None], torch.nan)
        best[:, rows] = mask[top.indices]
    values.masked_fill_(~next_real[..., None], 0)
    return {"target_probs": values, "position_mask": (best & next_loss.bool())[..., None]}


def compact_supervision(last: Tensor, to_logits: ToLogits, next_real: Tensor) -> dict[str, Tensor]:
    """Encoding 3: `last_hidden_states` [B, S, H] and `target_argmax` [B, S] int32, the best token of all V."""
    best = torch.zeros_like(next_real, dtype=torch.int32)
    states = shift_left(last)
    for rows, logits in _chunks(last, to_logits):
        top = logits.max(-1)
        best[:, rows] = top.indices.to(best.dtype)
        states[:, rows].masked_fill_(~top.values.isfinite()[..., None], torch.nan)
    states.masked_fill_(~next_real[..., None], 0)
    return {"last_hidden_states": states, "target_argmax": best.masked_fill_(~next_real, 0)}


def _chunks(last: Tensor, to_logits: ToLogits) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and the logits [B, n, V] that belong there; no more than one chunk's are ever in memory."""
    for start in range(1, last.shape[1], _CHUNK_TOKENS):
        logits = to_logits(last[:, start : start + _CHUNK_TOKENS])
        yield slice(start - 1, start - 1 + logits.shape[1]), logits
