"""What a step is divided by, and what its pace is measured with: positions that supervise, and real tokens."""

from dataclasses import replace

import pytest
import torch

from draft_samples import T2D, make_batch, make_draft
from eaglefeed.consumer.loss import count_supervised
from eaglefeed.consumer.trainer import DraftTrainer


@pytest.mark.parametrize("encoding", ["logits", "target_probs"])
def test_the_positions_that_a_step_counts_are_those_that_the_draft_scores_first(encoding: str) -> None:
    batch = make_batch(encoding=encoding)
    inputs = batch.to_trainer_inputs()
    best = make_batch(encoding="logits").logits.argmax(-1)
    wanted = int((T2D[best] & batch.loss_mask.bool()).sum())
    assert 0 < wanted < int(batch.loss_mask.sum()), "some of the best tokens lie outside the draft vocabulary"
    assert int(count_supervised(inputs, T2D)) == wanted
    assert int(make_draft()(**inputs).num_supervised[0]) == wanted


def test_a_documents_last_token_supervises_nothing_in_a_packed_row() -> None:
    batch = make_batch(1, 6, encoding="logits")
    packing = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "seq_lens": torch.tensor([[3, 3]]),
        "doc_remaining": torch.tensor([[2, 1, 0, 2, 1, 0]]),
    }
    packed = replace(batch, loss_mask=torch.ones(1, 6, dtype=torch.int64), **packing)
    assert int(count_supervised(packed.to_trainer_inputs())) == 4


def test_without_a_vocabulary_map_every_position_of_the_loss_mask_counts() -> None:
    batch = make_batch(encoding="logits")
    assert int(count_supervised(batch.to_trainer_inputs())) == int(batch.loss_mask.sum())


def test_tokens_are_counted_without_padding() -> None:
    batch = make_batch(2, 9)
    mask = batch.attention_mask.clone()
    mask[1, 5:] = 0
    result = DraftTrainer(make_draft()).step([replace(batch, attention_mask=mask), make_batch(1, 4)])
    assert result.num_tokens == 9 + 5 + 4
