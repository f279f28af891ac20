import msgpack
import pytest
from pydantic import ValidationError

from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.prompt import Prompt, PromptRow, decode_prompt, encode_prompt


def _contract(**changes: object) -> RunContract:
    fields: dict[str, object] = {
        "target": "tiny",
        "target_fingerprint": "f",
        "dtype": "float32",
        "hidden_size": 4,
        "vocab_size": 11,
        "aux_layer_ids": (1, 2, 3),
        "supervision": "logits",
        "vocab_map_digest": "",
        "tokenizer_fingerprint": "t",
        "template_fingerprint": "p",
        "max_length": 64,
        "schema_version": 1,
    }
    return RunContract(**(fields | changes))


def _prompt(**changes: object) -> Prompt:
    fields: dict[str, object] = {
        "sample_id": "a",
        "rows": (PromptRow((1, 2, 70000), (0, 1, 1)), PromptRow((5,), (1,))),
        "tokenizer_fingerprint": "t",
        "template_fingerprint": "p",
        "max_length": 64,
    }
    return Prompt(**(fields | changes))


def test_a_contract_survives_its_file() -> None:
    assert RunContract.from_json(_contract().to_json()) == _contract()


@pytest.mark.parametrize("field", ["target_fingerprint", "dtype", "supervision", "tokenizer_fingerprint"])
def test_every_differing_field_is_named_with_both_values(field: str) -> None:
    other = _contract(**{field: "other"})
    assert other.id != _contract().id
    with pytest.raises(ContractMismatch, match=rf"wanted {field}=\S+, got {field}=other"):
        _contract().require(other, "producer p")


def test_an_equal_contract_is_accepted() -> None:
    _contract().require(_contract(), "producer p")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"target": 1}'])
def test_what_is_no_contract_is_refused(data: bytes) -> None:
    with pytest.raises(SchemaError):
        RunContract.from_json(data)


def test_a_prompt_survives_its_wire_form() -> None:
    assert decode_prompt(encode_prompt(_prompt())) == _prompt()
    assert _prompt().num_tokens == 4


@pytest.mark.parametrize(
    ("ids", "mask"),
    [((1, 2), (1,)), ((1,), (2,)), ((1.5,), (1,)), (("1",), (1,)), ((-1,), (1,))],
    ids=["short", "mask", "float", "text", "negative"],
)
def test_rows_are_checked(ids: tuple[object, ...], mask: tuple[object, ...]) -> None:
    with pytest.raises(ValidationError):
        PromptRow(ids, mask)  # type: ignore[arg-type]


def test_another_prompt_version_is_refused() -> None:
    wire = msgpack.unpackb(encode_prompt(_prompt()))
    with pytest.raises(SchemaVersionError):
        decode_prompt(msgpack.packb(wire | {"v": 2}))


@pytest.mark.parametrize(
    "change", [{"rows": [[b"abc", b"\x01"]]}, {"rows": 3}, {"id": "../x"}, {"rows": [[b"", b""]]}, {"rows": []}]
)
def test_what_is_no_prompt_is_refused(change: dict[str, object]) -> None:
    wire = msgpack.unpackb(encode_prompt(_prompt()))
    with pytest.raises(SchemaError):
        decode_prompt(msgpack.packb(wire | change))
