"""Several batches as one, for a forward over samples of different lengths.

B batch · S sequence
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eaglefeed.errors import SchemaError
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.eagle3 import EAGLE3_PACKING_FEATURES
from eaglefeed.schema.packing import packing_of, stretched

__all__ = ["collate"]


def collate(batches: Sequence[Eagle3TargetBatch]) -> Eagle3TargetBatch:
    """One batch of all rows, in their order, padded on the right with zeros to the longest.

    If one of them is packed, all are: a row that was not is one document. Padding counts to a row's last document,
    whose positions go on there, and nothing remains after it. One batch alone is returned as it is.

    Args:
        batches: of one encoding, with equal dtypes, devices and widths.

    Raises:
        SchemaError: none are given, or they differ in more than their rows.
    """
    if len(batches) == 1:
        return batches[0]
    if not batches:
        raise SchemaError("no batches to put together", wanted="at least one")
    parts = [batch.tensors() for batch in batches]
    _check_alike(batches, parts)
    length = max(part["input_ids"].shape[1] for part in parts)
    packing: dict[str, Tensor] = {}
    if any("seq_lens" in part for part in parts):
        longer = [_lengthened(part, length) for part in parts]
        packing = {name: _joined([part[name] for part in longer]) for name in EAGLE3_PACKING_FEATURES}
    names = [name for name in parts[0] if name not in EAGLE3_PACKING_FEATURES]
    tensors = {name: _joined([part[name] for part in parts]) for name in names}
    sample_ids = tuple(sample_id for batch in batches for sample_id in batch.sample_ids)
    return Eagle3TargetBatch(**tensors, **packing, sample_ids=sample_ids)


def _check_alike(batches: Sequence[Eagle3TargetBatch], parts: Sequence[dict[str, Tensor]]) -> None:
    """Packing apart, every batch must have the first one's features, of its widths, dtypes and device."""
    wanted = _form(parts[0].items())
    for batch, part in zip(batches, parts, strict=True):
        if (got := _form(part.items())) != wanted:
            subject, what = ", ".join(batch.sample_ids), "batches that do not fit into one"
            fix = "put samples of one run together, on one device"
            raise SchemaError(what, subject=subject, wanted=_said(wanted), got=_said(got), fix=fix)


def _form(features: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    kept = ((name, tensor) for name, tensor in features if name not in EAGLE3_PACKING_FEATURES)
    return {name: (tensor.shape[2:], tensor.dtype, tensor.device) for name, tensor in kept}


def _said(form: dict[str, tuple[torch.Size, torch.dtype, torch.device]]) -> str:
    return ", ".join(f"{name} {dtype} {list(width)} on {device}" for name, (width, dtype, device) in form.items())


def _lengthened(part: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The packing features of a batch whose rows are padded to `length`; of one that was not packed, new ones."""
    real = part["attention_mask"]
    if "seq_lens" not in part:
        whole = torch.full((len(real), 1), length, device=real.device)
        return packing_of(whole, real.sum(-1))
    before, positions = real.shape[1], part["position_ids"]
    beyond = positions[:, -1:] + torch.arange(1, length - before + 1, device=real.device)
    return part | {
        "position_ids": torch.cat([positions, beyond], dim=1),
        "seq_lens": stretched(part["seq_lens"], before, length),
    }


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """[B_i, S_i, ...] as one [sum of B_i, largest S_i, ...], zero where a row has ended."""
    first = tensors[0]
    rows, length = sum(len(tensor) for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
    joined, start = first.new_zeros(rows, length, *first.shape[2:]), 0
    for tensor in tensors:
        joined[start : start + len(tensor), : tensor.shape[1]] = tensor
        start += len(tensor)
    return joined
