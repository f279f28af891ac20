"""Rows on their way into a target: padding to the right, nothing beyond the real length, packing that adds up."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.errors import SchemaError
from eaglefeed.schema.packing import packing_faults

__all__ = ["Rows", "check_packing", "right_padded"]


class Rows(NamedTuple):
    """[B, S] ids (int64), real tokens (bool) and loss mask (int64), padded on the right and zero there."""

    input_ids: Tensor
    real: Tensor
    loss_mask: Tensor


def right_padded(input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, *, may_move: bool) -> Rows:
    """Bring rows to one form; padding before the real tokens is moved behind them if `may_move`.

    Raises:
        SchemaError: shapes that differ, ids that are no whole numbers, masks that are not of 0 and 1, an empty row, or
            padding between real tokens.
    """
    shapes = {tuple(tensor.shape) for tensor in (input_ids, attention_mask, loss_mask)}
    if len(shapes) != 1 or input_ids.ndim != 2:
        raise SchemaError("ids and masks need one shape", wanted="[B, S]", got=sorted(shapes))
    if not input_ids.numel():
        raise SchemaError("no rows or no tokens", wanted="[B, S], both at least 1", got=list(input_ids.shape))
    for name, mask in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
        if not ((mask == 0) | (mask == 1)).all():
            raise SchemaError(f"{name} is no mask", wanted="0 and 1")
    if not torch.equal(input_ids.long().to(input_ids.dtype), input_ids):
        raise SchemaError("input_ids hold no whole numbers", wanted="int64", got=str(input_ids.dtype))
    real, length = attention_mask.bool(), input_ids.shape[1]
    first = real.long().argmax(-1, keepdim=True)
    order = (torch.arange(length, device=real.device) + first) % length
    moved = real.gather(1, order)
    if not torch.equal(moved, torch.arange(length, device=real.device) < real.sum(-1, keepdim=True)):
        raise SchemaError("padding between real tokens", wanted="one run of ones a row of attention_mask")
    if not moved[:, 0].all():
        raise SchemaError("a row without tokens", wanted="at least one a row")
    if not may_move and first.any():
        raise SchemaError("packed rows with padding before their tokens", wanted="padding on the right")
    ids, loss = (tensor.long().gather(1, order) * moved for tensor in (input_ids, loss_mask))
    return Rows(ids, moved, loss)


def check_packing(packing: Mapping[str, Tensor], real: Tensor) -> None:
    """Check that documents fill their row, that positions restart with each, and what remains of each.

    Args:
        packing: the three features, int64.
        real: [B, S] bool.

    Raises:
        SchemaError: they do not.
    """
    shapes = {name: list(tensor.shape) for name, tensor in packing.items()}
    rows = list(real.shape)
    if shapes != {"position_ids": rows, "seq_lens": [rows[0], *shapes["seq_lens"][1:2]], "doc_remaining": rows}:
        raise SchemaError("packing of other rows", wanted=f"{rows}, and seq_lens [{rows[0]}, max_docs]", got=shapes)
    for name, what, bad, values in packing_faults(packing, real.sum(-1)):
        if bad.any():
            place = tuple(bad.nonzero()[0].tolist())
            raise SchemaError(f"{name}: {what}", got=f"{int(values[place])} at {list(place)}")
