"""What engines are asked for: documents one by one, and a probe that tells whether they run the right target."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.errors import TargetMismatch
from eaglefeed.producer.rows import Rows

__all__ = ["PROBE", "Document", "check_probe", "documents_of"]

PROBE = (11, 23, 5, 17, 3, 29, 2, 7)
"""Tokens, modulo the vocabulary."""

_TOLERANCE, _HALF_TOLERANCE = 0.02, 0.5
"""In nats, in float32 and in 16 bits; another layer's states are off by several."""


class Document(NamedTuple):
    """A request of its own.

    Args:
        row: of the batch.
        start: its place in the row.
        ids: its tokens.
    """

    row: int
    start: int
    ids: list[int]


def documents_of(rows: Rows, position_ids: Tensor | None) -> Iterator[Document]:
    """Rows, or of packed rows the documents, whose positions start at 0; padding left out."""
    for row, real in enumerate(rows.real.sum(-1).tolist()):
        starts = [0] if position_ids is None else (position_ids[row, :real] == 0).nonzero().flatten().tolist()
        for start, end in pairwise([*starts, real]):
            yield Document(row, start, rows.input_ids[row, start:end].tolist())


def check_probe(logits: Tensor, token: int, logprob: float, name: str) -> None:
    """Compare logits [V] of a probe's last position with the engine's own log probability of a token.

    Raises:
        TargetMismatch: they differ by more than rounding does.
    """
    own = float(logits.float().log_softmax(-1)[token])
    if not abs(own - logprob) <= (_TOLERANCE if logits.dtype == torch.float32 else _HALF_TOLERANCE):
        what = "its log probability is not what head and final norm make of its states"
        fix = "serve the same checkpoint; a target that does more to its logits needs the engine hf"
        raise TargetMismatch(what, subject=name, wanted=own, got=logprob, fix=fix)
