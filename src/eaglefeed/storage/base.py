"""Where tensors live: the store's interface, and how an address opens one."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from eaglefeed.errors import ConfigError
from eaglefeed.schema.refs import SampleRef

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.header import ShardHeader

__all__ = ["FeatureStore", "StoreHealth", "StoredShard", "open_store", "shard_key"]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


class StoreHealth(NamedTuple):
    """What a store says of itself, in bytes."""

    free_bytes: int
    total_bytes: int


class StoredShard(NamedTuple):
    """One shard that a scan found; the time is seconds since the epoch."""

    key: str
    num_bytes: int
    modified_s: float


def shard_key(sample_id: str, token: int) -> str:
    """The shard's key: its name holds the lease's token, so that two producers of one prompt never share a file."""
    import xxhash

    return f"{xxhash.xxh32_hexdigest(sample_id.encode())[:2]}/{sample_id}.{token}.safetensors"


class FeatureStore(ABC):
    """A store of samples. A key is never written twice, and nothing outside the store's root is read or written."""

    uri: str

    @abstractmethod
    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """Write a sample whole or not at all; return its ref with store_uri, checksums and stored_bytes filled in.

        Raises:
            StoreFull: no room; nothing is left behind.
            StorageError: the write failed, or the key exists.
        """

    @abstractmethod
    def get(self, ref: SampleRef) -> dict[str, "Tensor"]:
        """Read a sample, checked against its ref: size, specs, checksums.

        Raises:
            SampleMissing: no such shard.
            SampleCorrupt: it is not what the ref promises.
        """

    @abstractmethod
    def header(self, ref: SampleRef) -> "ShardHeader":
        """Read a sample's header alone, without torch.

        Raises:
            SampleMissing: no such shard.
            SampleCorrupt: it has no readable header.
        """

    @abstractmethod
    def delete(self, ref: SampleRef) -> bool:
        """Remove a sample; False if it was gone already."""

    @abstractmethod
    def scan(self) -> Iterator[StoredShard]:
        """Every whole shard, in no particular order. Not for hot paths."""

    @abstractmethod
    def health(self) -> StoreHealth:
        """Free and total bytes."""

    @abstractmethod
    def put_document(self, name: str, data: bytes) -> bool:
        """Write a small file of the run beside the shards, whole, unless it is there; False if it was."""

    @abstractmethod
    def get_document(self, name: str) -> bytes | None:
        """Read a file of the run; None if it is not there."""

    @abstractmethod
    def has_document(self, name: str) -> bool:
        """Whether a file of the run is there."""

    def put_assets(self, name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bool:
        """Write a safetensors file of the run beside the shards, whole, unless it is there; False if it was."""
        import safetensors.torch

        return self.put_document(name, safetensors.torch.save(dict(tensors), metadata=dict(metadata)))

    def get_assets(self, name: str) -> "tuple[dict[str, Tensor], dict[str, str]] | None":
        """Read tensors and metadata of a safetensors file of the run; None if it is not there.

        Raises:
            SampleCorrupt: it is no safetensors file.
        """
        from eaglefeed.storage.header import parse_header
        from eaglefeed.storage.shard import decode_tensors

        data = self.get_document(name)
        if data is None:
            return None
        return decode_tensors(bytearray(data), name), dict(parse_header(data, len(data), name).metadata)

    def close(self) -> None:
        """Give back what the store holds."""
        return


def open_store(uri: str) -> FeatureStore:
    """Open the store at `uri`: mem://name, file:///folder, or a plain path.

    Raises:
        ConfigError: no such kind of store.
    """
    match = _SCHEME.fullmatch(uri)
    scheme, rest = (match[1], match[2]) if match else ("file", uri)
    if scheme == "file" and rest:
        from eaglefeed.storage.shared_dir import SharedDirStore

        return SharedDirStore(rest)
    if scheme == "mem":
        from eaglefeed.storage.memory import MemoryStore

        return MemoryStore.named(rest)
    raise ConfigError("no such kind of store", subject=uri, wanted="file:///folder, a folder's path or mem://name")
