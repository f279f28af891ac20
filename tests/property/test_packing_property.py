"""Random packings, against counting by hand; and conversations of any lengths into rows."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eaglefeed.producer.conversations import Conversation, packed_batches
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.collate import collate
from eaglefeed.schema.packing import packing_faults
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow, decode_prompt, encode_prompt

PACKING = ("position_ids", "seq_lens", "doc_remaining")
Rows = list[list[int]]
"""The real length of each document of each row."""

DOCUMENTS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
ROWS = st.lists(DOCUMENTS, min_size=1, max_size=3)


def counted(documents: list[int], length: int) -> tuple[list[int], list[int]]:
    """position_ids and doc_remaining of a row, padded to `length`."""
    positions = [place for size in documents for place in range(size)]
    remaining = [size - 1 - place for size in documents for place in range(size)]
    beyond = length - len(positions)
    return positions + [documents[-1] + step for step in range(beyond)], remaining + [0] * beyond


def batch_of(rows: Rows, *, packed: bool) -> Eagle3TargetBatch:
    made = tuple(PromptRow((7,) * sum(row), (1,) * sum(row), tuple(row) if packed else ()) for row in rows)
    prompt = Prompt(sample_id="a", rows=made, tokenizer_fingerprint="", template_fingerprint="", max_length=24)
    assert decode_prompt(encode_prompt(prompt)) == prompt
    tensors = pad_prompt(prompt)
    wide = tensors["attention_mask"][..., None].float()
    return Eagle3TargetBatch(**tensors, aux_hidden_states=wide.expand(-1, -1, 3), logits=wide)


def check(tensors: dict[str, Tensor], rows: Rows) -> None:
    length = tensors["input_ids"].shape[1]
    for index, documents in enumerate(rows):
        positions, remaining = counted(documents, length)
        assert tensors["attention_mask"][index].sum() == sum(documents)
        assert tensors["position_ids"][index].tolist() == positions
        assert tensors["doc_remaining"][index].tolist() == remaining
        filled = [*documents[:-1], length - sum(documents[:-1])]
        assert tensors["seq_lens"][index].tolist() == filled + [0] * (tensors["seq_lens"].shape[1] - len(filled))
    packing = {name: tensors[name] for name in PACKING}
    assert not any(fault.bad.any() for fault in packing_faults(packing, tensors["attention_mask"].sum(-1)))


@given(rows=ROWS)
def test_packed_rows_count_and_remain_as_by_hand(rows: Rows) -> None:
    check(batch_of(rows, packed=True).tensors(), rows)


@given(parts=st.lists(st.tuples(ROWS, st.booleans()), min_size=2, max_size=4))
def test_joined_batches_count_and_remain_as_by_hand(parts: list[tuple[Rows, bool]]) -> None:
    joined = collate([batch_of(rows, packed=packed) for rows, packed in parts]).tensors()
    wanted = [row if packed else [sum(row)] for rows, packed in parts for row in rows]
    length = joined["input_ids"].shape[1]
    for name in ("attention_mask", "input_ids", "loss_mask"):
        for index, row in enumerate(wanted):
            assert joined[name][index].bool().tolist() == [place < sum(row) for place in range(length)]
    if any(packed for _, packed in parts):
        check(joined, wanted)
    else:
        assert not set(PACKING) & set(joined)


@given(rows=ROWS, seed=st.integers(0, 2**32), name=st.sampled_from(PACKING), change=st.sampled_from([-3, -1, 1, 2]))
def test_no_number_of_a_packing_can_be_another_one(rows: Rows, seed: int, name: str, change: int) -> None:
    tensors = batch_of(rows, packed=True).tensors()
    packing = {feature: tensors[feature].clone() for feature in PACKING}
    place = int(torch.randint(packing[name].numel(), (1,), generator=torch.Generator().manual_seed(seed)))
    packing[name].view(-1)[place] += change
    faults = packing_faults(packing, tensors["attention_mask"].sum(-1))
    fault = next(found for found in faults if found.bad.any())
    assert fault.bad.shape == fault.values.shape
    assert fault.name == name


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=120), batch_size=st.integers(1, 3))
def test_every_conversation_is_in_one_row_and_no_row_is_longer_than_it_may_be(
    lengths: list[int], batch_size: int
) -> None:
    def conversations() -> Iterator[Conversation]:
        for index, length in enumerate(lengths):
            yield Conversation(str(index), 1, (1,) * length, (1,) * length)

    groups = list(packed_batches(conversations(), batch_size, 12))
    rows = [row for group in groups for row in group]
    assert sorted(int(each.sample_id) for row in rows for each in row) == list(range(len(lengths)))
    assert all(sum(len(each.input_ids) for each in row) <= 12 for row in rows)
    assert all(int(one.sample_id) < int(two.sample_id) for row in rows for one, two in pairwise(row))
    assert all(len(group) == batch_size for group in groups[:-1])
    assert list(packed_batches(conversations(), batch_size, 12)) == groups
    # First fit leaves at most one open row half empty, of 32; a row that was closed was the fullest of them.
    assert sum(sum(len(each.input_ids) for each in row) <= 6 for row in rows) <= 1
