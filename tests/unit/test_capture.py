"""capture and supervise: generate_batch in two steps, so that requests can share a forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eaglefeed.producer.target import HFEagle3TargetModel
from tiny_target import LAYOUTS, tiny_model

AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0], [6, 6, 1, 40, 41, 0, 0, 0, 0]])
REAL = (torch.arange(9) < torch.tensor([9, 4, 5])[:, None]).long()
LOSS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0]])
EVEN = (torch.arange(0, 64, 2), torch.arange(64) % 2 == 0)


@pytest.fixture(scope="module")
def target() -> HFEagle3TargetModel:
    torch.set_num_threads(1)
    return HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX)


def tensors(batch: Any) -> dict[str, Tensor]:
    return batch.tensors()


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    assert list(got) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize(("selected", "compact"), [(None, False), (EVEN, False), (None, True)])
def test_the_two_steps_give_what_generate_batch_gives_bit_for_bit(selected: Any, compact: bool):
    own = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX, compact=compact)
    if selected is not None:
        own.set_vocab_mapping(*selected)
    captured = own.capture(IDS, REAL, LOSS)
    checked = None if selected is None else own.check_vocab_mapping(*selected)
    same(tensors(own.supervise(captured, checked, compact=compact)), tensors(own.generate_batch(IDS, REAL, LOSS)))


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3), slice(2, 3)])
def test_a_part_is_what_its_rows_give_alone(target: HFEagle3TargetModel, rows: slice):
    length = int(REAL[rows].sum(-1).max())
    part = target.capture(IDS, REAL, LOSS).part(rows, length)
    alone = target.generate_batch(IDS[rows, :length], REAL[rows, :length], LOSS[rows, :length])
    same(tensors(target.supervise(part, None)), tensors(alone), rtol=1e-4, atol=1e-4)


def test_a_part_holds_no_more_memory_than_its_own(target: HFEagle3TargetModel):
    whole = target.capture(IDS, REAL, LOSS)
    batch = target.supervise(whole.part(slice(1, 2), 4), EVEN)
    for name, tensor in tensors(batch).items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes, name


def test_one_capture_serves_several_vocabularies(target: HFEagle3TargetModel):
    captured = target.capture(IDS, REAL, LOSS)
    other = (torch.arange(5), torch.arange(64) < 5)
    for selected in (EVEN, other, EVEN):
        target.set_vocab_mapping(*selected)
        same(tensors(target.supervise(captured, selected)), tensors(target.generate_batch(IDS, REAL, LOSS)))
    target._selected = None
