"""Packed rows: how conversations fill them, their wire form, their tensors by hand, and the checks at the trainer."""

from collections.abc import Iterator

import msgpack
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import samples
from eaglefeed.errors import SampleCorrupt, SchemaError, SchemaVersionError
from eaglefeed.producer.conversations import Conversation, packed_batches, to_packed_prompt, to_prompt
from eaglefeed.producer.sizes import Encoding, TargetSizes, sample_bytes
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.eagle3_compact import encode_compact
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow, decode_prompt, encode_prompt
from eaglefeed.schema.values import validate_eagle3_tensors
from tiny_target import LAYOUTS, tiny_model

SAID = {"tokenizer_fingerprint": "t", "template_fingerprint": "p", "max_length": 16}


def conversation(name: str, length: int) -> Conversation:
    """Its tokens are all `length`; the first has no loss."""
    return Conversation(name, 1, (length,) * length, (0,) + (1,) * (length - 1))


def prompt(*rows: PromptRow) -> Prompt:
    return Prompt(sample_id="a", rows=rows, **SAID)


TWO_ROWS = prompt(PromptRow((1, 2, 70000, 4, 5), (0, 1, 1, 0, 1), (2, 3)), PromptRow((6, 7, 8), (0, 0, 1), (3,)))


# rows


def test_a_conversation_goes_into_the_first_open_row_with_room_for_it() -> None:
    lengths = {"a": 6, "b": 5, "c": 4, "d": 3, "e": 2, "f": 10}
    rows = [row for group in packed_batches((conversation(*each) for each in lengths.items()), 1, 10) for row in group]
    assert [[each.sample_id for each in row] for row in rows] == [["a", "c"], ["b", "d", "e"], ["f"]]


def test_where_no_open_row_has_room_the_fullest_is_done_and_the_rest_stay_open() -> None:
    lengths = [7] * 31 + [9, 8, 3]
    source = (conversation(f"c{index}", length) for index, length in enumerate(lengths))
    rows = packed_batches(source, 1, 10)
    assert [each.sample_id for each in next(rows)[0]] == ["c31"]
    assert [each.sample_id for each in next(rows)[0]] == ["c0", "c33"]


def test_what_is_in_memory_is_bounded_however_many_conversations_come() -> None:
    read = 0

    def endless() -> Iterator[Conversation]:
        nonlocal read
        while True:
            read += 1
            yield conversation(f"c{read}", 1 + read % 16)

    rows, done = packed_batches(endless(), 2, 16), 0
    for _ in range(200):
        done += sum(len(row) for row in next(rows))
        assert read - done <= 32 * 16


def test_rows_of_a_batch_follow_each_other_and_the_last_batch_takes_the_rest() -> None:
    groups = list(packed_batches((conversation(f"c{index}", 10) for index in range(5)), 2, 10))
    assert [[row[0].sample_id for row in group] for group in groups] == [["c0", "c1"], ["c2", "c3"], ["c4"]]


def test_a_packed_prompt_holds_its_conversations_behind_each_other_under_one_id() -> None:
    rows = [[conversation("a", 3), conversation("b", 2)], [conversation("c", 4)]]
    made = to_packed_prompt(rows, **SAID)
    assert made.rows == (
        PromptRow((3, 3, 3, 2, 2), (0, 1, 1, 0, 1), (3, 2)),
        PromptRow((4, 4, 4, 4), (0, 1, 1, 1), (4,)),
    )
    assert made.sample_id.startswith("a.p3-")
    assert made.num_tokens == 9
    assert to_packed_prompt(rows, **SAID).sample_id == made.sample_id
    assert to_packed_prompt([rows[0]], **SAID).sample_id != made.sample_id
    alone = to_packed_prompt([[conversation("a", 3)]], **SAID)
    assert (alone.sample_id, alone.rows[0].documents) == ("a", (3,))


# the wire


def test_a_packed_prompt_survives_its_wire_form_and_has_a_version_that_older_producers_refuse() -> None:
    data = encode_prompt(TWO_ROWS)
    assert decode_prompt(data) == TWO_ROWS
    assert msgpack.unpackb(data)["v"] == 2


def test_the_wire_form_of_a_prompt_without_packing_is_what_it_was() -> None:
    plain = to_prompt([conversation("a", 2)], **SAID)
    rows = [[b"\x02\x00\x00\x00\x02\x00\x00\x00", b"\x00\x01"]]
    wire = {"v": 1, "id": "a", "rows": rows, "tokenizer": "t", "template": "p", "max_length": 16}
    assert encode_prompt(plain) == msgpack.packb(wire)
    assert decode_prompt(msgpack.packb(wire)) == plain


def wire_row(*documents: int) -> list[bytes]:
    return [b"\x02\x00\x00\x00" * 3, b"\x00\x01\x01", b"".join(length.to_bytes(4, "little") for length in documents)]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"v": 1}, SchemaError),
        ({"v": 3}, SchemaVersionError),
        ({"rows": [wire_row(1, 2)[:2]]}, SchemaError),
        ({"rows": [wire_row()]}, SchemaError),
        ({"rows": [wire_row(1, 1)]}, SchemaError),
        ({"rows": [wire_row(3, 0)]}, SchemaError),
        ({"rows": [wire_row(4, 2**32 - 1)]}, SchemaError),
        ({"rows": [[*wire_row(3)[:2], b"abc"]]}, SchemaError),
        ({"rows": [[*wire_row(3), b""]]}, SchemaError),
        ({"rows": [[*wire_row(3)[:2], [3]]]}, SchemaError),
    ],
    ids=["v1", "v3", "no documents", "empty", "short", "zero", "negative", "cut", "a fourth", "a list"],
)
def test_what_is_no_packed_prompt_is_refused(change: dict[str, object], error: type[Exception]) -> None:
    wire = msgpack.unpackb(encode_prompt(TWO_ROWS)) | {"rows": [wire_row(1, 2)]}
    assert decode_prompt(msgpack.packb(wire)).rows[0].documents == (1, 2)
    with pytest.raises(error):
        decode_prompt(msgpack.packb(wire | change))


def test_packed_rows_and_others_are_not_mixed_in_a_prompt() -> None:
    with pytest.raises(ValidationError, match="either all packed, or none"):
        prompt(PromptRow((1,), (0,)), PromptRow((1,), (0,), (1,)))


# tensors


def test_packed_rows_as_tensors_by_hand() -> None:
    got = {name: tensor.tolist() for name, tensor in pad_prompt(TWO_ROWS).items()}
    assert got == {
        "input_ids": [[1, 2, 70000, 4, 5], [6, 7, 8, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "loss_mask": [[0, 1, 1, 0, 1], [0, 0, 1, 0, 0]],
        "position_ids": [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]],
        "seq_lens": [[2, 3], [5, 0]],
        "doc_remaining": [[1, 0, 2, 1, 0], [2, 1, 0, 0, 0]],
    }


def test_padding_is_told_by_a_rows_length_though_its_own_tokens_are_the_padding_token() -> None:
    plain = prompt(PromptRow((7, 0, 0), (0, 1, 1)), PromptRow((0,), (0,)), PromptRow((0, 0, 0, 2), (0, 0, 0, 1)))
    got = pad_prompt(plain)
    assert got["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert got["loss_mask"].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


def test_rows_without_packing_have_no_packing_features() -> None:
    assert list(pad_prompt(prompt(PromptRow((1, 2), (0, 1))))) == ["input_ids", "attention_mask", "loss_mask"]


@pytest.mark.parametrize(
    ("documents", "wanted"), [((), 5), ((6,), 5), ((1, 5), 4), ((2, 2, 2), 3), ((1, 1, 1, 1, 1, 1), 0)]
)
def test_a_documents_first_token_is_nobodys_next(documents: tuple[int, ...], wanted: int) -> None:
    assert PromptRow((7,) * 6, (1,) * 6, documents).num_supervised == wanted


@pytest.mark.parametrize("supervision", ["logits", "target_probs", "last_hidden_states"])
def test_the_estimated_size_is_what_is_stored_of_packed_rows(supervision: str) -> None:
    full = prompt(PromptRow((1,) * 9, (1,) * 9, (2, 4, 3)), PromptRow((5,) * 7, (0,) + (1,) * 6, (6, 1)))
    compact = supervision == "last_hidden_states"
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), compact=compact)
    if supervision == "target_probs":
        target.set_vocab_mapping(torch.arange(20), torch.arange(64) < 20)
    features = target.generate_batch(**pad_prompt(full)).tensors()
    stored = encode_compact(features, fp8_aux=True, supervised_rows=True) if compact else features
    encoding = Encoding(supervision, *(("fp8", "supervised") if compact else ("same", "all")), 20)
    wanted = sum(tensor.nbytes for tensor in stored.values())
    assert sample_bytes(full, TargetSizes(32, 64, 7, 256), encoding, dtype="float32") == wanted


@pytest.mark.parametrize(
    ("supervision", "supervision_bytes"),
    [
        ("logits", 26_357_006_336),
        ("target_probs", 4_194_304_000 + 65_536),
        ("last_hidden_states", 377_487_360 + 262_144),
    ],
)
def test_the_size_of_a_sample_of_a_large_target_at_a_long_context(supervision: str, supervision_bytes: int) -> None:
    """H 2,880, V 201,088, S 65,536 in bf16: aux states of 1.13 GB, logits of 26.4, target_probs over 32,000 of 4.2."""
    aux_bytes, ids_and_masks = 1_132_462_080, 3 * 8 * 65_536
    row = PromptRow((7,) * 65_536, (1,) * 65_536)
    wanted = aux_bytes + ids_and_masks + supervision_bytes
    sizes = TargetSizes(2880, 201_088, 36, 131_072)
    assert sample_bytes(prompt(row), sizes, Encoding(supervision, draft_vocab_size=32_000), dtype="bfloat16") == wanted


# what a trainer refuses


def packed_sample() -> dict[str, Tensor]:
    """Documents of 2 and 4 tokens; and of 3 and 1, with two of padding."""
    found = samples.tensors(supervision="logits")
    found["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    found["loss_mask"] = torch.tensor([[1, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]])
    for name in ("aux_hidden_states", "input_ids", "logits"):
        found[name][1, 4 - (name != "aux_hidden_states") :] = 0
    found["logits"][:, -1] = 0
    return found | {
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]]),
        "seq_lens": torch.tensor([[2, 4, 0], [3, 3, 0]]),
        "doc_remaining": torch.tensor([[1, 0, 3, 2, 1, 0], [2, 1, 0, 0, 0, 0]]),
    }


def check(tensors: dict[str, Tensor]) -> None:
    validate_eagle3_tensors(tensors, samples.specs(tensors), sample_id="s1", vocab_size=samples.V)


@pytest.mark.parametrize(
    ("feature", "position", "value", "message"),
    [
        ("seq_lens", (0, 1), 5, r"seq_lens: documents do not fill the row of 6, got 1 such, the first at \[0\]: 7"),
        ("seq_lens", (1, 1), 2, r"seq_lens: documents do not fill the row of 6, .*\[1\]: 5"),
        ("seq_lens", (0,), [-2, 4, 4], r"seq_lens: not from 0 to 6, .*\[0, 0\]: -2"),
        ("seq_lens", (0,), [2**62, 2**62, 6], r"seq_lens: not from 0 to 6"),
        ("seq_lens", (0,), [2, 0, 4], r"seq_lens: a document behind a 0, .*\[0, 2\]: 4"),
        ("seq_lens", (0,), [0, 2, 4], r"seq_lens: a document behind a 0, .*\[0, 1\]: 2"),
        ("seq_lens", (1,), [3, 1, 2], r"seq_lens: a document of padding alone, .*\[1, 2\]: 2"),
        ("position_ids", (0, 2), 2, r"position_ids: does not count from 0 in each document, .*\[0, 2\]: 2"),
        ("position_ids", (1,), [0, 1, 2, 0, 0, 0], r"position_ids: does not count from 0 .*\[1, 4\]: 0"),
        ("doc_remaining", (0, 1), 1, r"doc_remaining: not the number of real tokens .*\[0, 1\]: 1"),
        ("doc_remaining", (1, 3), 2, r"doc_remaining: not the number of real tokens .*\[1, 3\]: 2"),
        ("loss_mask", (0, 1), 1, r"loss_mask: set where the next token is another document's, .*\[0, 1\]"),
        ("loss_mask", (1, 2), 1, r"loss_mask: set where the next token is another document's, .*\[1, 2\]"),
    ],
)
def test_packing_that_does_not_add_up_is_refused_with_its_place(
    feature: str, position: tuple[int, ...], value: int | list[int], message: str
) -> None:
    tensors = packed_sample()
    check(tensors)
    tensors[feature][position] = torch.tensor(value)
    with pytest.raises(SampleCorrupt, match="s1: " + message):
        check(tensors)
