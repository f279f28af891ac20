"""The loss: which rows supervise, with what weight, and that both encodings say the same."""

import math

import pytest
import torch

from draft_samples import T2D, D, V, make_batch, make_draft, shift
from eaglefeed.consumer.loss import Supervision, project_supervision, unroll_loss
from eaglefeed.errors import SchemaError


def scored(tokens: list[list[int]]) -> torch.Tensor:
    """Hidden states that the identity head reads as strong votes for `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 4).float() * 50


def test_step_k_at_position_t_is_scored_against_row_t_plus_k() -> None:
    rows = torch.tensor([[0, 1, 2, 3]])
    supervision = Supervision(torch.nn.functional.one_hot(rows, 4).float(), torch.ones(1, 4, dtype=torch.bool), None)
    right = [scored([[0, 1, 2, 3]]), scored([[1, 2, 3]]), scored([[2, 3]])]
    output = unroll_loss(right, lambda states: states, supervision)
    assert output.num_supervised.tolist() == output.num_correct.tolist() == [4, 3, 2]
    assert output.loss_sum.item() == pytest.approx(0.0, abs=1e-6)
    shifted = [scored([[1, 2, 3, 0]]), scored([[1, 2, 3]]), scored([[2, 0]])]
    assert unroll_loss(shifted, lambda states: states, supervision).num_correct.tolist() == [0, 3, 1]


def test_the_loss_is_soft_cross_entropy_with_weights_0_8_to_the_step() -> None:
    targets = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
    supervision = Supervision(targets, torch.ones(1, 2, dtype=torch.bool), None)
    states = [torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]]), torch.tensor([[[0.0, math.log(3.0)]]])]
    first = math.log(2) + (0.25 * -math.log(0.75) + 0.75 * -math.log(0.25))
    second = 0.25 * -math.log(0.25) + 0.75 * -math.log(0.75)
    output = unroll_loss(states, lambda states: states, supervision)
    assert output.loss_sum.item() == pytest.approx(first + 0.8 * second, rel=1e-6)


def test_rows_outside_the_mask_count_nowhere() -> None:
    targets = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 3]]), 4).float()
    supervision = Supervision(targets, torch.tensor([[False, True, False, True]]), None)
    states = [scored([[3, 1, 3, 0]]), scored([[1, 3, 0]])]
    output = unroll_loss(states, lambda states: states, supervision)
    assert (output.num_supervised.tolist(), output.num_correct.tolist()) == ([2, 2], [1, 1])
    assert output.loss_sum.item() == pytest.approx(50 + 0.8 * 50, rel=1e-5)


def test_a_packed_step_is_supervised_only_where_its_document_reaches() -> None:
    supervision = Supervision(torch.full((1, 6, 4), 0.25), torch.ones(1, 6, dtype=torch.bool), None)
    remaining = torch.tensor([[2, 1, 0, 2, 1, 0]])
    states = [torch.zeros(1, 6 - k, 4) for k in range(3)]
    output = unroll_loss(states, lambda states: states, supervision, remaining)
    assert output.num_supervised.tolist() == [4, 2, 0]


def test_a_target_token_outside_the_draft_vocabulary_supervises_nothing() -> None:
    logits = torch.zeros(1, 3, V)
    logits[0, 0, 2], logits[0, 1, 1], logits[0, 2, 3] = 9, 9, 9
    loss_mask = torch.tensor([[1, 1, 0]])
    supervision = project_supervision(
        loss_mask=loss_mask, t2d=T2D, target_logits=logits, target_probs=None, position_mask=None
    )
    assert supervision.mask.tolist() == [[True, False, False]]
    rows = supervision.rows(0, supervision.mask)
    assert rows.shape == (1, D)
    assert rows[0, 1].item() == pytest.approx(math.exp(9) / (math.exp(9) + D - 1), rel=1e-5)


def test_both_encodings_give_equal_losses() -> None:
    draft = make_draft()
    one, other = (draft(**make_batch(encoding=name).to_trainer_inputs()) for name in ("logits", "target_probs"))
    assert one.loss_sum.item() == pytest.approx(other.loss_sum.item(), rel=1e-6)
    assert one.num_supervised.tolist() == other.num_supervised.tolist()
    assert one.num_correct.tolist() == other.num_correct.tolist()
    assert one.num_supervised[0] > 0


def test_no_supervised_position_means_zero_loss_and_zero_gradient() -> None:
    draft, inputs = make_draft(), make_batch().to_trainer_inputs()
    output = draft(**inputs | {"position_mask": torch.zeros_like(inputs["position_mask"])})
    output.loss_sum.backward()
    assert (output.loss_sum.item(), output.num_supervised.tolist()) == (0.0, [0, 0, 0])
    assert draft.fc.weight.grad is not None
    assert draft.fc.weight.grad.abs().sum() == 0


def test_a_batch_without_supervision_is_refused() -> None:
    inputs = make_batch().to_trainer_inputs()
    del inputs["target_probs"]
    with pytest.raises(SchemaError, match="no supervision"):
        make_draft()(**inputs)


def test_the_draft_learns_the_token_after_the_next_in_the_contracts_shift() -> None:
    """End to end through the shift: a head that knows x[t+2] from x[t+1] must score right at step 0."""
    ids = torch.tensor([[2, 3, 5, 7, 8]])
    logits = torch.nn.functional.one_hot(shift(ids), V).float() * 20
    supervision = project_supervision(
        loss_mask=shift(torch.ones(1, 5, dtype=torch.long)),
        t2d=T2D,
        target_logits=shift(logits),
        target_probs=None,
        position_mask=None,
    )
    following = {3: 5, 5: 7, 7: 8, 8: 0}
    votes = torch.tensor([[following[int(token)] for token in shift(ids)[0, :4]] + [0]])
    states = torch.nn.functional.one_hot(votes, V).float()[..., T2D] * 50
    output = unroll_loss([states], lambda states: states, supervision)
    assert (output.num_supervised.tolist(), output.num_correct.tolist()) == ([4], [4])
