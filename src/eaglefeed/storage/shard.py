"""One safetensors shard: its bytes in chunks with digests as they are written, its tensors with every check as read."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from eaglefeed.errors import SampleCorrupt
from eaglefeed.schema.refs import DTYPE_BYTES, FeatureSpec, SampleRef
from eaglefeed.storage.base import Verify, is_verified, key_of
from eaglefeed.storage.buffers import BufferRing, fresh_memory, memory_for
from eaglefeed.storage.header import (
    DIGESTS_METADATA,
    NO_DIGEST,
    ShardHeader,
    build_header,
    check_header,
    parse_header,
    ref_metadata,
)
from eaglefeed.storage.staging import CHUNK_BYTES, staged

__all__ = [
    "TORCH_DTYPES",
    "ShardReader",
    "ShardWriter",
    "TensorReader",
    "TensorWriter",
    "decode_shard",
    "decode_tensors",
    "digest",
    "encode_shard",
    "encode_tensors",
    "flat_bytes",
    "in_order",
    "spec_of",
    "texts_of",
]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def spec_of(tensor: Tensor) -> FeatureSpec:
    """The spec that describes a tensor."""
    return FeatureSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def digest(tensor: Tensor) -> str:
    """The xxh3_128 of a tensor's bytes in row-major order, in hex."""
    found = xxhash.xxh3_128()
    for chunk in _chunks_of(tensor):
        found.update(chunk)
    return str(found.hexdigest())


def flat_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in row-major order, uint8 [num_bytes]: its own memory, unless it is not contiguous."""
    dense = tensor.detach().contiguous()
    # Not reshape(-1): torch leaves any stride on an axis of size 0 or 1, and then refuses the view.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = flat_bytes(tensor)
    if flat.is_cuda:
        yield from staged(flat)
        return
    memory = flat.numpy().data
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]


class TensorWriter:
    """A safetensors file in the making, whose header can be told only when all its data has passed by.

    Args:
        tensors: name → tensor, on any device, contiguous or not.
        metadata: texts for its header.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        self._specs = {name: spec_of(tensor) for name, tensor in self.tensors.items()}
        self._metadata = dict(metadata)
        self.digests = dict.fromkeys(self._specs, NO_DIGEST)
        self.data_start = len(self.header())
        self.file_bytes = self.data_start + sum(spec.num_bytes for spec in self._specs.values())

    def chunks(self, *, hashed: bool = True) -> Iterator[memoryview]:
        """The data behind the header, in the file's order and in pieces of at most 4 MiB, each hashed on the way.

        A piece is the tensor's own memory, or staging memory that the next piece may overwrite: it is to be used before
        the next one is asked for.

        Args:
            hashed: False for another pass over data that has been hashed.
        """
        for name, tensor in self.tensors.items():
            found = xxhash.xxh3_128()
            for chunk in _chunks_of(tensor):
                if hashed:
                    found.update(chunk)
                yield chunk
            if hashed:
                self.digests[name] = found.hexdigest()

    def parts(self) -> list[Tensor]:
        """The data as one uint8 tensor for each tensor that is not empty, in the file's order."""
        return [flat_bytes(tensor) for tensor in self.tensors.values() if tensor.numel()]

    def header(self) -> bytes:
        """The file's first `data_start` bytes, with the digests so far."""
        return build_header(self._specs, self._metadata, list(self.digests.values()))


class ShardWriter(TensorWriter):
    """A shard in the making.

    Args:
        ref: the sample's ref, its store_uri filled in.
        tensors: what is to be stored of it.
    """

    def __init__(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors, ref_metadata(ref))
        self._ref, self._names = ref, list(tensors)

    def finish(self) -> tuple[SampleRef, bytes]:
        """After the chunks: the ref with checksums and stored_bytes, and the header, `data_start` bytes long."""
        checksums = {name: self.digests[name] for name in self._names}
        return replace(self._ref, checksums=checksums, stored_bytes=self.file_bytes), self.header()


class TensorReader:
    """The tensors of a safetensors file, hashed while its data comes in.

    Args:
        header: the file's header.
        memory: writable, for all of its data; the tensors are views of it.
        name: what to call the file's subject in an error.
        key: the file's name in the store, where that is another.
        hashed: whether the digests are checked.
    """

    def __init__(
        self, header: ShardHeader, memory: memoryview, name: str, *, key: str = "", hashed: bool = True
    ) -> None:
        self.name, self._header, self._memory, self._key = name, header, memory, key
        self._hashes = {key: xxhash.xxh3_128() for key in header.tensors} if hashed else {}
        self._done = 0

    def advance(self, end: int) -> None:
        """Take note that the first `end` bytes of the data lie in the memory."""
        for key, found in self._hashes.items():
            begin, stop = self._place(key)
            begin, stop = max(begin, self._done), min(stop, end)
            if begin < stop:
                found.update(self._memory[begin:stop])
        self._done = end

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in the file's order, once all data is there.

        Raises:
            SampleCorrupt: a digest is not the one in the header.
        """
        digests = self._header.digests(self.name)
        for key, found in self._hashes.items():
            if found.hexdigest() != digests[key]:
                what = f"checksum of {key} differs"
                raise SampleCorrupt(self.name, what, wanted=digests[key], got=found.hexdigest(), where=self._key)
        return {key: self._view(key) for key in self._header.tensors}

    def _place(self, key: str) -> tuple[int, int]:
        entry = self._header.tensors[key]
        return entry.begin - self._header.data_start, entry.end - self._header.data_start

    def _view(self, key: str) -> Tensor:
        spec, (begin, end) = self._header.tensors[key].spec, self._place(key)
        dtype = TORCH_DTYPES[spec.dtype]
        if begin == end:
            return torch.empty(spec.shape, dtype=dtype)
        data = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin, offset=begin)
        return data.view(dtype).reshape(spec.shape)


class ShardReader(TensorReader):
    """The tensors of a shard, checked against its ref.

    Args:
        ref: what is to be read.
        header: the header that was found.
        memory: writable, for all of the shard's data.
        verify: which samples' digests are checked.

    Raises:
        SampleCorrupt: the header is not the ref's.
    """

    def __init__(self, ref: SampleRef, header: ShardHeader, memory: memoryview, verify: Verify = "always") -> None:
        check_header(header, ref)
        super().__init__(header, memory, ref.sample_id, key=key_of(ref), hashed=is_verified(verify, ref.sample_id))
        self._ref = ref

    def tensors(self) -> dict[str, Tensor]:
        """What is stored of the sample: version 1 in the ref's order, else in the file's; see TensorReader.tensors."""
        return in_order(self._ref, super().tensors())


def in_order(ref: SampleRef, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is stored of a sample: version 1 in the ref's order, else as it is."""
    return {name: found[name] for name in ref.feature_specs} if ref.schema_version == 1 else found


def encode_tensors(writer: TensorWriter) -> bytearray:
    """A whole file in memory."""
    data = bytearray(writer.file_bytes)
    position = writer.data_start
    for chunk in writer.chunks():
        data[position : position + len(chunk)] = chunk
        position += len(chunk)
    data[: writer.data_start] = writer.header()
    return data


def encode_shard(ref: SampleRef, tensors: Mapping[str, Tensor]) -> tuple[SampleRef, bytearray]:
    """The shard's bytes, and the ref with checksums and stored_bytes filled in."""
    writer = ShardWriter(ref, tensors)
    data = encode_tensors(writer)
    return writer.finish()[0], data


def decode_shard(
    ref: SampleRef, data: bytes | bytearray, *, ring: BufferRing | None = None, verify: Verify = "always"
) -> dict[str, Tensor]:
    """What is stored of a sample, copied out of the bytes of its shard.

    Raises:
        SampleCorrupt: the header, a spec or a checksum is not what the ref promises.
    """
    header = parse_header(data, len(data), ref.sample_id)
    check_header(header, ref)
    memory = memory_for(len(data) - header.data_start, ring, ref.sample_id)
    try:
        memory[:] = memoryview(data)[header.data_start :]
        reader = ShardReader(ref, header, memory, verify)
        reader.advance(len(memory))
        return reader.tensors()
    except BaseException:
        memory.release()  # or whoever keeps the error would keep a buffer of the ring
        raise


def decode_tensors(data: bytes | bytearray, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a whole file.

    Raises:
        SampleCorrupt: unreadable, or a digest differs.
    """
    header = parse_header(data, len(data), name)
    memory = fresh_memory(len(data) - header.data_start)
    memory[:] = memoryview(data)[header.data_start :]
    reader = TensorReader(header, memory, name)
    reader.advance(len(memory))
    return reader.tensors(), texts_of(header)


def texts_of(header: ShardHeader) -> dict[str, str]:
    """The metadata without the digests."""
    return {key: value for key, value in header.metadata.items() if key != DIGESTS_METADATA}
