"""Where a target's best token is outside the draft vocabulary nothing is supervised, in every encoding.

V is 5, and the draft has tokens 1 and 4. The best tokens of four rows are 1, 2, 4, 2, and the last three have loss: of
those the second one alone can be said.
"""

import torch
from torch import Tensor, nn

from eaglefeed.consumer.expand import TargetHead
from eaglefeed.consumer.loss import Supervision, count_supervised, project_supervision, unroll_loss
from eaglefeed.producer.supervision import compact_supervision, draft_supervision, logits_supervision

V, BEST = 5, torch.tensor([[1, 2, 4, 2]])
T2D = torch.tensor([False, True, False, False, True])
LOSS = torch.tensor([[0, 1, 1, 1]])
WANTED = [[False, False, True, False]]
HEAD = torch.eye(V) * 3
REAL = torch.ones(1, 4, dtype=torch.bool)
"""The rows are those of a longer row's first four tokens, so all have a next one."""


def states() -> Tensor:
    """Last hidden states [1, 4, V] before the shift: position t + 1 says the best token of row t."""
    return torch.cat([torch.zeros(1, 1, V), nn.functional.one_hot(BEST, V).float()], dim=1)


def longer(mask: Tensor) -> Tensor:
    """With the last token's row, which is nothing."""
    return torch.cat([mask, torch.zeros_like(mask[:, :1])], dim=1)


def to_logits(last: Tensor) -> Tensor:
    return last @ HEAD.T


def projected(**given: Tensor | None) -> Supervision:
    given = {"target_logits": None, "target_probs": None, "position_mask": None} | given
    return project_supervision(loss_mask=longer(LOSS), t2d=T2D, **given)  # type: ignore[arg-type]


def test_a_producers_mask_is_that_of_the_best_token_of_all_and_the_loss_mask() -> None:
    ids = T2D.nonzero().flatten()
    made = draft_supervision(states(), to_logits, longer(REAL), next_loss=longer(LOSS), selected=(ids, T2D))
    mask, probs = made["position_mask"], made["target_probs"]
    assert (mask.dtype, mask.shape, mask[:, :4, 0].tolist()) == (torch.bool, (1, 5, 1), WANTED)
    torch.testing.assert_close(probs[:, :4].sum(-1), torch.ones(1, 4))  # also where the best token is left out
    torch.testing.assert_close(probs[0, 1], torch.tensor([0.5, 0.5]))
    assert projected(target_probs=probs, position_mask=mask).mask[:, :4].tolist() == WANTED
    assert int(count_supervised({"position_mask": mask, "loss_mask": longer(LOSS)}, T2D)) == 1


def test_a_trainers_mask_of_full_logits_is_the_same() -> None:
    logits = logits_supervision(states(), to_logits, longer(REAL), vocab_size=V)["logits"]
    assert projected(target_logits=logits).mask[:, :4].tolist() == WANTED
    assert int(count_supervised({"target_logits": logits, "loss_mask": longer(LOSS)}, T2D)) == 1


def test_a_trainers_mask_of_last_hidden_states_is_the_same() -> None:
    made = compact_supervision(states(), to_logits, longer(REAL))
    assert made["target_argmax"][:, :4].tolist() == BEST.tolist()
    got = TargetHead({"lm_head.weight": HEAD}, {}, T2D).expand(made | {"loss_mask": longer(LOSS)})
    assert (got["position_mask"].dtype, got["position_mask"].shape) == (torch.bool, (1, 5, 1))
    assert got["position_mask"][:, :4, 0].tolist() == WANTED


def test_the_loss_is_that_of_the_masked_row_alone() -> None:
    """By hand: one row, where the target is certain of the draft's second token; both of the draft's logits are 0."""
    probs = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.0, 1.0], [0.5, 0.5]]])
    got = unroll_loss([torch.zeros(1, 4, 2)], lambda rows: rows, Supervision(probs, torch.tensor(WANTED), None))
    torch.testing.assert_close(got.loss_sum, torch.tensor(2.0).log())
    assert got.num_supervised.tolist() == [1]


def test_the_first_of_equally_good_tokens_is_the_best_one() -> None:
    made = compact_supervision(torch.ones(1, 3, V), lambda last: last, torch.ones(1, 3, dtype=torch.bool))
    assert made["target_argmax"].tolist() == [[0, 0, 0]]
