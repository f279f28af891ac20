"""mem:// : shards in this process, with the same bytes and checks as on disk. For tests and small runs."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import SampleMissing, StorageError, StoreFull
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import FeatureStore, StoredShard, StoreHealth
from eaglefeed.storage.header import ShardHeader, parse_header

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MemoryStore"]


class MemoryStore(FeatureStore):
    """A bounded store in this process."""

    _named: ClassVar[dict[str, "MemoryStore"]] = {}

    def __init__(self, name: str = "", *, capacity_bytes: int = 2**30, clock: Clock = SYSTEM_CLOCK) -> None:
        self.uri = f"mem://{name}"
        self._capacity_bytes, self._clock = capacity_bytes, clock
        self._shards: dict[str, tuple[bytes, float]] = {}
        self._documents: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """The store of that name in this process, made at first use."""
        return cls._named.setdefault(name, cls(name))

    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """See FeatureStore.put."""
        from eaglefeed.storage.shard import encode_shard

        ref, data = encode_shard(replace(ref, store_uri=self.uri), tensors)
        with self._lock:
            key = _key(ref)
            if key in self._shards:
                raise StorageError("written before, shards are never replaced", subject=ref.sample_id, got=key)
            free = self.health().free_bytes
            if len(data) > free:
                raise StoreFull(self.uri, num_bytes=len(data), free_bytes=free, reason="capacity_bytes reached")
            self._shards[key] = (data, self._clock.time())
        return ref

    def get(self, ref: SampleRef) -> dict[str, "Tensor"]:
        """See FeatureStore.get."""
        from eaglefeed.storage.shard import decode_shard

        return decode_shard(ref, bytearray(self._data(ref)))

    def header(self, ref: SampleRef) -> ShardHeader:
        """See FeatureStore.header."""
        data = self._data(ref)
        return parse_header(data, len(data), ref.sample_id)

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete."""
        with self._lock:
            return self._shards.pop(_key(ref), None) is not None

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan."""
        for key, (data, modified_s) in sorted(self._shards.items()):
            yield StoredShard(key, len(data), modified_s)

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

    def _data(self, ref: SampleRef) -> bytes:
        try:
            return self._shards[_key(ref)][0]
        except KeyError:
            raise SampleMissing(ref.sample_id, _key(ref)) from None


def _key(ref: SampleRef) -> str:
    return next(iter(ref.feature_keys.values()))
