"""Sequence packing: several documents in a row, none of which sees another.

B batch · S sequence
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["PackingFault", "packing_faults", "packing_of", "stretched"]


class PackingFault(NamedTuple):
    """A fault that packing features may have, and where it is.

    Args:
        name: of the feature.
        what: is wrong.
        bad: bool; true where it is.
        values: of the same shape, what stands there.
    """

    name: str
    what: str
    bad: Tensor
    values: Tensor


def packing_of(seq_lens: Tensor, num_real: Tensor) -> dict[str, Tensor]:
    """The three packing features of rows whose documents are known.

    Args:
        seq_lens: [B, max_docs] int64, padded with 0; each row sums to S, padding counts to the last document.
        num_real: [B] int64, the real tokens of each row.

    Returns:
        position_ids [B, S], which restart with each document, seq_lens, and doc_remaining [B, S], the real tokens after
        each position in its document.
    """
    ends = seq_lens.cumsum(-1)
    columns = torch.arange(int(ends[0, -1]), device=ends.device).repeat(len(ends), 1)
    document = torch.searchsorted(ends, columns, right=True)
    positions = columns - (ends - seq_lens).gather(1, document)
    real_ends = ends.gather(1, document).minimum(num_real[:, None])
    remaining = (real_ends - 1 - columns).clamp(min=0)
    return {"position_ids": positions, "seq_lens": seq_lens, "doc_remaining": remaining}


def stretched(seq_lens: Tensor, before: int, length: int) -> Tensor:
    """[B, max_docs] lengths of rows of `before` positions, whose last document now reaches to `length`."""
    ends = seq_lens.cumsum(-1)
    return ends.masked_fill(ends == before, length).diff(dim=-1, prepend=torch.zeros_like(ends[:, :1]))


def packing_faults(packing: Mapping[str, Tensor], num_real: Tensor) -> Iterator[PackingFault]:
    """What may be wrong with packing features, one after another; ask for the next only if nothing is bad so far.

    Args:
        packing: the three features, int64.
        num_real: [B] int64, the real tokens of each row.
    """
    lengths, positions = packing["seq_lens"], packing["position_ids"]
    length = positions.shape[1]
    yield PackingFault("seq_lens", f"not from 0 to {length}", (lengths < 0) | (lengths > length), lengths)
    sums, starts = lengths.sum(-1), lengths.cumsum(-1) - lengths
    yield PackingFault("seq_lens", f"documents do not fill the row of {length}", sums != length, sums)
    behind = pad(lengths[:, 1:].bool() & ~lengths[:, :-1].bool(), (1, 0))
    yield PackingFault("seq_lens", "a document behind a 0", behind, lengths)
    empty = lengths.bool() & (starts > 0) & (starts >= num_real[:, None])
    yield PackingFault("seq_lens", "a document of padding alone, which belongs to the one before", empty, lengths)
    wanted = packing_of(lengths, num_real)
    for name, what in (
        ("position_ids", "does not count from 0 in each document"),
        ("doc_remaining", "not the number of real tokens after it in its document"),
    ):
        yield PackingFault(name, what, packing[name] != wanted[name], packing[name])
