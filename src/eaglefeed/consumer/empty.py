"""What a rank trains on in the place of a sample that is not there."""

import torch

from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract

__all__ = ["empty_batch"]


def empty_batch(
    contract: RunContract, draft_vocab_size: int, *, device: torch.device | str = "cpu"
) -> Eagle3TargetBatch:
    """What takes the place of a sample that is not there: one token without supervision, [1, 1, …], all zeros.

    Args:
        contract: the run's, which says the encoding and the sizes.
        draft_vocab_size: D.
        device: where it goes.
    """
    is_logits, dtype = contract.supervision == "logits", getattr(torch, contract.dtype)
    width = contract.vocab_size if is_logits else draft_vocab_size
    ids, no_mask = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, dtype=torch.bool)
    supervision = torch.zeros(1, 1, width, dtype=dtype)
    return Eagle3TargetBatch(
        aux_hidden_states=torch.zeros(1, 1, 3 * contract.hidden_size, dtype=dtype),
        input_ids=ids,
        attention_mask=ids.clone(),
        loss_mask=ids.clone(),
        logits=supervision if is_logits else None,
        target_probs=None if is_logits else supervision,
        position_mask=None if is_logits else no_mask,
    ).to(device)
