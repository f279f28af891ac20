"""Trainers as the ranks of a job: one sum over all positions, and no rank that goes on alone."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import pipeline
from draft_samples import D, H, make_batch, make_draft
from eaglefeed.consumer.rounds import empty_batch
from eaglefeed.consumer.together import first_at_length
from eaglefeed.consumer.trainer import DraftTrainer, OptimizerSettings, StepResult
from eaglefeed.errors import ConfigError, SampleCorrupt, StoreFull
from eaglefeed.schema.batch import Eagle3TargetBatch
from thread_ranks import Channel, ThreadRanks, together

SETTINGS = OptimizerSettings(lr=1e-2, warmup_steps=0)
CONTRACT = pipeline.contract(supervision="target_probs", vocab_map_digest="m", hidden_size=H)


def _trainers(world_size: int) -> list[DraftTrainer]:
    channels = Channel(world_size), Channel(world_size)
    return [
        DraftTrainer(make_draft(), SETTINGS, ranks=ThreadRanks(rank, world_size, channels))
        for rank in range(world_size)
    ]


def _step(
    trainers: list[DraftTrainer], shares: Sequence[Sequence[Eagle3TargetBatch]], ids: Sequence[str] = ()
) -> list[Any]:
    works = [partial(trainer.step, own, ids) for trainer, own in zip(trainers, shares, strict=True)]
    return together(*works)


def _weights(trainer: DraftTrainer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in trainer.state_tensors().values()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _unsupervised(batch: Eagle3TargetBatch) -> Eagle3TargetBatch:
    assert batch.position_mask is not None
    return replace(batch, position_mask=torch.zeros_like(batch.position_mask))


def test_ranks_with_another_optimizer_or_draft_are_refused_on_all_of_them() -> None:
    trainers = _trainers(3)
    trainers[2].settings = replace(SETTINGS, lr=0.5)
    found = together(*(trainer.share_state for trainer in trainers))
    assert all(isinstance(error, ConfigError) for error in found)
    assert all("rank 2 has another lr than rank 0, wanted 0.01, got 0.5" in str(error) for error in found)
    trainers = _trainers(2)
    trainers[1].draft.t2d.copy_(trainers[1].draft.t2d.flip(0))
    found = together(*(trainer.share_state for trainer in trainers))
    assert all("rank 1 has another vocabulary map than rank 0" in str(error) for error in found)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_learn_what_one_learns_of_all_their_batches(world_size: int) -> None:
    # Lengths differ: an average of the ranks' means would be another gradient.
    shares = [[make_batch(length=5 + 4 * rank, seed=rank)] for rank in range(world_size)]
    trainers, alone = _trainers(world_size), DraftTrainer(make_draft(), SETTINGS)
    results, wanted = _step(trainers, shares), alone.step([batch for share in shares for batch in share])
    assert len(set(results)) == 1
    assert isinstance(results[0], StepResult)
    assert results[0].num_supervised == wanted.num_supervised
    assert results[0].accuracies == wanted.accuracies
    assert results[0].loss == pytest.approx(wanted.loss, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)


def test_every_rank_has_the_same_weights_bit_for_bit_after_each_step() -> None:
    trainers = _trainers(2)
    for step in range(4):
        _step(trainers, [[make_batch(seed=step)], [make_batch(length=6, seed=10 + step)]])
        assert _equal(*map(_weights, trainers))
    assert not _equal(_weights(trainers[0]), _weights(_trainers(1)[0]))


def test_a_rank_with_nothing_in_hand_takes_part_and_changes_no_bit_of_what_the_others_learn() -> None:
    empty = empty_batch(CONTRACT, D)
    trainers, alone = _trainers(3), DraftTrainer(make_draft(), SETTINGS)
    for seed in range(3):
        batch = make_batch(seed=seed)
        results, wanted = _step(trainers, [[batch], [empty], [empty]]), alone.step([batch])
        assert results == [wanted] * 3
    assert all(_equal(_weights(trainer), _weights(alone)) for trainer in trainers)


@pytest.mark.parametrize("nothing", ["empty", "unsupervised"])
def test_a_round_without_supervised_positions_moves_no_weight_on_any_rank(nothing: str) -> None:
    trainers = _trainers(2)
    _step(trainers, [[make_batch()], [make_batch(seed=1)]])
    before = _weights(trainers[0])
    batch = empty_batch(CONTRACT, D) if nothing == "empty" else _unsupervised(make_batch(seed=2))
    results = _step(trainers, [[batch], [batch]])
    assert [(each.num_supervised, each.loss, each.grad_norm, each.step) for each in results] == [(0, 0.0, 0.0, 1)] * 2
    assert all(_equal(_weights(trainer), before) for trainer in trainers)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_with_the_rounds_ids_and_no_weight_changed(
    value: float,
) -> None:
    trainers = _trainers(3)
    before = _weights(trainers[0])
    bad = make_batch(sample_id="bad")
    bad.aux_hidden_states[0, 2] = value
    results = _step(trainers, [[make_batch(sample_id="a")], [bad], [make_batch(sample_id="c")]], ["a", "bad", "c"])
    for rank, error in enumerate(results):
        assert isinstance(error, SampleCorrupt)
        assert str(error).startswith("a, bad, c: loss is not finite, no weight was changed")
        assert ("in bad-0, bad-1" in str(error)) == (rank == 1)
    assert all(_equal(_weights(trainer), before) for trainer in trainers)
    clean = _trainers(3)
    shares = [[make_batch(seed=rank)] for rank in range(3)]
    assert _step(trainers, shares) == _step(clean, shares)
    assert _equal(_weights(trainers[2]), _weights(clean[2]))


def test_a_gradient_that_is_not_finite_stops_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = _trainers(2)
    before = _weights(trainers[0])
    plain = trainers[1]._backward

    def overflow(batch: Eagle3TargetBatch) -> Any:
        output = plain(batch)
        next(trainers[1].draft.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        return output

    monkeypatch.setattr(trainers[1], "_backward", overflow)
    errors = _step(trainers, [[make_batch()], [make_batch()]], ["x", "y"])
    assert ["x, y: gradient is not finite" in str(error) for error in errors] == [True, True]
    assert all(_equal(_weights(trainer), before) for trainer in trainers)


@pytest.mark.parametrize("steps", [0, 3])
def test_the_other_ranks_take_over_the_first_ones_state(steps: int) -> None:
    first = DraftTrainer(make_draft(), SETTINGS)
    with torch.no_grad():
        for weight in first.draft.parameters():
            weight.add_(0.01)
    for seed in range(steps):
        first.step([make_batch(seed=seed)])
    trainers = _trainers(3)
    trainers[0].load_state_tensors(first.state_tensors(), steps)
    trainers[2].step_count = 99
    together(*(trainer.share_state for trainer in trainers))
    assert [trainer.step_count for trainer in trainers] == [steps] * 3
    assert all(_equal(_weights(trainer), _weights(first)) for trainer in trainers)
    empty = empty_batch(CONTRACT, D)
    results = _step(trainers, [[make_batch(seed=9)], [empty], [empty]])
    assert results == [first.step([make_batch(seed=9)])] * 3
    assert all(_equal(_weights(trainer), _weights(first)) for trainer in trainers)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_rank_does_at_length_is_waited_for_and_its_error_is_its_own(fails: bool) -> None:
    channels, made, order = (Channel(3), Channel(3)), threading.Event(), list[str]()

    def call() -> None:
        made.wait(0.2)  # meanwhile the others ask again and again
        order.append("made")
        if fails:
            raise StoreFull("checkpoint", num_bytes=1, free_bytes=0, reason="none")

    def work(rank: int) -> str:
        ranks = Impatient(rank, 3, channels)
        first_at_length(ranks, call)
        order.append(f"rank {rank} goes on")
        return "on"

    found = together(*(partial(work, rank) for rank in range(3)))
    assert isinstance(found[0], StoreFull) if fails else found[0] == "on"
    assert found[1:] == ["on", "on"]
    assert order[0] == "made"
    assert order.count("made") == 1


class Impatient(ThreadRanks):
    @property
    def timeout_s(self) -> float:
        return 0.05
