import json

import msgpack
import pytest
from pydantic import ValidationError

from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.prompt import Prompt, PromptRow, decode_prompt, encode_prompt
from eaglefeed.schema.refs import FeatureSpec


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
    value = "target_probs" if field == "supervision" else "other"
    other = _contract(**{field: value})
    assert other.id != _contract().id
    with pytest.raises(ContractMismatch, match=rf"wanted {field}=\S+, got {field}={value}"):
        _contract().require(other, "producer p")


@pytest.mark.parametrize(("hidden_size", "good", "bad"), [(8, 24, 12), (4, 12, 16), (4, 12, 24)])
def test_aux_states_are_three_times_as_wide_as_the_target_whatever_the_drafts_size(
    hidden_size: int, good: int, bad: int
) -> None:
    contract = _contract(hidden_size=hidden_size)

    def specs(width: int) -> dict[str, FeatureSpec]:
        rows = {name: FeatureSpec((1, 5), "int64") for name in ("input_ids", "attention_mask", "loss_mask")}
        floats = {"aux_hidden_states": width, "logits": 11}
        return {name: FeatureSpec((1, 5, size), "float32") for name, size in floats.items()} | rows

    said = {"sample_id": "a", "run_id": "r", "store_uri": "mem://x", "key": "k", "num_tokens": 5}
    assert contract.ref_of(specs=specs(good), **said).contract == contract.id
    with pytest.raises(ContractMismatch, match=rf"a: aux_hidden_states .* wanted {good} \(3 layers .*\), got {bad};"):
        contract.ref_of(specs=specs(bad), **said)


COMPACT = {"supervision": "last_hidden_states", "head_digest": "d", "schema_version": 2}


@pytest.mark.parametrize(("field", "value"), [("aux_storage", "fp8"), ("supervision_rows", "supervised")])
def test_the_options_of_compact_samples_are_part_of_the_contract(field: str, value: str) -> None:
    plain, other = _contract(**COMPACT), _contract(**COMPACT, **{field: value})
    assert RunContract.from_json(other.to_json()) == other
    assert other.id != plain.id
    with pytest.raises(ContractMismatch, match=rf"wanted {field}=\w+, got {field}={value}"):
        plain.require(other, "producer p")
    with pytest.raises(ContractMismatch, match="wanted head_digest=d, got head_digest=e"):
        plain.require(_contract(**COMPACT | {"head_digest": "e"}), "producer p")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_storage": "fp8"}, "aux_storage and supervision_rows go with last_hidden_states"),
        ({"supervision_rows": "supervised"}, "aux_storage and supervision_rows go with last_hidden_states"),
        ({"head_digest": "d"}, "head_digest goes with last_hidden_states"),
        ({"schema_version": 2}, "logits are of schema version 1, not 2"),
        (COMPACT | {"schema_version": 1}, "last_hidden_states are of schema version 2, not 1"),
        (COMPACT | {"head_digest": ""}, "head_digest goes with last_hidden_states"),
        (COMPACT | {"aux_storage": "int8"}, "aux_storage"),
        (COMPACT | {"supervision_rows": "some"}, "supervision_rows"),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    fields = json.loads(_contract().to_json()) | changes
    with pytest.raises(SchemaError, match=message):
        RunContract.from_json(json.dumps(fields).encode())


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
        decode_prompt(msgpack.packb(wire | {"v": 3}))


@pytest.mark.parametrize(
    "change", [{"rows": [[b"abc", b"\x01"]]}, {"rows": 3}, {"id": "../x"}, {"rows": [[b"", b""]]}, {"rows": []}]
)
def test_what_is_no_prompt_is_refused(change: dict[str, object]) -> None:
    wire = msgpack.unpackb(encode_prompt(_prompt()))
    with pytest.raises(SchemaError):
        decode_prompt(msgpack.packb(wire | change))
