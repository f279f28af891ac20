"""Tensors that break the contract are refused with feature, position and value; those that keep it pass."""

import pytest
import torch

from eaglefeed.errors import SampleCorrupt
from eaglefeed.schema.eagle3 import validate_eagle3_specs
from eaglefeed.schema.refs import FeatureSpec
from eaglefeed.schema.values import validate_eagle3_tensors

INF, NAN = float("inf"), float("nan")


def sample(encoding: str = "logits", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Two rows of 4 and 2 real tokens; the last two (row 0) and the last one (row 1) are the answer."""
    generator = torch.Generator().manual_seed(0)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    next_real = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])[..., None]
    loss = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])
    tensors = {
        "aux_hidden_states": (torch.randn(2, 4, 12, generator=generator) * real[..., None]).to(dtype),
        "input_ids": torch.tensor([[5, 6, 7, 0], [3, 0, 0, 0]]),
        "attention_mask": real,
        "loss_mask": loss,
    }
    values = torch.randn(2, 4, 9, generator=generator) * 3
    if encoding == "logits":
        return tensors | {"logits": (values * next_real).to(dtype)}
    if encoding == "last_hidden_states":
        best = (values.argmax(-1) * next_real[..., 0]).int()
        return tensors | {"last_hidden_states": (values[..., :4] * next_real).to(dtype), "target_argmax": best}
    probs = (values.softmax(-1) * next_real).to(dtype)
    return tensors | {"target_probs": probs, "position_mask": loss.bool()[..., None].clone()}


def check(tensors: dict[str, torch.Tensor], vocab_size: int | None = 9) -> None:
    specs = {name: FeatureSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    if "target_argmax" not in specs:
        validate_eagle3_specs(specs)
    validate_eagle3_tensors(tensors, specs, sample_id="s1", vocab_size=vocab_size)


@pytest.mark.parametrize("encoding", ["logits", "target_probs", "last_hidden_states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_good_sample_passes(encoding: str, dtype: torch.dtype):
    check(sample(encoding, dtype))


@pytest.mark.parametrize(
    ("feature", "position", "value", "message"),
    [
        ("aux_hidden_states", (0, 3, 2), NAN, r"aux_hidden_states: not finite.*\[0, 3, 2\]: nan"),
        ("aux_hidden_states", (0, 3, 2), -INF, r"aux_hidden_states: not finite.*\[0, 3, 2\]: -inf"),
        ("aux_hidden_states", (1, 3, 0), 1.0, r"aux_hidden_states: not zero beyond.*\[1, 3\]"),
        ("logits", (0, 2, 1), NAN, r"logits: no finite largest value.*\[0, 2\]: nan"),
        ("logits", (0, 2, 1), INF, r"logits: no finite largest value.*\[0, 2\]: inf"),
        ("logits", (0, 2), -INF, r"logits: no finite largest value.*\[0, 2\]: -inf"),
        ("logits", (0, 3, 1), 0.5, r"logits: not zero beyond.*\[0, 3\]"),
        ("input_ids", (0, 1), 9, r"input_ids: not from 0 to 8.*\[0, 1\]: 9"),
        ("input_ids", (0, 1), -1, r"input_ids: not from 0 to 8.*\[0, 1\]: -1"),
        ("input_ids", (1, 1), 4, r"input_ids: not zero beyond.*\[1, 1\]"),
        ("attention_mask", (0, 1), 2, r"attention_mask: not from 0 to 1.*\[0, 1\]: 2"),
        ("attention_mask", (0, 1), 0, r"attention_mask: not a run of ones.*\[0, 2\]"),
        ("attention_mask", (1, 0), 0, r"attention_mask: not a run of ones"),
        ("loss_mask", (0, 1), 2, r"loss_mask: not from 0 to 1"),
        ("loss_mask", (0, 3), 1, r"loss_mask: not zero beyond.*\[0, 3\]"),
        ("loss_mask", (1, 1), 1, r"loss_mask: not zero beyond.*\[1, 1\]"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(feature: str, position: tuple[int, ...], value: float, message: str):
    tensors = sample()
    tensors[feature][position] = value
    with pytest.raises(SampleCorrupt, match="s1: " + message):
        check(tensors)


@pytest.mark.parametrize(
    ("feature", "position", "value", "message"),
    [
        ("target_probs", (0, 1, 3), 0.9, r"target_probs: the row does not sum to 1.*\[0, 1\]"),
        ("target_probs", (0, 1, 3), -0.01, r"target_probs: no probability.*\[0, 1, 3\]: -0.01"),
        ("target_probs", (0, 1), 0.0, r"target_probs: the row does not sum to 1.*\[0, 1\]: 0"),
        ("target_probs", (1, 2, 0), 0.1, r"target_probs: not zero beyond.*\[1, 2\]"),
        ("position_mask", (0, 0, 0), True, r"position_mask: set where loss_mask is 0.*\[0, 0\]"),
    ],
)
def test_wrong_probabilities_are_refused_with_their_place(
    feature: str, position: tuple[int, ...], value: float, message: str
):
    tensors = sample("target_probs")
    tensors[feature][position] = value
    with pytest.raises(SampleCorrupt, match="s1: " + message):
        check(tensors)


@pytest.mark.parametrize(
    ("feature", "position", "value", "message"),
    [
        ("last_hidden_states", (0, 1, 3), NAN, r"last_hidden_states: not finite.*\[0, 1, 3\]: nan"),
        ("last_hidden_states", (1, 0, 0), INF, r"last_hidden_states: not finite.*\[1, 0, 0\]: inf"),
        ("last_hidden_states", (0, 3, 2), 1.0, r"last_hidden_states: not zero beyond.*\[0, 3\]"),
        ("last_hidden_states", (1, 1, 2), 1.0, r"last_hidden_states: not zero beyond.*\[1, 1\]"),
        ("target_argmax", (0, 0), 9, r"target_argmax: not from 0 to 8.*\[0, 0\]: 9"),
        ("target_argmax", (0, 1), -1, r"target_argmax: not from 0 to 8.*\[0, 1\]: -1"),
        ("target_argmax", (1, 2), 3, r"target_argmax: not zero beyond.*\[1, 2\]"),
    ],
)
def test_wrong_compact_supervision_is_refused_with_its_place(
    feature: str, position: tuple[int, ...], value: float, message: str
):
    tensors = sample("last_hidden_states")
    tensors[feature][position] = value
    with pytest.raises(SampleCorrupt, match="s1: " + message):
        check(tensors)


def test_a_banned_token_is_no_fault():
    tensors = sample()
    tensors["logits"][0, 1, 4] = -INF
    check(tensors)


def test_ids_are_checked_against_the_narrower_of_head_and_vocabulary():
    with pytest.raises(SampleCorrupt, match="input_ids: not from 0 to 6"):
        check(sample(), vocab_size=7)
    check(sample(), vocab_size=None)
    check(sample("last_hidden_states"), vocab_size=None)
    compact = sample("last_hidden_states")
    compact["target_argmax"][0, 2] = -1
    with pytest.raises(SampleCorrupt, match=r"target_argmax: not from 0 to .* 1 such, the first at \[0, 2\]: -1"):
        check(compact, vocab_size=None)


def test_tensors_that_are_not_what_the_ref_says_are_refused():
    tensors = sample()
    specs = {name: FeatureSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    for name, other in (("loss_mask", tensors["loss_mask"].int()), ("logits", tensors["logits"][:, :, :8])):
        with pytest.raises(SampleCorrupt, match=f"{name} is not what its ref says"):
            validate_eagle3_tensors(tensors | {name: other}, specs, sample_id="s1")
    del tensors["logits"]
    with pytest.raises(SampleCorrupt, match="other features"):
        validate_eagle3_tensors(tensors, specs, sample_id="s1")
