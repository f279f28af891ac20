"""The trainer: it learns, deterministically, counts every position the same, and refuses what would spoil weights."""

from dataclasses import replace

import pytest
import torch

from draft_samples import make_batch, make_draft
from eaglefeed.consumer.trainer import DraftTrainer, OptimizerSettings
from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.schema.batch import Eagle3TargetBatch

SETTINGS = OptimizerSettings(lr=1e-2, warmup_steps=0)


def make_trainer(settings: OptimizerSettings = SETTINGS) -> DraftTrainer:
    return DraftTrainer(make_draft(), settings)


def weights(trainer: DraftTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.draft.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def row(batch: Eagle3TargetBatch, index: int) -> Eagle3TargetBatch:
    rows = {name: tensor[index : index + 1] for name, tensor in batch.tensors().items()}
    return replace(batch, **rows, sample_ids=(batch.sample_ids[index],))


def test_one_batch_can_be_learnt_by_heart() -> None:
    trainer, batch = make_trainer(), make_batch()
    results = [trainer.step([batch]) for _ in range(120)]
    assert results[-1].loss < 0.8 * results[0].loss
    assert min(results[-1].accuracies) > 0.9
    assert results[-1].step == 120


def test_the_target_embeddings_do_not_train() -> None:
    trainer = make_trainer()
    before = trainer.draft.embed_tokens.clone()
    trainer.step([make_batch()])
    assert torch.equal(trainer.draft.embed_tokens, before)


def test_equal_batches_give_equal_weights_bit_for_bit() -> None:
    one, other = make_trainer(), make_trainer()
    for seed in range(4):
        assert one.step([make_batch(seed=seed)]) == other.step([make_batch(seed=seed)])
    assert equal(weights(one), weights(other))


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ["logits", "target_probs"])
def test_samples_of_every_dtype_that_the_contract_allows_train_with_every_dtype_of_products(
    encoding: str, stored: torch.dtype, products: torch.dtype
) -> None:
    batch = make_batch(encoding=encoding)
    floats = {name: tensor.to(stored) for name, tensor in batch.tensors().items() if tensor.is_floating_point()}
    wanted = DraftTrainer(make_draft(), SETTINGS).step([batch]).loss
    got = DraftTrainer(make_draft(), SETTINGS, dtype=products).step([replace(batch, **floats)]).loss
    assert got == pytest.approx(wanted, rel=0.02)


def test_bfloat16_products_leave_weights_moments_and_losses_in_float32() -> None:
    exact, fast = make_trainer(), DraftTrainer(make_draft(), SETTINGS, dtype=torch.bfloat16)
    wanted, got = (trainer.step([make_batch()]) for trainer in (exact, fast))
    assert got.loss != wanted.loss
    assert got.loss == pytest.approx(wanted.loss, rel=0.02)
    assert {tensor.dtype for tensor in fast.state_tensors().values()} == {torch.float32}


def test_accumulated_batches_weigh_every_supervised_position_the_same() -> None:
    batch = make_batch()
    mask = batch.position_mask.clone()
    mask[0, 3:] = False  # rows with different numbers of positions
    batch = replace(batch, position_mask=mask)
    whole, parts = make_trainer(), make_trainer()
    one, other = whole.step([batch]), parts.step([row(batch, 0), row(batch, 1)])
    assert one.num_supervised == other.num_supervised == int(mask.sum())
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_the_loss_is_a_mean_over_supervised_positions() -> None:
    trainer, batch = make_trainer(), make_batch()
    output = trainer.draft(**batch.to_trainer_inputs())
    result = trainer.step([batch])
    assert result.loss == pytest.approx(output.loss_sum.item() / int(batch.position_mask.sum()), rel=1e-6)


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    trainer, batch = make_trainer(), make_batch()
    loss = trainer.draft(**batch.to_trainer_inputs()).loss_sum / int(batch.position_mask.sum())
    wanted = torch.autograd.grad(loss, list(trainer.draft.parameters()))
    norm = torch.stack([gradient.norm() for gradient in wanted]).norm().item()
    assert trainer.step([batch]).grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_step_without_supervised_positions_changes_nothing() -> None:
    trainer, batch = make_trainer(), make_batch()
    trainer.step([batch])
    before = weights(trainer)
    result = trainer.step([replace(batch, position_mask=torch.zeros_like(batch.position_mask))])
    assert (result.loss, result.num_supervised, result.grad_norm, result.step) == (0.0, 0, 0.0, 1)
    assert equal(weights(trainer), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_named_and_spoils_no_weight(value: float) -> None:
    trainer, bad = make_trainer(), make_batch(sample_id="bad")
    bad.aux_hidden_states[1, 3] = value
    before = weights(trainer)
    with pytest.raises(SampleCorrupt, match=r"^s-0, s-1, bad-0, bad-1: loss is not finite.*got nan in bad-0, bad-1"):
        trainer.step([make_batch(), bad])
    assert equal(weights(trainer), before)
    clean = make_trainer()
    assert trainer.step([make_batch()]) == clean.step([make_batch()])
    assert equal(weights(trainer), weights(clean))


def test_gradients_are_clipped_to_the_norm() -> None:
    plain, clipped = make_trainer(), make_trainer(replace(SETTINGS, grad_clip=1e-3))
    norm = plain.step([make_batch()]).grad_norm
    assert clipped.step([make_batch()]).grad_norm == pytest.approx(norm)
    total = torch.stack([parameter.grad.norm() for parameter in clipped.draft.parameters()]).norm().item()
    assert total == pytest.approx(1e-3, rel=1e-3)


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4, decay_steps=14)
    assert [settings.lr_at(step) for step in (0, 3, 4, 9)] == pytest.approx([0.25, 1.0, 1.0, 0.55])
    assert [settings.lr_at(step) for step in (14, 99)] == pytest.approx([0.1, 0.1])
    assert OptimizerSettings(lr=1.0, warmup_steps=4).lr_at(99) == 1.0


def test_a_restored_trainer_goes_on_bit_for_bit() -> None:
    one, other = make_trainer(), make_trainer()
    for seed in range(3):
        one.step([make_batch(seed=seed)])
    saved = {name: tensor.clone() for name, tensor in one.state_tensors().items()}
    other.load_state_tensors(saved, one.step_count)
    assert one.step([make_batch(seed=9)]) == other.step([make_batch(seed=9)])
    assert equal(weights(one), weights(other))


def test_a_state_without_its_moments_is_refused_whole() -> None:
    trainer = make_trainer()
    trainer.step([make_batch()])
    state, before = trainer.state_tensors(), weights(trainer)
    del state["optimizer.fc.weight.exp_avg"]
    with pytest.raises(SchemaError, match=r"optimizer\.fc\.weight\.exp_avg"):
        trainer.load_state_tensors(state, 1)
    assert equal(weights(trainer), before)
