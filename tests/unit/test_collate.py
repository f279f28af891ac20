"""collate: batches of different lengths as one, by hand; and a draft learns from it what it learns from each alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import samples
from draft_samples import make_batch, make_draft
from eaglefeed.errors import SchemaError
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.collate import collate
from eaglefeed.schema.values import validate_eagle3_tensors

PACKING = ("position_ids", "seq_lens", "doc_remaining")


def whole(length: int, *, real: int | None = None, rows: int = 1, sample_id: str = "plain") -> Eagle3TargetBatch:
    """Rows that are not packed; every number in them is 1, beyond `real` 0."""
    filled = torch.zeros(rows, length, dtype=torch.int64)
    filled[:, : real or length] = 1
    core = {name: filled.clone() for name in ("input_ids", "attention_mask", "loss_mask")}
    wide = filled[..., None].float()
    aux, logits = wide.expand(-1, -1, 6).contiguous(), wide.expand(-1, -1, 4).contiguous()
    return Eagle3TargetBatch(**core, aux_hidden_states=aux, logits=logits, sample_ids=(sample_id,))


def packed(
    positions: list[int], lengths: list[int], remaining: list[int], *, real: int | None = None
) -> Eagle3TargetBatch:
    rows = [torch.tensor([row]) for row in (positions, lengths, remaining)]
    return replace(whole(len(positions), real=real, sample_id="packed"), **dict(zip(PACKING, rows, strict=True)))


def packing(batch: Eagle3TargetBatch) -> list[list[list[int]]]:
    return [batch.tensors()[name].tolist() for name in PACKING]


def test_rows_keep_their_order_and_are_padded_with_zeros_to_the_longest() -> None:
    joined = collate([whole(2, sample_id="a"), whole(4, real=3, rows=2, sample_id="b"), whole(3, sample_id="c")])
    wanted = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    for name in ("input_ids", "attention_mask", "loss_mask"):
        assert joined.tensors()[name].tolist() == wanted
    for wide in (joined.aux_hidden_states, joined.tensors()["logits"]):
        assert torch.equal(wide, torch.tensor(wanted)[..., None].float().expand_as(wide))
    assert joined.sample_ids == ("a", "b", "c")
    assert not set(PACKING) & set(joined.tensors())


@pytest.mark.parametrize("supervision", ["logits", "target_probs", "last_hidden_states"])
def test_every_encoding_keeps_its_values_dtypes_and_order_and_still_passes_the_checks(supervision: str) -> None:
    parts = [
        {name: tensor.clone() for name, tensor in samples.tensors(length=length, supervision=supervision).items()}
        for length in (6, 3, 8)
    ]
    for part in parts:  # nothing is supervised, or stands, behind the last token
        for name, tensor in part.items():
            if name not in ("aux_hidden_states", "attention_mask"):
                tensor[:, -1] = 0
    joined = collate([Eagle3TargetBatch(**part) for part in parts]).tensors()
    assert list(joined) == list(parts[0])
    for index, part in enumerate(parts):
        for name, tensor in part.items():
            rows = joined[name][2 * index : 2 * index + 2]
            assert rows.dtype == tensor.dtype
            assert torch.equal(rows[:, : tensor.shape[1]], tensor)
            assert not rows[:, tensor.shape[1] :].any()
    validate_eagle3_tensors(joined, samples.specs(joined), sample_id="joined", vocab_size=samples.V)


def test_a_row_that_was_not_packed_is_one_document_among_packed_ones() -> None:
    documents = packed([0, 1, 0, 1, 2], [2, 3, 0], [1, 0, 2, 1, 0])
    joined = collate([documents, whole(4, real=2), whole(5)])
    assert packing(joined) == [
        [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
        [[2, 3, 0], [5, 0, 0], [5, 0, 0]],
        [[1, 0, 2, 1, 0], [1, 0, 0, 0, 0], [4, 3, 2, 1, 0]],
    ]
    assert joined.sample_ids == ("packed", "plain", "plain")


def test_padding_goes_to_a_packed_rows_last_document_and_nothing_remains_there() -> None:
    one = packed([0, 1, 0, 1], [2, 2], [1, 0, 0, 0], real=3)
    other = packed([0, 0, 1, 2, 0, 1, 2], [1, 3, 3], [0, 2, 1, 0, 2, 1, 0])
    assert packing(collate([one, other])) == [
        [[0, 1, 0, 1, 2, 3, 4], [0, 0, 1, 2, 0, 1, 2]],
        [[2, 5, 0], [1, 3, 3]],
        [[1, 0, 0, 0, 0, 0, 0], [0, 2, 1, 0, 2, 1, 0]],
    ]
    assert packing(collate([other, one]))[1] == [[1, 3, 3], [2, 5, 0]]


def test_what_stands_in_for_a_sample_that_is_lost_adds_nothing() -> None:
    lost = {name: torch.zeros_like(tensor[:, :1]) for name, tensor in whole(1).tensors().items()}
    empty = Eagle3TargetBatch(**lost)
    documents = packed([0, 1, 0, 1], [2, 2], [1, 0, 1, 0])
    for joined in (collate([documents, empty]), collate([empty, documents])):
        row = joined.attention_mask.sum(-1).tolist().index(0)
        assert joined.tensors()["seq_lens"][row].tolist() == [4, 0]
        assert not joined.tensors()["doc_remaining"][row].any()
        assert not joined.loss_mask[row].any()
    assert collate([empty, empty]).attention_mask.tolist() == [[0], [0]]


def test_one_batch_alone_is_returned_as_it_is() -> None:
    batch = whole(3)
    assert collate([batch]) is batch


def test_the_batches_that_went_in_do_not_change_and_share_no_memory_with_what_comes_out() -> None:
    parts = [whole(3), packed([0, 1, 0, 1], [2, 2], [1, 0, 1, 0])]
    before = [{name: tensor.clone() for name, tensor in part.tensors().items()} for part in parts]
    joined = collate(parts).tensors()
    for tensor in joined.values():
        tensor.fill_(7)
    for part, kept in zip(parts, before, strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in part.tensors().items())


def other_encoding() -> Eagle3TargetBatch:
    tensors = whole(3, sample_id="odd").tensors()
    mask = tensors["loss_mask"].bool()[..., None]
    return Eagle3TargetBatch(
        **{name: tensor for name, tensor in tensors.items() if name != "logits"},
        target_probs=tensors["logits"],
        position_mask=mask,
        sample_ids=("odd",),
    )


def changed(**tensors: Tensor) -> Eagle3TargetBatch:
    return replace(whole(3, sample_id="odd"), **tensors)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (other_encoding(), "target_probs"),
        (changed(logits=torch.zeros(1, 3, 5)), r"logits torch.float32 \[5\]"),
        (changed(logits=torch.zeros(1, 3, 4, dtype=torch.bfloat16)), "logits torch.bfloat16"),
        (changed(aux_hidden_states=torch.zeros(1, 3, 9)), r"aux_hidden_states torch.float32 \[9\]"),
        (changed(input_ids=torch.zeros(1, 3, dtype=torch.int64, device="meta")), "input_ids torch.int64 .* on meta"),
    ],
    ids=["encoding", "vocabulary", "dtype", "width", "device"],
)
def test_batches_that_differ_in_more_than_their_rows_are_refused_by_name(odd: Eagle3TargetBatch, named: str) -> None:
    with pytest.raises(SchemaError, match=f"odd: batches that do not fit into one.* got .*{named}"):
        collate([whole(2), odd])


def test_no_batches_are_refused() -> None:
    with pytest.raises(SchemaError, match="no batches"):
        collate([])


@pytest.mark.parametrize("encoding", ["logits", "target_probs"])
def test_a_draft_learns_from_the_joined_batch_what_it_learns_from_each_alone(encoding: str) -> None:
    draft = make_draft()
    parts = [make_batch(1, length, seed=length, encoding=encoding) for length in (9, 4, 6)]
    each = [draft(**part.to_trainer_inputs()) for part in parts]
    together = draft(**collate(parts).to_trainer_inputs())
    torch.testing.assert_close(together.loss_sum, torch.stack([one.loss_sum for one in each]).sum())
    assert torch.equal(together.num_supervised, torch.stack([one.num_supervised for one in each]).sum(0))
    assert torch.equal(together.num_correct, torch.stack([one.num_correct for one in each]).sum(0))
