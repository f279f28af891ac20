"""Where tensors live: the store's interface, and how an address opens one."""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from eaglefeed.errors import ConfigError, SampleCorrupt, StorageError
from eaglefeed.schema.refs import SampleRef

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.buffers import BufferRing
    from eaglefeed.storage.header import ShardHeader
    from eaglefeed.storage.options import PeerOptions

__all__ = [
    "ENDLESS",
    "SHARD_KEY",
    "Durability",
    "FeatureStore",
    "StoreHealth",
    "StoredShard",
    "Swept",
    "Verify",
    "check_document_name",
    "is_verified",
    "key_of",
    "open_store",
    "shard_key",
]

Durability = Literal["full", "data", "none"]
Verify = Literal["always", "sample", "never"]

_VERIFIED_SHARE = 16
SHARD_KEY = re.compile(r"[0-9a-f]{2}/[A-Za-z0-9][A-Za-z0-9._-]*\.[0-9]+\.safetensors")
_DOCUMENT = re.compile(r"[a-z][a-z0-9_]*\.(json|safetensors)")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_LIKE_A_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class StoreHealth(NamedTuple):
    """What a store says of itself, in bytes."""

    free_bytes: int
    total_bytes: int


ENDLESS = StoreHealth(sys.maxsize, sys.maxsize)
"""Of a store without an end: above every bound in bytes, so that queue.high_bytes alone counts."""


class StoredShard(NamedTuple):
    """One shard that a scan found; the time is seconds since the epoch."""

    key: str
    num_bytes: int
    modified_s: float


class Swept(NamedTuple):
    """Leftovers of crashed writes: how many were removed, and how many could not be."""

    removed: int = 0
    stuck: int = 0


def shard_key(sample_id: str, token: int) -> str:
    """The shard's key: its name holds the lease's token, so that two producers of one prompt never share a file."""
    import xxhash

    return f"{xxhash.xxh32_hexdigest(sample_id.encode())[:2]}/{sample_id}.{token}.safetensors"


def key_of(ref: SampleRef) -> str:
    """The one key of all features of a sample.

    Raises:
        SampleCorrupt: several keys, or one that `shard_key` could not have made.
    """
    keys = set(ref.feature_keys.values())
    key = keys.pop() if len(keys) == 1 else ""
    if not SHARD_KEY.fullmatch(key):
        got = sorted(set(ref.feature_keys.values()))
        wanted = "one key for all features, xx/<sample_id>.<token>.safetensors"
        raise SampleCorrupt(ref.sample_id, "impossible key", wanted=wanted, got=got)
    return key


def check_document_name(name: str) -> None:
    """Check the name of a file of the run.

    Raises:
        StorageError: not such a name.
    """
    if not _DOCUMENT.fullmatch(name):
        raise StorageError("impossible name for a file of the run", subject=name, wanted=_DOCUMENT.pattern)


def is_verified(verify: Verify, sample_id: str) -> bool:
    """Whether a policy checks this sample's digests; the same answer in every process."""
    import xxhash

    return verify == "always" or (
        verify == "sample" and xxhash.xxh3_64_intdigest(sample_id.encode()) % _VERIFIED_SHARE == 0
    )


class FeatureStore(ABC):
    """A store of samples. A key is never written twice, and nothing outside the store's root is read or written."""

    uri: str
    stays_with_producer: ClassVar[bool] = False
    """Whether samples die with the producer that put them: it must live until they are released."""

    @abstractmethod
    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """Write a sample whole or not at all; return its ref with store_uri, checksums and stored_bytes filled in.

        Raises:
            StoreFull: no room; nothing is left behind.
            StorageError: the write failed, or the key exists.
        """

    @abstractmethod
    def get(self, ref: SampleRef, ring: "BufferRing | None" = None) -> dict[str, "Tensor"]:
        """Read what is stored of a sample, checked against its ref: size, specs, and digests by the store's policy.

        Args:
            ref: names it.
            ring: whose buffer it is read into; else into fresh memory.

        Returns:
            Stored tensors: in the ref's feature order for schema version 1, else in the file's.

        Raises:
            SampleMissing: no such shard.
            SampleCorrupt: it is not what the ref promises.
            BuffersHeld: no buffer of the ring came back in time.
            StorageError: the read failed.
        """

    @abstractmethod
    def header(self, ref: SampleRef) -> "ShardHeader":
        """Read a sample's header alone, without torch.

        Raises:
            SampleMissing: no such shard.
            SampleCorrupt: it has no readable header.
        """

    @abstractmethod
    def read_ref(self, key: str) -> SampleRef:
        """The ref that the shard at `key` carries, store_uri, stored_bytes and checksums filled in; without torch.

        Raises:
            SampleMissing: no such shard.
            SampleCorrupt: it has no readable header, or its ref is another shard's.
        """

    @abstractmethod
    def delete(self, ref: SampleRef) -> bool:
        """Remove a sample; False if it was gone already."""

    @abstractmethod
    def scan(self) -> Iterator[StoredShard]:
        """Every whole shard, in no particular order. Not for hot paths."""

    @abstractmethod
    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Swept:
        """Remove what crashed writes left behind, never what a live process of this host still writes.

        Args:
            older_than_s: age at which a leftover of another host counts as one; of a dead process here it does at once.
            dry_run: only count.

        Returns:
            How many there were; one that cannot be removed does not keep the others.
        """

    @abstractmethod
    def health(self) -> StoreHealth:
        """Free and total bytes."""

    def probe(self) -> None:
        """Try at a producer's start what every `put` needs, for an error that no wait will mend.

        Raises:
            ConfigError: what lies below cannot do it, or this user may not.
        """
        return

    def wait_for_room(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Whether it is worth making another sample, waited for at most `timeout_s`; `put` may still find no room."""
        return True

    @abstractmethod
    def put_document(self, name: str, data: bytes) -> bool:
        """Write a small file of the run beside the shards, whole, unless it is there; False if it was."""

    @abstractmethod
    def get_document(self, name: str) -> bytes | None:
        """Read a file of the run; None if it is not there."""

    @abstractmethod
    def has_document(self, name: str) -> bool:
        """Whether a file of the run is there."""

    @abstractmethod
    def delete_document(self, name: str) -> bool:
        """Remove a file of the run; False if it was gone."""

    @abstractmethod
    def put_assets(self, name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bool:
        """Write a safetensors file of the run beside the shards, whole, unless it is there; False if it was."""

    @abstractmethod
    def get_assets(self, name: str) -> "tuple[dict[str, Tensor], dict[str, str]] | None":
        """Read tensors and metadata of a safetensors file of the run; None if it is not there.

        Raises:
            SampleCorrupt: it is not one that `put_assets` wrote, or damaged.
        """

    def close(self) -> None:
        """Give back what the store holds."""
        return


def open_store(
    uri: str, *, durability: Durability = "full", verify: Verify = "always", peer: "PeerOptions | None" = None
) -> FeatureStore:
    """Open the store at `uri`: mem://name, file:///folder or a plain path, shm://name, s3://bucket/prefix, nccl://.

    Args:
        uri: where it lies. nccl://HOST:PORT is a producer's, which keeps its samples and listens there; nccl:// is that
            of all others.
        durability: what outlives a power cut once `put` has returned. full: the shard and its name; data: the shard's
            bytes; none: neither, the kernel writes them when it likes. For folders.
        verify: whose digests `get` checks: every shard's, 1 in 16, or none.
        peer: for nccl://.

    Raises:
        ConfigError: no such kind of store, or an address that looks mistyped.
    """
    match = _SCHEME.fullmatch(uri)
    is_path = not _LIKE_A_SCHEME.match(uri)
    scheme, rest = (match[1], match[2]) if match else ("", uri)
    if (is_path and uri) or (scheme == "file" and rest.startswith("/")):
        from eaglefeed.storage.shared_dir import SharedDirStore

        return SharedDirStore(rest, durability=durability, verify=verify)
    if scheme == "shm":
        from eaglefeed.storage.shared_dir import SharedDirStore

        return SharedDirStore.in_memory(rest, verify=verify)
    if scheme == "mem":
        from eaglefeed.storage.memory import MemoryStore

        return MemoryStore.named(rest, verify=verify)
    if scheme == "s3":
        return _object_store(uri, verify)
    if scheme == "nccl":
        return _peer_store(rest, verify, peer)
    wanted = "file:///folder, a folder's path, shm://name, s3://bucket/prefix, mem://name, nccl:// or nccl://HOST:PORT"
    fix = "" if is_path else "a folder whose name has a colon is written ./name or /…/name"
    raise ConfigError("no such kind of store", subject=uri, wanted=wanted, fix=fix)


def _object_store(uri: str, verify: Verify) -> FeatureStore:
    try:
        from eaglefeed.storage.object_store import ObjectStore
    except ModuleNotFoundError as error:
        fix = "pip install 'eaglefeed[object]'"
        raise ConfigError("a package is missing", subject=uri, wanted=error.name, fix=fix) from None
    return ObjectStore(uri, verify=verify)


def _peer_store(address: str, verify: Verify, options: "PeerOptions | None") -> FeatureStore:
    if not address:
        from eaglefeed.storage.peer import PeerStore

        return PeerStore(options, verify=verify)
    try:
        from eaglefeed.storage.keeping import KeepingStore
    except ModuleNotFoundError as error:
        fix = "pip install 'eaglefeed[serve]'"
        raise ConfigError("a package is missing", subject=f"nccl://{address}", wanted=error.name, fix=fix) from None
    return KeepingStore(address, options, verify=verify)
