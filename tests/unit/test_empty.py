"""A batch in the place of a sample that is not there teaches nothing, and harms nothing."""

import pytest
import torch

import draft_samples
import pipeline
from eaglefeed.consumer.empty import empty_batch
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract

SUPERVISIONS = ["logits", "target_probs", "last_hidden_states"]


def _contract(supervision: str, dtype: str = "float32") -> RunContract:
    compact = {"head_digest": "x", "schema_version": 2} if supervision == "last_hidden_states" else {}
    sizes = {"hidden_size": draft_samples.H, "vocab_size": draft_samples.V, "dtype": dtype}
    return pipeline.contract(supervision=supervision, **sizes, **compact)


def _empty(supervision: str, dtype: str = "float32") -> Eagle3TargetBatch:
    return empty_batch(_contract(supervision, dtype), draft_samples.D)


@pytest.mark.parametrize("supervision", SUPERVISIONS)
def test_the_draft_reads_it_and_gets_neither_a_loss_nor_a_gradient(supervision: str) -> None:
    draft = draft_samples.make_draft()
    output = draft(**_empty(supervision).to_trainer_inputs())
    assert output.loss_sum.item() == 0.0
    assert output.num_supervised.tolist() == [0] * draft_samples.CONFIG.ttt_steps
    output.loss_sum.backward()
    # Ranks add up their gradients: one that has nothing to learn from needs them all the same.
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in draft.parameters())


@pytest.mark.parametrize("encoding", ["logits", "target_probs"])
def test_beside_a_real_batch_it_changes_no_gradient(encoding: str) -> None:
    real = draft_samples.make_batch(encoding=encoding)
    gradients = []
    for batches in ([real], [real, _empty(encoding)]):
        draft = draft_samples.make_draft()
        for batch in batches:
            draft(**batch.to_trainer_inputs()).loss_sum.backward()
        gradients.append([parameter.grad for parameter in draft.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_its_dtypes_are_those_of_the_runs_samples() -> None:
    batch = _empty("target_probs", "bfloat16")
    assert {name: str(tensor.dtype) for name, tensor in batch.tensors().items()} == {
        "aux_hidden_states": "torch.bfloat16",
        "input_ids": "torch.int64",
        "attention_mask": "torch.int64",
        "loss_mask": "torch.int64",
        "target_probs": "torch.bfloat16",
        "position_mask": "torch.bool",
    }
