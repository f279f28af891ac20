"""A row of another project's features: what does not fit is an error, the rest is shifted as the contract says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pipeline
from eaglefeed.errors import InputError
from eaglefeed.interop.features import Features, ImportTarget
from eaglefeed.schema.contract import RunContract

H, V, N = 8, 50, 6
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(9))


def _norm() -> LlamaRMSNorm:
    norm = LlamaRMSNorm(H).requires_grad_(False)
    norm.weight.copy_(torch.linspace(1, 3, H))
    return norm


NORM = _norm()


def _contract(**changes: object) -> RunContract:
    compact = {"supervision": "last_hidden_states", "head_digest": "h", "schema_version": 2}
    return pipeline.contract(hidden_size=H, vocab_size=V, **({"max_length": N} | compact | changes))


TARGET = ImportTarget(_contract(), NORM, lambda last: last @ HEAD.T)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _row(**changes: Any) -> Features:
    states = _drawn(N, H)
    row = Features(
        name="file-3",
        input_ids=torch.tensor([11, 12, 13, 14, 15, 16]),
        loss_mask=torch.tensor([0, 0, 1, 1, 0, 1]),
        aux=_drawn(N, 3 * H),
        last=NORM(states),
        is_normed=True,
    )
    return replace(row, **changes)


def test_a_row_becomes_a_sample_of_one_row_shifted_by_one() -> None:
    row = _row()
    made = row.checked(TARGET).tensors(TARGET)
    assert made["input_ids"].tolist() == [[12, 13, 14, 15, 16, 0]]
    assert made["loss_mask"].tolist() == [[0, 1, 1, 0, 1, 0]]
    assert made["attention_mask"].tolist() == [[1] * N]
    assert torch.equal(made["aux_hidden_states"][0], row.aux)
    assert torch.equal(made["last_hidden_states"][0, :-1], row.last[1:])
    assert not made["last_hidden_states"][0, -1].any()
    best = (row.last @ HEAD.T).argmax(-1)
    assert made["target_argmax"].tolist() == [[*best[1:].tolist(), 0]]
    assert made["target_argmax"].dtype == torch.int32


def test_states_before_the_norm_go_through_it() -> None:
    states = _drawn(N, H)
    before = _row(last=states, is_normed=False).checked(TARGET).tensors(TARGET)
    after = _row().checked(TARGET).tensors(TARGET)
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.bool])
def test_masks_and_ids_of_other_integers_are_the_same(kind: torch.dtype) -> None:
    row = _row(loss_mask=_row().loss_mask.to(kind), input_ids=_row().input_ids.to(torch.int32))
    assert torch.equal(
        row.checked(TARGET).tensors(TARGET)["loss_mask"], _row().checked(TARGET).tensors(TARGET)["loss_mask"]
    )


def test_a_row_of_one_token_is_a_sample() -> None:
    row = _row(input_ids=torch.tensor([3]), loss_mask=torch.tensor([1]), aux=_drawn(1, 3 * H), last=NORM(_drawn(1, H)))
    made = row.checked(TARGET).tensors(TARGET)
    assert (made["input_ids"].tolist(), made["loss_mask"].tolist()) == ([[0]], [[0]])


def _with(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "longer": (
        {"input_ids": torch.zeros(7, dtype=torch.int64)},
        "a row of impossible length, wanted 1 to 6 tokens, got 7; raise feed.max_length",
    ),
    "empty": ({"input_ids": torch.zeros(0, dtype=torch.int64)}, "wanted 1 to 6 tokens, got 0"),
    "two axes": ({"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, r"wanted \[n\], got \[2, 6\]"),
    "mask": ({"loss_mask": torch.ones(5, dtype=torch.int64)}, r"loss mask of another length.*wanted \[6\], got \[5\]"),
    "mask of 2": ({"loss_mask": torch.tensor([0, 0, 1, 2, 0, 1])}, "loss mask out of range, wanted 0 to 1, got 2"),
    "beyond V": (
        {"input_ids": torch.tensor([1, 2, 50, 3, 4, 5])},
        "token ids out of range, wanted 0 to 49, got 50",
    ),
    "negative": ({"input_ids": torch.tensor([1, 2, -1, 3, 4, 5])}, "wanted 0 to 49, got -1"),
    "float ids": ({"input_ids": torch.ones(6)}, "token ids of another dtype, wanted int64 or int32, got float32"),
    "layers": ({"aux": _drawn(N, 2 * H)}, r"auxiliary states of another shape, wanted \[6, 24\], got \[6, 16\]"),
    "H": ({"last": _drawn(N, H + 1)}, r"last states of another shape, wanted \[6, 8\], got \[6, 9\]"),
    "lengths": ({"aux": _drawn(N - 1, 3 * H)}, r"wanted \[6, 24\], got \[5, 24\]"),
    "dtype": ({"aux": _drawn(N, 3 * H).bfloat16()}, "wanted float32, got bfloat16; pass target.dtype"),
    "nan": ({"aux": _with(_drawn(N, 3 * H), (2, 5), float("nan"))}, r"not finite, got 1, first \[2, 5\]"),
    "inf": ({"last": _with(_row().last, (1, 0), float("inf"))}, r"last states with values that are not finite"),
    "before the norm": ({"last": _drawn(N, H)}, "did not come out of the target's final norm"),
    "after the norm": ({"is_normed": False}, "have been through the target's final norm, wanted those before it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_an_error_that_names_the_file_what_was_wanted_and_what_came(fault: str) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(InputError, match=f"^file-3: .*{message}"):
        _row(**changes).checked(TARGET)


@pytest.mark.parametrize(("layers", "order"), [((1, 14, 26), (0, 1, 2)), ((26, 1, 14), (2, 0, 1))])
def test_layers_ascend_in_a_file_and_come_in_the_contracts_order(
    layers: tuple[int, ...], order: tuple[int, ...]
) -> None:
    row, target = _row(), replace(TARGET, contract=_contract(aux_layer_ids=layers))
    wanted = torch.cat([row.aux[:, H * index : H * index + H] for index in order], dim=-1)
    assert torch.equal(row.checked(target).tensors(target)["aux_hidden_states"][0], wanted)


def test_the_largest_file_is_known_from_the_targets_sizes() -> None:
    target = replace(TARGET, contract=_contract(max_length=1000))
    assert 1000 * (4 * H * 2 + 16) < target.max_file_bytes("bfloat16") < 1000 * (4 * H * 2 + 16) + 10**5
    assert target.max_file_bytes() - target.max_file_bytes("bfloat16") == 1000 * 4 * H * 2
