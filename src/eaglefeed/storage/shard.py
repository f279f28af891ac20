"""One safetensors shard: encode with digests, decode with every check."""

from collections.abc import Mapping
from dataclasses import replace

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from eaglefeed.errors import SampleCorrupt
from eaglefeed.schema.refs import DTYPE_BYTES, FeatureSpec, SampleRef
from eaglefeed.storage.header import check_header, parse_header, ref_metadata

__all__ = ["TORCH_DTYPES", "decode_shard", "decode_tensors", "digest", "encode_shard", "spec_of"]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def spec_of(tensor: Tensor) -> FeatureSpec:
    """The spec that describes a tensor."""
    return FeatureSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def digest(tensor: Tensor) -> str:
    """The xxh3_128 of a tensor's bytes in row-major order, in hex."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def encode_shard(ref: SampleRef, tensors: Mapping[str, Tensor]) -> tuple[SampleRef, bytes]:
    """The shard's bytes, and the ref with checksums and stored_bytes filled in."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    ref = replace(ref, checksums={name: digest(tensor) for name, tensor in on_cpu.items()})
    data = safetensors.torch.save(on_cpu, metadata=ref_metadata(ref))
    return replace(ref, stored_bytes=len(data)), data


def decode_shard(ref: SampleRef, data: bytearray) -> dict[str, Tensor]:
    """The sample's tensors, in the ref's order, as views of `data`.

    Raises:
        SampleCorrupt: the header, a spec or a checksum is not what the ref promises.
    """
    header = parse_header(data, len(data), ref.sample_id)
    check_header(header, ref)
    tensors = decode_tensors(data, ref.sample_id)
    for name, wanted in ref.checksums.items():
        got = digest(tensors[name])
        if got != wanted:
            raise SampleCorrupt(ref.sample_id, f"checksum of {name} differs", wanted=wanted, got=got)
    return {name: tensors[name] for name in ref.feature_specs}


def decode_tensors(data: bytearray, name: str) -> dict[str, Tensor]:
    """The tensors of any safetensors file, as views of `data`.

    Raises:
        SampleCorrupt: unreadable.
    """
    header = parse_header(data, len(data), name)
    return {
        key: torch.frombuffer(data, dtype=torch.uint8, count=entry.end - entry.begin, offset=entry.begin)
        .view(TORCH_DTYPES[entry.spec.dtype])
        .reshape(entry.spec.shape)
        for key, entry in header.tensors.items()
    }
