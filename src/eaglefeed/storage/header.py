"""A shard's safetensors header and the ref in its metadata, made and read without torch.

The layout is safetensors': 8 bytes little-endian length n, n bytes of JSON, then the tensors' bytes without gaps. Ours
puts the larger items first and pads the JSON with spaces, so that the data starts at a multiple of 64 bytes and every
tensor is aligned. `__metadata__` holds the ref with its digest, and the tensors' digests as 32 hex digits each, in the
file's order.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash
from pydantic import ValidationError

from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.schema.eagle3_compact import check_stored_specs, validate_eagle3_compact_ref
from eaglefeed.schema.refs import FeatureSpec, SampleRef, first_fault, ref_from_json, ref_to_json
from eaglefeed.storage.base import key_of

__all__ = [
    "DIGESTS_METADATA",
    "HEADER_READ_BYTES",
    "MAX_HEADER_BYTES",
    "NO_DIGEST",
    "REF_DIGEST_METADATA",
    "REF_METADATA",
    "HeaderTensor",
    "ShardHeader",
    "build_header",
    "check_header",
    "header_bytes",
    "keyed_ref",
    "parse_header",
    "ref_metadata",
    "ref_of",
]

MAX_HEADER_BYTES = 1024 * 1024
REF_METADATA = "eaglefeed_ref"
REF_DIGEST_METADATA = "eaglefeed_ref_xxh3_128"
DIGESTS_METADATA = "eaglefeed_xxh3_128"
NO_DIGEST = "0" * 32
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_MAX_ELEMENTS = 2**63 // 8
HEADER_READ_BYTES = 16 * 1024
"""Bytes from a file's start that hold the header of nearly every shard; `header_bytes` says when more are needed."""
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
_STORED_DTYPES = {name: stored for stored, name in _DTYPES.items()}
_METADATA = "__metadata__"
_ENTRY = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class HeaderTensor:
    """One tensor of a shard: its spec, and where its bytes lie in the file."""

    spec: FeatureSpec
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself; the tensors stand in the order of their bytes."""

    tensors: Mapping[str, HeaderTensor]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int

    def digests(self, name: str) -> dict[str, str]:
        """Tensor → xxh3_128 of its bytes, in hex, as the writer found it.

        Raises:
            SampleCorrupt: there are none, or not one a tensor. `name` is what it calls the file.
        """
        found = self.metadata.get(DIGESTS_METADATA, "")
        width = len(NO_DIGEST)
        if not re.fullmatch(rf"[0-9a-f]{{{width * len(self.tensors)}}}", found):
            wanted = f"{len(self.tensors)} of {width} hex digits"
            raise SampleCorrupt(name, "no digests of its tensors", wanted=wanted, got=repr(found[:200]))
        return {key: found[width * at : width * (at + 1)] for at, key in enumerate(self.tensors)}


def build_header(specs: Mapping[str, FeatureSpec], metadata: Mapping[str, str], digests: Sequence[str]) -> bytes:
    """The first bytes of a file, up to its data; as long for one set of digests as for another.

    Args:
        specs: the tensors in the order in which their bytes follow.
        metadata: texts of the writer's.
        digests: xxh3_128 of each tensor in hex, in that order.

    Raises:
        SchemaError: longer than a reader would take, or a tensor called `__metadata__`.
    """
    if _METADATA in specs:
        raise SchemaError("a tensor has the name of the header's own entry", wanted="another name", got=_METADATA)
    entries: dict[str, Any] = {_METADATA: {**metadata, DIGESTS_METADATA: "".join(digests)}}
    position = 0
    for name, spec in specs.items():
        end = position + spec.num_bytes
        entries[name] = {
            "dtype": _STORED_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(_LENGTH.size + len(text)) // _ALIGNMENT) * _ALIGNMENT - _LENGTH.size
    if length > MAX_HEADER_BYTES:
        raise SchemaError("header too large", wanted=f"at most {MAX_HEADER_BYTES} bytes", got=length)
    return _LENGTH.pack(length) + text.ljust(length)


def header_bytes(start: bytes | bytearray, file_bytes: int, name: str) -> int:
    """How many bytes of the file its header takes, the length field included.

    Raises:
        SampleCorrupt: an impossible length.
    """
    if len(start) < _LENGTH.size:
        raise SampleCorrupt(
            name, "cut short before its header", wanted=f"at least {_LENGTH.size} bytes", got=file_bytes
        )
    (length,) = _LENGTH.unpack(start[: _LENGTH.size])
    if length > MAX_HEADER_BYTES or _LENGTH.size + length > file_bytes:
        wanted = f"at most {min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size)} bytes"
        raise SampleCorrupt(name, "impossible header length", wanted=wanted, got=length)
    return int(_LENGTH.size + length)


def parse_header(start: bytes | bytearray, file_bytes: int, name: str) -> ShardHeader:
    """Read a header from the first bytes of a shard.

    Args:
        start: at least the whole header; more is ignored.
        file_bytes: size of the whole file.
        name: what to call it in an error.

    Raises:
        SampleCorrupt: no such header, or the file's size is not what it says.
    """
    data_start = header_bytes(start, file_bytes, name)
    try:
        entries = _strict_json(bytes(start[_LENGTH.size : data_start]).decode())
        metadata = _texts(entries.pop(_METADATA, {}))
        tensors = {_printable(key): _tensor(entry, data_start) for key, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = first_fault(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise SampleCorrupt(name, "unreadable header", got=text[:300]) from None
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(tensors, data_start, file_bytes, name)
    return ShardHeader(tensors, metadata, data_start, file_bytes)


def _strict_json(text: str) -> Any:
    """JSON in which no name stands twice. NaN and Infinity are of no type that is looked for."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _printable(text: str) -> str:
    text.encode()  # a lone surrogate could not even be printed in an error
    return text


def _texts(metadata: dict[str, Any]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise TypeError(f"metadata {key!r} is no text")
    return {_printable(key): _printable(value) for key, value in metadata.items()}


def _tensor(entry: dict[str, Any], data_start: int) -> HeaderTensor:
    if set(entry) != _ENTRY:
        raise ValueError(f"wanted {sorted(_ENTRY)}, got {sorted(entry)}")
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise TypeError(f"offsets {begin!r} and {end!r}")
    spec = FeatureSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    # An empty tensor's other axes can be of any size, and torch counts in 64 bits.
    if prod(max(size, 1) for size in spec.shape) > _MAX_ELEMENTS:
        raise ValueError(f"impossible shape {spec.shape}")
    if end - begin != spec.num_bytes:
        raise ValueError(f"{end - begin} bytes for {spec}")
    return HeaderTensor(spec, data_start + begin, data_start + end)


def _check_layout(tensors: Mapping[str, HeaderTensor], data_start: int, file_bytes: int, name: str) -> None:
    position = data_start
    for tensor in tensors.values():
        if tensor.begin != position:
            raise SampleCorrupt(name, "tensors overlap or leave a gap", wanted=position, got=tensor.begin)
        position = tensor.end
    if position != file_bytes:
        what = "cut short" if file_bytes < position else "longer than its header says"
        raise SampleCorrupt(name, what, wanted=f"{position} bytes", got=file_bytes)


def ref_metadata(ref: SampleRef) -> dict[str, str]:
    """The metadata that makes a shard describe itself: its ref, without what the store and the writer add to it."""
    fields = ref_to_json(ref)
    del fields["store_uri"], fields["stored_bytes"], fields["checksums"]
    text = json.dumps(fields, separators=(",", ":"))
    return {REF_METADATA: text, REF_DIGEST_METADATA: xxhash.xxh3_128_hexdigest(text.encode())}


def ref_of(header: ShardHeader, store_uri: str, name: str) -> SampleRef:
    """The ref that a shard carries, checked against the tensors that are there.

    Raises:
        SampleCorrupt: no ref or no digests in the metadata, or other tensors than it names.
    """
    if REF_METADATA not in header.metadata:
        raise SampleCorrupt(name, "no ref in its metadata", wanted=REF_METADATA, got=sorted(header.metadata))
    digest = xxhash.xxh3_128_hexdigest(header.metadata[REF_METADATA].encode())
    if (got := header.metadata.get(REF_DIGEST_METADATA)) != digest:
        raise SampleCorrupt(name, "checksum of the ref in its metadata differs", wanted=digest, got=got)
    added = {"store_uri": store_uri, "stored_bytes": header.file_bytes, "checksums": header.digests(name)}
    try:
        fields = _strict_json(header.metadata[REF_METADATA])
        ref = ref_from_json(json.dumps({**fields, **added}))
    except (SchemaError, ValueError, TypeError, RecursionError) as error:
        raise SampleCorrupt(name, "unreadable ref in its metadata", got=str(error)[:300]) from None
    check_header(header, ref)
    return ref


def keyed_ref(header: ShardHeader, store_uri: str, key: str) -> SampleRef:
    """The ref that the shard at `key` carries.

    Raises:
        SampleCorrupt: see `ref_of`; or it is the ref of another key.
    """
    ref = ref_of(header, store_uri, key)
    if key_of(ref) != key:
        raise SampleCorrupt(ref.sample_id, "a shard under another's name", wanted=key_of(ref), got=key)
    return ref


def check_header(header: ShardHeader, ref: SampleRef) -> None:
    """Check that a shard's header is the one of this ref: tensors, specs, size, digests.

    Raises:
        SampleCorrupt: says which tensor and how it differs; or the ref is of an unknown version, or no valid one of 2.
    """
    found = {name: tensor.spec for name, tensor in header.tensors.items()}
    if ref.schema_version == 1:
        _check_same_specs(found, ref)
    else:
        _check_compact_specs(found, ref)
    if ref.stored_bytes and header.file_bytes != ref.stored_bytes:
        what = "shard of another size"
        raise SampleCorrupt(ref.sample_id, what, wanted=f"{ref.stored_bytes} bytes", got=header.file_bytes)
    digests = header.digests(ref.sample_id)
    for name, wanted in ref.checksums.items():
        if digests.get(name) != wanted:
            what = f"checksum of {name} differs in its header"
            raise SampleCorrupt(ref.sample_id, what, wanted=wanted, got=digests.get(name))


def _check_same_specs(found: Mapping[str, FeatureSpec], ref: SampleRef) -> None:
    if set(found) != set(ref.feature_specs):
        raise SampleCorrupt(ref.sample_id, "other features", wanted=sorted(ref.feature_specs), got=sorted(found))
    for name, wanted in ref.feature_specs.items():
        if found[name] != wanted:
            raise SampleCorrupt(ref.sample_id, f"{name} has another spec", wanted=wanted, got=found[name])


def _check_compact_specs(found: Mapping[str, FeatureSpec], ref: SampleRef) -> None:
    try:
        validate_eagle3_compact_ref(ref)  # also of a version that nobody knows
        check_stored_specs(found, ref)
    except SchemaError as error:
        raise SampleCorrupt(ref.sample_id, error.what, wanted=error.wanted, got=error.got) from None
