"""A shard's safetensors header and the ref in its metadata, read without torch.

The layout is safetensors': 8 bytes little-endian length n, n bytes of JSON, then the tensors' bytes without gaps.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.schema.refs import FeatureSpec, SampleRef, ref_from_json, ref_to_json

__all__ = [
    "HEADER_READ_BYTES",
    "MAX_HEADER_BYTES",
    "REF_METADATA",
    "HeaderTensor",
    "ShardHeader",
    "check_header",
    "parse_header",
    "ref_metadata",
    "ref_of",
]

MAX_HEADER_BYTES = 1024 * 1024
REF_METADATA = "eaglefeed_ref"
_LENGTH = struct.Struct("<Q")
HEADER_READ_BYTES = _LENGTH.size + MAX_HEADER_BYTES
"""Bytes from a file's start that hold any header."""
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}


@dataclass(frozen=True)
class HeaderTensor:
    """One tensor of a shard: its spec, and where its bytes lie in the file."""

    spec: FeatureSpec
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself."""

    tensors: Mapping[str, HeaderTensor]
    metadata: Mapping[str, str]
    file_bytes: int


def parse_header(start: bytes | bytearray, file_bytes: int, name: str) -> ShardHeader:
    """Read a header from the first bytes of a shard.

    Args:
        start: at least the whole header; more is ignored.
        file_bytes: size of the whole file.
        name: what to call it in an error.

    Raises:
        SampleCorrupt: no such header, or the file's size is not what it says.
    """
    if len(start) < _LENGTH.size:
        raise SampleCorrupt(
            name, "cut short before its header", wanted=f"at least {_LENGTH.size} bytes", got=file_bytes
        )
    (length,) = _LENGTH.unpack(start[: _LENGTH.size])
    if length > MAX_HEADER_BYTES or _LENGTH.size + length > file_bytes:
        wanted = f"at most {min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size)} bytes"
        raise SampleCorrupt(name, "impossible header length", wanted=wanted, got=length)
    try:
        entries = json.loads(bytes(start[_LENGTH.size : _LENGTH.size + length]))
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        tensors = {key: _tensor(entry, _LENGTH.size + length) for key, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SampleCorrupt(name, "unreadable header", got=f"{type(error).__name__}: {error}"[:300]) from None
    _check_layout(tensors, _LENGTH.size + length, file_bytes, name)
    return ShardHeader(tensors, metadata, file_bytes)


def _tensor(entry: dict[str, Any], data_start: int) -> HeaderTensor:
    begin, end = entry["data_offsets"]
    spec = FeatureSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    if end - begin != spec.num_bytes:
        raise ValueError(f"{end - begin} bytes for {spec}")
    return HeaderTensor(spec, data_start + begin, data_start + end)


def _check_layout(tensors: Mapping[str, HeaderTensor], data_start: int, file_bytes: int, name: str) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise SampleCorrupt(name, "tensors overlap or leave a gap", wanted=position, got=tensor.begin)
        position = tensor.end
    if position != file_bytes:
        what = "cut short" if file_bytes < position else "longer than its header says"
        raise SampleCorrupt(name, what, wanted=f"{position} bytes", got=file_bytes)


def ref_metadata(ref: SampleRef) -> dict[str, str]:
    """The metadata that makes a shard describe itself: its ref, without the store's own path."""
    fields = ref_to_json(ref)
    del fields["store_uri"], fields["stored_bytes"]
    return {REF_METADATA: json.dumps(fields, separators=(",", ":"))}


def ref_of(header: ShardHeader, store_uri: str, name: str) -> SampleRef:
    """The ref that a shard carries, checked against the tensors that are there.

    Raises:
        SampleCorrupt: no ref in the metadata, or other tensors than it names.
    """
    if REF_METADATA not in header.metadata:
        raise SampleCorrupt(name, "no ref in its metadata", wanted=REF_METADATA, got=sorted(header.metadata))
    try:
        fields = json.loads(header.metadata[REF_METADATA])
        text = json.dumps({**fields, "store_uri": store_uri, "stored_bytes": header.file_bytes})
        ref = ref_from_json(text)
    except (SchemaError, ValueError, TypeError, RecursionError) as error:
        raise SampleCorrupt(name, "unreadable ref in its metadata", got=str(error)[:300]) from None
    check_header(header, ref)
    return ref


def check_header(header: ShardHeader, ref: SampleRef) -> None:
    """Check that a shard's header holds just the features and specs that the ref names.

    Raises:
        SampleCorrupt: says which feature and how it differs.
    """
    found = {name: tensor.spec for name, tensor in header.tensors.items()}
    if set(found) != set(ref.feature_specs):
        raise SampleCorrupt(ref.sample_id, "other features", wanted=sorted(ref.feature_specs), got=sorted(found))
    for name, wanted in ref.feature_specs.items():
        if found[name] != wanted:
            raise SampleCorrupt(ref.sample_id, f"{name} has another spec", wanted=wanted, got=found[name])
    if ref.stored_bytes and header.file_bytes != ref.stored_bytes:
        what = "shard of another size"
        raise SampleCorrupt(ref.sample_id, what, wanted=f"{ref.stored_bytes} bytes", got=header.file_bytes)
