"""mem:// : shards in this process, with the same bytes and checks as on disk. For tests and small runs."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import SampleMissing, StorageError, StoreFull
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import FeatureStore, StoredShard, StoreHealth, Swept, Verify, key_of
from eaglefeed.storage.header import ShardHeader, keyed_ref, parse_header

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.buffers import BufferRing

__all__ = ["MemoryStore"]


class MemoryStore(FeatureStore):
    """A bounded store in this process."""

    _named: ClassVar[dict[str, "MemoryStore"]] = {}

    def __init__(
        self,
        name: str = "",
        *,
        capacity_bytes: int = 2**30,
        verify: Verify = "always",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.uri = f"mem://{name}"
        self._capacity_bytes, self._verify, self._clock = capacity_bytes, verify, clock
        self._shards: dict[str, tuple[bytearray, float]] = {}
        self._documents: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str, *, verify: Verify = "always") -> "MemoryStore":
        """The store of that name in this process, made at first use."""
        return cls._named.setdefault(name, cls(name, verify=verify))

    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """See FeatureStore.put."""
        from eaglefeed.storage.shard import encode_shard

        key = key_of(ref)
        ref, data = encode_shard(replace(ref, store_uri=self.uri), tensors)
        with self._lock:
            if key in self._shards:
                raise StorageError("written before, shards are never replaced", subject=ref.sample_id, got=key)
            free = self.health().free_bytes
            if len(data) > free:
                raise StoreFull(self.uri, num_bytes=len(data), free_bytes=free, reason="capacity_bytes reached")
            self._shards[key] = (data, self._clock.time())
        return ref

    def get(self, ref: SampleRef, ring: "BufferRing | None" = None) -> dict[str, "Tensor"]:
        """See FeatureStore.get."""
        from eaglefeed.storage.shard import decode_shard

        return decode_shard(ref, self._data(key_of(ref), ref.sample_id), ring=ring, verify=self._verify)

    def header(self, ref: SampleRef) -> ShardHeader:
        """See FeatureStore.header."""
        data = self._data(key_of(ref), ref.sample_id)
        return parse_header(data, len(data), ref.sample_id)

    def read_ref(self, key: str) -> SampleRef:
        """See FeatureStore.read_ref."""
        data = self._data(key, key)
        return keyed_ref(parse_header(data, len(data), key), self.uri, key)

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete."""
        with self._lock:
            return self._shards.pop(key_of(ref), None) is not None

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan."""
        for key, (data, modified_s) in sorted(self._shards.items()):
            yield StoredShard(key, len(data), modified_s)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Swept:  # noqa: ARG002
        """See FeatureStore.sweep; nothing here outlives its process."""
        return Swept()

    def health(self) -> StoreHealth:
        """See FeatureStore.health."""
        used = sum(len(data) for data, _ in self._shards.values())
        return StoreHealth(self._capacity_bytes - used, self._capacity_bytes)

    def put_document(self, name: str, data: bytes) -> bool:
        """See FeatureStore.put_document."""
        return self._documents.setdefault(name, data) is data

    def get_document(self, name: str) -> bytes | None:
        """See FeatureStore.get_document."""
        return self._documents.get(name)

    def has_document(self, name: str) -> bool:
        """See FeatureStore.has_document."""
        return name in self._documents

    def delete_document(self, name: str) -> bool:
        """See FeatureStore.delete_document."""
        return self._documents.pop(name, None) is not None

    def put_assets(self, name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bool:
        """See FeatureStore.put_assets."""
        from eaglefeed.storage.shard import TensorWriter, encode_tensors

        return self.put_document(name, bytes(encode_tensors(TensorWriter(tensors, metadata))))

    def get_assets(self, name: str) -> "tuple[dict[str, Tensor], dict[str, str]] | None":
        """See FeatureStore.get_assets."""
        from eaglefeed.storage.shard import decode_tensors

        data = self.get_document(name)
        return None if data is None else decode_tensors(data, name)

    def _data(self, key: str, subject: str) -> bytearray:
        try:
            return self._shards[key][0]
        except KeyError:
            raise SampleMissing(subject, key) from None
