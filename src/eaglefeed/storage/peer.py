"""nccl:// : tensors stay with their producer, and whoever needs a sample pulls it from there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, TypeVar

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, PeerGone, SampleMissing
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import ENDLESS, FeatureStore, StoredShard, StoreHealth, Swept, Verify
from eaglefeed.storage.header import ShardHeader
from eaglefeed.storage.options import PeerOptions
from eaglefeed.storage.peers import Peer, Peers

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.buffers import BufferRing

__all__ = ["PeerStore"]

T = TypeVar("T")

_MOST_REFS = 10_000
"""Looked at for a producer that lives, at a time."""


class PeerStore(FeatureStore):
    """What trainers see: samples at the producers that their refs name; files of the run at whichever is found.

    Args:
        options: token, data_plane, device, discover, documents.
        verify: whose digests are checked.
        clock: measures how long a producer is taken for gone.
    """

    stays_with_producer: ClassVar[bool] = True

    def __init__(
        self, options: PeerOptions | None = None, *, verify: Verify = "always", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.uri, self._verify, self._options = "nccl://", verify, options or PeerOptions()
        self._peers, self._documents = Peers(self._options, clock), self._options.documents
        self._last = ""

    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:  # noqa: ARG002
        """See FeatureStore.put.

        Raises:
            ConfigError: only producers keep samples.
        """
        raise _no_producer()

    def get(self, ref: SampleRef, ring: "BufferRing | None" = None) -> dict[str, "Tensor"]:
        """See FeatureStore.get.

        Raises:
            PeerGone: the process that made it does not answer, or is another one by now.
            ConfigError: the ref is of another kind of store, or the token is wrong.
        """
        return self._peers.ask(ref.store_uri, lambda peer: peer.pull(ref, ring, self._verify))

    def header(self, ref: SampleRef) -> ShardHeader:
        """See FeatureStore.header, and `get`."""
        return self._peers.ask(ref.store_uri, lambda peer: peer.header(ref))

    def read_ref(self, key: str) -> SampleRef:
        """See FeatureStore.read_ref; a key alone does not say which producer has it."""
        raise SampleMissing(key, key)

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete; what went with its producer is gone already."""
        try:
            return self._peers.ask(ref.store_uri, lambda peer: peer.delete(ref))
        except PeerGone:
            return False

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan; this process keeps none."""
        return iter(())

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Swept:  # noqa: ARG002
        """See FeatureStore.sweep; nothing outlives its process."""
        return Swept()

    def health(self) -> StoreHealth:
        """See FeatureStore.health; each producer has a bound of its own."""
        return ENDLESS

    def put_document(self, name: str, data: bytes) -> bool:  # noqa: ARG002
        """See FeatureStore.put_document, and `put`."""
        raise _no_producer()

    def get_document(self, name: str) -> bytes | None:
        """See FeatureStore.get_document."""
        kept = self._documents.get_document(name) if self._documents else None
        found = kept or self._first(lambda peer: peer.document(name))
        if found is not None and kept is None and self._documents:
            self._documents.put_document(name, found)
        return found

    def has_document(self, name: str) -> bool:
        """See FeatureStore.has_document."""
        if self._documents and self._documents.has_document(name):
            return True
        return bool(self._first(lambda peer: peer.has_document(name) or None))

    def delete_document(self, name: str) -> bool:  # noqa: ARG002
        """See FeatureStore.delete_document, and `put`."""
        raise _no_producer()

    def put_assets(self, name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bool:  # noqa: ARG002
        """See FeatureStore.put_assets, and `put`."""
        raise _no_producer()

    def get_assets(self, name: str) -> "tuple[dict[str, Tensor], dict[str, str]] | None":
        """See FeatureStore.get_assets."""
        kept = self._documents.get_assets(name) if self._documents else None
        found = kept or self._first(lambda peer: peer.assets(name))
        if found is not None and kept is None and self._documents:
            self._documents.put_assets(name, *found)
        return found

    def close(self) -> None:
        """Hang up."""
        self._peers.close()
        if self._documents:
            self._documents.close()

    def _first(self, ask: Callable[[Peer], T | None]) -> T | None:
        """What the first producer says that lives and has something to say: the last one that did, if it still does."""
        found, asked = None, set[str]()
        for uri in islice(self._candidates(), _MOST_REFS):
            if uri in asked:
                continue
            asked.add(uri)
            with suppress(PeerGone):
                found = self._peers.ask(uri, ask)
            if found is not None:
                self._last = uri
                return found
        return None

    def _candidates(self) -> Iterator[str]:
        if self._last:
            yield self._last
        yield from self._options.discover()


def _no_producer() -> ConfigError:
    fix = "a producer names the address that it listens on: nccl://HOST:PORT"
    return ConfigError("only producers keep samples", subject="nccl://", fix=fix)
