"""SampleRef: what the queue carries instead of tensors, and its msgpack form. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from math import prod
from typing import Annotated, Any

import msgpack
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from eaglefeed.errors import SchemaError, SchemaVersionError

__all__ = [
    "DTYPE_BYTES",
    "MAX_REF_BYTES",
    "WIRE_VERSION",
    "FeatureAlgorithm",
    "FeatureSpec",
    "SampleRef",
    "assert_no_tensors",
    "decode_ref",
    "encode_ref",
    "first_fault",
    "ref_from_json",
    "ref_to_json",
    "safe_sample_id",
]

WIRE_VERSION = 1
MAX_REF_BYTES = 16 * 1024
DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes an element, by torch's name of the dtype."""

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://.*", re.DOTALL)
_STRICT = ConfigDict(strict=True, extra="forbid")
_PLAIN = (str, int, float, bool, type(None))
_MAX_RANK = 8


class FeatureAlgorithm(StrEnum):
    """What a sample trains. `dflash` and `dspark` are known names that this version does not support."""

    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"


def safe_sample_id(value: str) -> str:
    """Return `value` if it can be a sample id: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a mark.

    Raises:
        ValueError: it cannot (ids become file names).
    """
    if not _SAFE_ID.fullmatch(value):
        raise ValueError(f"sample id {value[:200]!r}: wanted 1 to 128 of A-Z a-z 0-9 . _ -, got something else")
    return value


def _known_dtype(value: str) -> str:
    if value not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {value!r}: wanted one of {', '.join(DTYPE_BYTES)}")
    return value


def _uri(value: str) -> str:
    if not _URI.fullmatch(value):
        raise ValueError(f"store uri {value!r}: wanted scheme://…")
    return value


@dataclass(frozen=True, config=_STRICT)
class FeatureSpec:
    """Shape and dtype (torch's name, such as "bfloat16") of one feature."""

    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=_MAX_RANK)]
    dtype: Annotated[str, AfterValidator(_known_dtype)]

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense tensor of this spec."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class SampleRef:
    """A tensor-free description of one sample: where its features lie, and what they must look like.

    Args:
        sample_id: the sample's id, the same over every retry.
        run_id: the run it belongs to.
        store_uri: the store that holds it, `scheme://…`.
        feature_keys: feature → key in the store.
        feature_specs: feature → FeatureSpec of the decoded tensor.
        algorithm: what it trains.
        schema_version: version of the feature contract.
        num_tokens: real tokens, padding not counted.
        estimated_bytes: sum of numel * itemsize over the features.
        target_model_version: fingerprint of the target that made it.
        draft_weight_version: version of the draft that sampled it ("" if none did).
        checksums: stored tensor → xxh3_128 of its bytes, in hex; a tensor has the name of its feature, if it has one.
        contract: id of the run's contract.
        stored_bytes: bytes it takes in the store.

    Raises:
        pydantic.ValidationError: (a ValueError) a field of another type, a tensor among them.
    """

    sample_id: Annotated[str, AfterValidator(safe_sample_id)]
    run_id: str
    store_uri: Annotated[str, AfterValidator(_uri)]
    feature_keys: dict[str, str]
    feature_specs: dict[str, FeatureSpec]
    algorithm: FeatureAlgorithm
    schema_version: int
    num_tokens: Annotated[int, Field(ge=0)]
    estimated_bytes: Annotated[int, Field(ge=0)]
    target_model_version: str
    draft_weight_version: str
    checksums: dict[str, str] = field(default_factory=dict)
    contract: str = ""
    stored_bytes: Annotated[int, Field(ge=0)] = 0


_REF = TypeAdapter(SampleRef)


def assert_no_tensors(value: object, where: str = "ref") -> None:
    """Refuse anything but nested mappings, sequences and plain values.

    Raises:
        SchemaError: it holds a tensor, an array, bytes, or an object of any other kind; says where.
    """
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, SampleRef | FeatureSpec):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert_no_tensors(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            assert_no_tensors(item, f"{where}[{index}]")
    else:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise SchemaError("holds data that belongs into a store", subject=where, wanted="plain values", got=kind)


def encode_ref(ref: SampleRef) -> bytes:
    """The wire form: a msgpack map, the version first; a key that all features share is written once.

    Raises:
        SchemaError: it is larger than MAX_REF_BYTES.
    """
    keys = ref.feature_keys
    shared = set(keys.values())
    features = [
        [name, list(spec.shape), spec.dtype, ref.checksums.get(name, "")] for name, spec in ref.feature_specs.items()
    ]
    wire = {
        "v": WIRE_VERSION,
        "id": ref.sample_id,
        "run": ref.run_id,
        "store": ref.store_uri,
        "keys": shared.pop() if len(shared) == 1 and list(keys) == list(ref.feature_specs) else keys,
        "features": features,
        "algorithm": str(ref.algorithm),
        "schema": ref.schema_version,
        "tokens": ref.num_tokens,
        "estimated": ref.estimated_bytes,
        "target": ref.target_model_version,
        "draft": ref.draft_weight_version,
        "contract": ref.contract,
        "stored": ref.stored_bytes,
    }
    if more := {name: checksum for name, checksum in ref.checksums.items() if name not in ref.feature_specs}:
        wire["checksums"] = more
    data: bytes = msgpack.packb(wire)
    if len(data) > MAX_REF_BYTES:
        raise SchemaError(
            "ref too large", subject=ref.sample_id, wanted=f"at most {MAX_REF_BYTES} bytes", got=len(data)
        )
    return data


def decode_ref(data: bytes) -> SampleRef:
    """Read the wire form back.

    Raises:
        SchemaVersionError: another wire version.
        SchemaError: not a ref: too large, malformed, extension types, binary data, unknown or missing fields.
    """
    wire = _unpack(data)
    version = wire.pop("v", None)
    if version != WIRE_VERSION:
        raise SchemaVersionError("unknown wire version of a ref", wanted=WIRE_VERSION, got=version)
    try:
        return SampleRef(**_from_wire(wire))
    except ValidationError as error:
        raise SchemaError("not a SampleRef", got=first_fault(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError("not a SampleRef", got=f"{type(error).__name__}: {error}") from None


def ref_to_json(ref: SampleRef) -> dict[str, Any]:
    """A ref as plain JSON values."""
    return dict(_REF.dump_python(ref, mode="json"))


def ref_from_json(data: str | bytes) -> SampleRef:
    """Read a ref from JSON text.

    Raises:
        SchemaError: not a ref.
    """
    try:
        return _REF.validate_json(data)
    except ValidationError as error:
        raise SchemaError("not a SampleRef", got=first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """The first fault that pydantic found, in one line, without the value that it was found in."""
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"


def _unpack(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_REF_BYTES:
        raise SchemaError("ref too large", wanted=f"at most {MAX_REF_BYTES} bytes", got=len(data))
    try:
        wire = msgpack.unpackb(data, use_list=False, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise SchemaError("not msgpack", got=f"{type(error).__name__}: {error}") from None
    if not isinstance(wire, dict):
        raise SchemaError("not a ref", wanted="a msgpack map", got=type(wire).__name__)
    return wire


def _no_extension(code: int, _data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _from_wire(wire: dict[str, Any]) -> dict[str, Any]:
    features, keys = wire.pop("features"), wire.pop("keys")
    names = [name for name, _, _, _ in features]
    if len(set(names)) != len(names):
        raise ValueError("a feature is named twice")
    fields = {
        "sample_id": wire.pop("id"),
        "run_id": wire.pop("run"),
        "store_uri": wire.pop("store"),
        "feature_keys": dict.fromkeys(names, keys) if isinstance(keys, str) else keys,
        "feature_specs": {name: FeatureSpec(shape, dtype) for name, shape, dtype, _ in features},
        "algorithm": FeatureAlgorithm(wire.pop("algorithm")),
        "schema_version": wire.pop("schema"),
        "num_tokens": wire.pop("tokens"),
        "estimated_bytes": wire.pop("estimated"),
        "target_model_version": wire.pop("target"),
        "draft_weight_version": wire.pop("draft"),
        "checksums": {name: checksum for name, _, _, checksum in features if checksum != ""}
        | wire.pop("checksums", {}),
        "contract": wire.pop("contract"),
        "stored_bytes": wire.pop("stored"),
    }
    if wire:
        raise ValueError(f"unknown fields {sorted(wire)}")
    return fields
