"""From a prompt's rows to the tensors that a target takes."""

import torch
from torch import Tensor

from eaglefeed.schema.packing import packing_of
from eaglefeed.schema.prompt import Prompt

__all__ = ["pad_prompt"]


def pad_prompt(prompt: Prompt) -> dict[str, Tensor]:
    """A prompt's rows, padded on the right, as the keyword arguments of a target's `generate_batch`.

    Returns:
        input_ids, attention_mask and loss_mask, each [B, S] int64; of packed rows also position_ids [B, S],
        seq_lens [B, max_docs] and doc_remaining [B, S].
    """
    length = max(len(row.input_ids) for row in prompt.rows)
    ids, attention, loss = (torch.zeros(len(prompt.rows), length, dtype=torch.int64) for _ in range(3))
    for index, row in enumerate(prompt.rows):
        size = len(row.input_ids)
        ids[index, :size] = torch.tensor(row.input_ids)
        attention[index, :size] = 1
        loss[index, :size] = torch.tensor(row.loss_mask)
    packing = packing_of(_seq_lens(prompt, length), attention.sum(-1)) if prompt.is_packed else {}
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": loss, **packing}


def _seq_lens(prompt: Prompt, length: int) -> Tensor:
    """[B, max_docs]; a row's padding counts to its last document."""
    lengths = torch.zeros(len(prompt.rows), max(len(row.documents) for row in prompt.rows), dtype=torch.int64)
    for index, row in enumerate(prompt.rows):
        lengths[index, : len(row.documents)] = torch.tensor(row.documents)
        lengths[index, len(row.documents) - 1] += length - len(row.input_ids)
    return lengths
