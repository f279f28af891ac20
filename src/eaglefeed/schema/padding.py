"""From a prompt's rows to the tensors that a target takes."""

import torch
from torch import Tensor

from eaglefeed.schema.prompt import Prompt

__all__ = ["pad_prompt"]


def pad_prompt(prompt: Prompt) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded input_ids, attention_mask and loss_mask of a prompt's rows, each [B, S] int64."""
    length = max(len(row.input_ids) for row in prompt.rows)
    ids, attention, loss = (torch.zeros(len(prompt.rows), length, dtype=torch.int64) for _ in range(3))
    for index, row in enumerate(prompt.rows):
        size = len(row.input_ids)
        ids[index, :size] = torch.tensor(row.input_ids)
        attention[index, :size] = 1
        loss[index, :size] = torch.tensor(row.loss_mask)
    return ids, attention, loss
