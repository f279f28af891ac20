from typing import Any

import pytest
import torch
from torch import Tensor

from eaglefeed.consumer.remote_rows import RowsRequest, VocabSession
from eaglefeed.errors import SchemaError, TargetUnavailable
from eaglefeed.schema.protocol import ModelInfo
from eaglefeed.storage.shard import decode_tensors

H, V, D = 2, 9, 3
INFO = ModelInfo(
    target="tiny",
    target_fingerprint="f",
    dtype="float32",
    hidden_size=H,
    vocab_size=V,
    num_hidden_layers=7,
    aux_layer_ids=(1, 2, 3),
    engine="hf",
)
SERVER = "http://host:1"
# Two rows of three and two tokens; the second is padded on the left.
IDS = torch.tensor([[5, 6, 7, 0], [0, 0, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
LOSS = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])


def request(*, mapped: bool = False) -> RowsRequest:
    ids = torch.tensor([0, 4, 8])
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return RowsRequest(IDS, MASK, LOSS, session=VocabSession.of(ids, mask) if mapped else None)


def answer(*, mapped: bool = False) -> dict[str, Tensor]:
    """What a server answers, written down by hand: shifted by one, padded on the right."""
    found = {
        "aux_hidden_states": torch.zeros(2, 4, 3 * H),
        "input_ids": torch.tensor([[6, 7, 0, 0], [4, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "loss_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]),
    }
    if mapped:
        return found | {
            "target_probs": torch.zeros(2, 4, D),
            "position_mask": torch.zeros(2, 4, 1, dtype=torch.bool),
        }
    return found | {"logits": torch.zeros(2, 4, V)}


def check(asked: RowsRequest, tensors: dict[str, Tensor], **metadata: str) -> None:
    batch = asked.answer(tensors, {"request": asked.id, "model": INFO.id} | metadata, INFO, SERVER)
    assert all(batch.tensors()[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("mapped", [False, True])
def test_the_answer_to_a_request_is_taken(mapped: bool) -> None:
    check(request(mapped=mapped), answer(mapped=mapped))


def test_a_request_carries_its_rows_and_its_id() -> None:
    asked = request()
    tensors, metadata = decode_tensors(asked.body, "request")
    assert metadata == {"request": asked.id}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": IDS.tolist(),
        "attention_mask": MASK.tolist(),
        "loss_mask": LOSS.tolist(),
    }


def test_a_request_does_not_change_with_the_callers_tensors() -> None:
    ids, mask, loss = IDS.clone(), MASK.clone(), LOSS.clone()
    asked = RowsRequest(ids, mask, loss, session=None)
    for tensor in (ids, mask, loss):
        tensor.zero_()
    check(asked, answer())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_masks_of_other_dtypes_are_taken_as_whole_numbers(dtype: torch.dtype) -> None:
    check(RowsRequest(IDS.int(), MASK.to(dtype), LOSS.to(dtype), session=None), answer())


@pytest.mark.parametrize("change", ["ids", "mask", "rank"])
def test_rows_of_different_shapes_are_refused(change: str) -> None:
    rows = {
        "ids": (IDS[:, :3], MASK, LOSS),
        "mask": (IDS, MASK[:1], LOSS),
        "rank": (IDS[0], MASK[0], LOSS[0]),
    }[change]
    with pytest.raises(SchemaError, match="one shape"):
        RowsRequest(*rows, session=None)


def test_a_mask_of_fractions_is_refused() -> None:
    with pytest.raises(SchemaError, match="loss_mask"):
        RowsRequest(IDS, MASK, LOSS * 0.5, session=None)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [({"request": "0" * 32}, "another request"), ({"model": "0" * 16}, "another target")],
)
def test_an_answer_of_another_request_or_target_is_refused(metadata: dict[str, str], said: str) -> None:
    with pytest.raises(TargetUnavailable, match=f"host:1.*{said}"):
        check(request(), answer(), **metadata)


CHANGES: dict[str, dict[str, Any]] = {
    "narrower aux states": {"aux_hidden_states": torch.zeros(2, 4, 3)},
    "a row less": {"input_ids": torch.tensor([[6, 7, 0, 0]])},
    "another vocabulary": {"logits": torch.zeros(2, 4, V + 1)},
    "no logits": {"logits": None},
    "another feature": {"hidden": torch.zeros(1)},
    "packing": {"position_ids": torch.zeros(2, 4, dtype=torch.int64)},
    "another dtype of aux states": {"aux_hidden_states": torch.zeros(2, 4, 3 * H, dtype=torch.bfloat16)},
    "integers as logits": {"logits": torch.zeros(2, 4, V, dtype=torch.int64)},
    "doubles as logits": {"logits": torch.zeros(2, 4, V, dtype=torch.float64)},
    "other tokens": {"input_ids": torch.tensor([[6, 7, 0, 0], [3, 0, 0, 0]])},
    "tokens beyond the row": {"input_ids": torch.tensor([[6, 7, 1, 0], [4, 0, 0, 0]])},
    "tokens not shifted": {"input_ids": torch.tensor([[5, 6, 7, 0], [3, 4, 0, 0]])},
    "another length": {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])},
    "padding on the left": {"attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])},
    "another loss mask": {"loss_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(change: str) -> None:
    tensors = {name: tensor for name, tensor in (answer() | CHANGES[change]).items() if tensor is not None}
    with pytest.raises(TargetUnavailable, match="host:1"):
        check(request(), tensors)


def test_logits_are_no_answer_where_a_map_was_set() -> None:
    with pytest.raises(TargetUnavailable):
        check(request(mapped=True), answer())
    with pytest.raises(TargetUnavailable):
        check(request(), answer(mapped=True))


@pytest.mark.parametrize("mapped", [False, True])
def test_the_bound_of_an_answer_holds_what_was_asked_for_and_little_more(mapped: bool) -> None:
    num_bytes = sum(tensor.numel() * 8 for tensor in answer(mapped=mapped).values())
    assert num_bytes <= request(mapped=mapped).max_bytes(INFO) <= num_bytes + 2**20


def test_every_map_and_request_has_a_name_of_its_own() -> None:
    sessions = [request(mapped=True).session for _ in range(50)]
    assert len({session.name for session in sessions if session} | {request().id for _ in range(50)}) == 100


@pytest.mark.parametrize(("shape", "what"), [((0, 4), "no rows"), ((2, 0), "no tokens")])
def test_rows_without_any_tokens_are_refused_in_words(shape: tuple[int, int], what: str) -> None:
    empty = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(SchemaError, match=what):
        RowsRequest(empty, empty, empty, session=None)


@pytest.mark.parametrize(
    ("value", "kind"), [(IDS.numpy(), "numpy.ndarray"), (IDS.tolist(), "list"), (None, "NoneType")], ids=lambda _: ""
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_tensor_is_refused_with_what_it_is(place: int, value: Any, kind: str) -> None:
    rows: list[Any] = [IDS, MASK, LOSS]
    rows[place] = value
    with pytest.raises(SchemaError, match=rf"wanted a torch\.Tensor, got {kind}$"):
        RowsRequest(*rows, session=None)
    mapping: list[Any] = [torch.tensor([0, 4, 8]), torch.zeros(V, dtype=torch.bool)]
    mapping[place % 2] = value
    with pytest.raises(SchemaError, match=rf"wanted a torch\.Tensor, got {kind}$"):
        VocabSession.of(*mapping)


# Documents of two and one tokens and one of padding; and of one and two, and one of padding.
PACKED = {
    "position_ids": torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]]),
    "seq_lens": torch.tensor([[2, 2], [1, 3]]),
    "doc_remaining": torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]),
}
ONES = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
PACKED_IDS = torch.tensor([[5, 6, 7, 0], [2, 3, 4, 0]])


def packed_answer() -> dict[str, Tensor]:
    """By hand: no loss where the next token is another document's, also if the request had some on all of them."""
    return {
        "aux_hidden_states": torch.zeros(2, 4, 3 * H),
        "input_ids": torch.tensor([[6, 7, 0, 0], [3, 4, 0, 0]]),
        "attention_mask": ONES.clone(),
        "loss_mask": torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]),
        "logits": torch.zeros(2, 4, V),
    } | {name: tensor.clone() for name, tensor in PACKED.items()}


def packed_request() -> RowsRequest:
    return RowsRequest(PACKED_IDS, ONES, ONES, session=None, **PACKED)


def test_a_packed_request_carries_its_packing_and_its_answer_is_taken() -> None:
    asked = packed_request()
    tensors, _ = decode_tensors(asked.body, "request")
    assert list(tensors) == ["input_ids", "attention_mask", "loss_mask", *PACKED]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in PACKED.items())
    check(asked, packed_answer())


PACKED_CHANGES: dict[str, dict[str, Any]] = {
    "no packing": dict.fromkeys(PACKED),
    "other positions": {"position_ids": torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])},
    "other documents": {"seq_lens": torch.tensor([[2, 2], [3, 1]])},
    "more documents": {"seq_lens": torch.tensor([[2, 2, 0], [1, 3, 0]])},
    "another remainder": {"doc_remaining": torch.tensor([[2, 0, 0, 0], [0, 1, 0, 0]])},
    "loss across documents": {"loss_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]])},
}


@pytest.mark.parametrize("change", PACKED_CHANGES)
def test_an_answer_with_another_packing_is_refused(change: str) -> None:
    changed = packed_answer() | PACKED_CHANGES[change]
    with pytest.raises(TargetUnavailable, match="host:1"):
        check(packed_request(), {name: tensor for name, tensor in changed.items() if tensor is not None})


@pytest.mark.parametrize("left_out", PACKED)
def test_a_request_with_some_of_the_packing_is_not_made(left_out: str) -> None:
    some = {name: tensor for name, tensor in PACKED.items() if name != left_out}
    with pytest.raises(SchemaError, match="packing takes all three"):
        RowsRequest(PACKED_IDS, ONES, ONES, session=None, **some)
