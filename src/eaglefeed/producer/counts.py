"""What a draft vocabulary is chosen from: the tokens that are trained on."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglefeed.producer.conversations import read_conversations
from eaglefeed.producer.jsonl import MAX_LINE_BYTES, ReadReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["count_loss_tokens"]


def count_loss_tokens(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    report: ReadReport,
    *,
    max_length: int,
    vocab_size: int,
    max_line_bytes: int = MAX_LINE_BYTES,
    role_aliases: Mapping[str, str] | None = None,
    max_rejected_share: float = 1.0,
) -> Tensor:
    """How often each token id stands at a position with loss, [V] int64; the rest is as for `read_conversations`.

    Raises:
        InputError: see `read_conversations`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    rows = read_conversations(
        path,
        tokenizer,
        report,
        max_length=max_length,
        max_line_bytes=max_line_bytes,
        role_aliases=role_aliases,
        max_rejected_share=max_rejected_share,
    )
    for conversation in rows:
        ids, mask = torch.tensor(conversation.input_ids), torch.tensor(conversation.loss_mask, dtype=torch.bool)
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts
