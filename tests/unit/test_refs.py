import msgpack
import numpy as np
import pytest
import torch
from pydantic import ValidationError

import samples
from eaglefeed.errors import SchemaError, SchemaVersionError
from eaglefeed.schema.refs import (
    MAX_REF_BYTES,
    FeatureSpec,
    assert_no_tensors,
    decode_ref,
    encode_ref,
    ref_from_json,
    ref_to_json,
)


def _wire(**changes: object) -> bytes:
    fields = msgpack.unpackb(encode_ref(samples.ref()))
    fields.update(changes)
    return msgpack.packb({name: value for name, value in fields.items() if value is not ...})


def test_a_ref_survives_its_wire_form() -> None:
    ref = samples.ref(checksums={"loss_mask": "ab" * 16}, stored_bytes=4711)
    assert decode_ref(encode_ref(ref)) == ref


def test_feature_order_is_kept() -> None:
    features = samples.tensors()
    turned = dict(reversed(features.items()))
    assert list(decode_ref(encode_ref(samples.ref(turned))).feature_specs) == list(turned)


def test_a_full_ref_is_well_below_one_kilobyte() -> None:
    checksums = dict.fromkeys(samples.tensors(), "f" * 32)
    ref = samples.ref(sample_id="conversation-000123", checksums=checksums, stored_bytes=10**9)
    assert len(encode_ref(ref)) < 850


def test_a_ref_survives_json() -> None:
    import json

    ref = samples.ref()
    assert ref_from_json(json.dumps(ref_to_json(ref))) == ref


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        np.zeros(2),
        b"raw",
        bytearray(b"raw"),
        memoryview(b"raw"),
        object(),
        {"a": [1, {"b": torch.ones(1)}]},
    ],
    ids=["tensor", "array", "bytes", "bytearray", "memoryview", "object", "nested tensor"],
)
def test_anything_that_is_no_plain_value_is_called_a_tensor(value: object) -> None:
    with pytest.raises(SchemaError, match="belongs into a store"):
        assert_no_tensors(value)


def test_plain_nested_values_hold_no_tensors() -> None:
    assert_no_tensors({"a": [1, 2.5, "x", None, True, (1, 2)]})


def test_where_a_tensor_hides_is_named() -> None:
    with pytest.raises(SchemaError, match=r"ref\.a\[1\]"):
        assert_no_tensors({"a": [0, torch.zeros(1)]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("feature_keys", {"logits": torch.zeros(1)}),
        ("sample_id", 7),
        ("sample_id", "../escape"),
        ("sample_id", ""),
        ("sample_id", "a" * 129),
        ("store_uri", "/no/scheme"),
        ("num_tokens", -1),
        ("num_tokens", True),
        ("schema_version", "1"),
        ("algorithm", "eagle3"),
    ],
)
def test_fields_of_another_kind_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        samples.ref(**{field: value})


def test_unknown_dtypes_and_negative_sizes_are_refused() -> None:
    with pytest.raises(ValidationError):
        FeatureSpec((1,), "complex64")
    with pytest.raises(ValidationError):
        FeatureSpec((-1,), "int64")


def test_a_spec_knows_its_bytes() -> None:
    assert FeatureSpec((2, 3, 4), "bfloat16").num_bytes == 48
    assert FeatureSpec((2, 0), "float32").num_bytes == 0


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_wire_version_is_refused(version: object) -> None:
    with pytest.raises(SchemaVersionError):
        decode_ref(_wire(v=version))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb("text"),
        b"\x81" * 2000,
        _wire(extra=1),
        _wire(id=...),
        _wire(keys=b"raw bytes"),
        _wire(features=[["x", [1], "float32", ""], ["x", [1], "float32", ""]]),
        _wire(features=[["x", [1], "float32"]]),
        _wire(features=msgpack.ExtType(1, b"tensor")),
        _wire(algorithm="eagle9"),
        _wire(tokens=-1),
        _wire(tokens=2.5),
        b"\x93" * 5000,
        msgpack.packb({"v": 1, "pad": "x" * MAX_REF_BYTES}),
    ],
)
def test_what_is_no_ref_is_refused_with_a_schema_error(data: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_ref(data)


def test_a_ref_that_would_be_too_large_is_not_written() -> None:
    with pytest.raises(SchemaError, match="too large"):
        encode_ref(samples.ref(target_model_version="x" * MAX_REF_BYTES))


def test_schema_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="not msgpack"):
        decode_ref(b"\xc1")
