"""What a draft vocabulary is chosen from: the tokens that are trained on."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglefeed.producer.conversations import read_conversations
from eaglefeed.producer.jsonl import ReadReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["count_loss_tokens"]


def count_loss_tokens(
    path: Path, tokenizer: "PreTrainedTokenizerBase", report: ReadReport, *, max_length: int, vocab_size: int
) -> Tensor:
    """How often each token id stands at a position with loss, [V] int64.

    Raises:
        InputError: see `read_conversations`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for conversation in read_conversations(path, tokenizer, report, max_length=max_length):
        ids, mask = torch.tensor(conversation.input_ids), torch.tensor(conversation.loss_mask, dtype=torch.bool)
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts
