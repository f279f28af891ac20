"""nccl://HOST:PORT : the store of a producer, which keeps its samples' tensors and listens for those who pull them."""

import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from eaglefeed.access import check_listen, is_loopback, loopback_of
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, SampleMissing, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import StoredShard, StoreHealth, Verify, check_document_name, key_of
from eaglefeed.storage.kept import KeptSamples, own_tensors
from eaglefeed.storage.options import PeerOptions
from eaglefeed.storage.pair_group import Backend
from eaglefeed.storage.pair_host import PairHost
from eaglefeed.storage.peer import PeerStore
from eaglefeed.storage.peer_server import PeerApp
from eaglefeed.storage.serving import HttpServer
from eaglefeed.storage.shard import TensorWriter, decode_tensors, encode_tensors

__all__ = ["KeepingStore"]

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104  compared
_ROOM_S, _STOP_S = 30.0, 1.0
_PAIR_PORTS, _MAX_PORT = 100, 65535
_log = get_logger(__name__)


class KeepingStore(PeerStore):
    """A producer's: what it puts stays in its memory until it is deleted, and dies with it.

    Args:
        address: HOST:PORT to listen on, port 0 for a free one; beyond this machine only with a token. Refs name HOST,
            or this machine's name where it is a wildcard. Pair groups meet at PORT + 100.
        options: all but discover and documents.
        verify: whose digests are checked.
        clock: measures waits and ages.

    Raises:
        ConfigError: it cannot listen there; or `pinned` without CUDA.
    """

    def __init__(
        self,
        address: str,
        options: PeerOptions | None = None,
        *,
        verify: Verify = "always",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(options, verify=verify, clock=clock)
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise ConfigError("no such address", subject=f"nccl://{address}", wanted="nccl://HOST:PORT, or nccl://")
        if self._options.pinned and not torch.cuda.is_available():
            fix = "leave store.peer_pinned out"
            raise ConfigError("page-locked memory needs CUDA", subject="store.peer_pinned", fix=fix)
        self._samples = KeptSamples(f"nccl://{address}", self._options.capacity_bytes, clock)
        self._files: dict[str, bytes | TensorWriter] = {}
        self.uri = f"nccl://{self._listen(match[1], int(match[2]), clock)}"

    def _listen(self, host: str, port: int, clock: Clock) -> str:
        """Begin to serve; returns what refs say behind the scheme."""
        nonce, options, bare = secrets.token_hex(8), self._options, host.strip("[]")
        check_listen(bare, options.token)
        name = socket.gethostname() if bare in _WILDCARDS else host
        _check_name(name.strip("[]"), bare)
        device = torch.device(options.device)
        self._pairs = PairHost(bare, _pair_port(port), _backends(options), device=device, clock=clock)
        app = PeerApp(nonce, self._samples, self._files, self._pairs, device)
        self._server = HttpServer(app.asgi(), token=options.token, clock=clock)
        try:
            self._server.start(bare, port)
        except BaseException:
            self._pairs.close()
            raise
        return f"{name}:{self._server.port}/{nonce}"

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        """See FeatureStore.put: keeps the tensors themselves, to which nobody may write any more; waits for room."""
        own = own_tensors(tensors, pinned=self._options.pinned)
        return self._samples.add(replace(ref, store_uri=self.uri), own, wait_s=_ROOM_S)

    def read_ref(self, key: str) -> SampleRef:
        """See FeatureStore.read_ref."""
        kept = self._samples.get(key)
        if kept is None:
            raise SampleMissing(key, key)
        return kept.ref

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete."""
        return self._samples.pop(key_of(ref)) if ref.store_uri == self.uri else super().delete(ref)

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan: what this process keeps."""
        for kept in self._samples.all():
            yield StoredShard(key_of(kept.ref), kept.ref.stored_bytes, kept.modified_s)

    def wait_for_room(self, timeout_s: float) -> bool:
        """See FeatureStore.wait_for_room: room for a sample as large as the largest so far.

        Raises:
            StorageError: nobody listens any more, so that nobody could read another sample.
        """
        if not self._server.is_alive:
            fix = "start the producer again; its prompts go to others when it ends"
            raise StorageError("what serves its samples has ended", subject=self.uri, fix=fix)
        return self._samples.wait_for_room(timeout_s)

    def health(self) -> StoreHealth:
        """See FeatureStore.health."""
        return StoreHealth(self._samples.free_bytes, self._samples.capacity_bytes)

    def put_document(self, name: str, data: bytes) -> bool:
        """See FeatureStore.put_document: each producer has its own."""
        check_document_name(name)
        if name in self._files:  # the very same object may be
            return False
        return self._files.setdefault(name, data) is data

    def get_document(self, name: str) -> bytes | None:
        """See FeatureStore.get_document."""
        found = self._files.get(name)
        return bytes(encode_tensors(found)) if isinstance(found, TensorWriter) else found

    def has_document(self, name: str) -> bool:
        """See FeatureStore.has_document."""
        return name in self._files

    def delete_document(self, name: str) -> bool:
        """See FeatureStore.delete_document."""
        return self._files.pop(name, None) is not None

    def put_assets(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
        """See FeatureStore.put_assets: keeps copies on the host only of what is on a GPU."""
        check_document_name(name)
        if name in self._files:
            return False
        writer = TensorWriter({key: tensor.detach().cpu() for key, tensor in tensors.items()}, metadata)
        for _ in writer.chunks():
            pass  # each is hashed on the way
        return self._files.setdefault(name, writer) is writer

    def get_assets(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """See FeatureStore.get_assets."""
        data = self.get_document(name)
        return None if data is None else decode_tensors(data, name)

    def close(self) -> None:
        """Stop listening; what is under way is cut in a second, for nobody needs it any more."""
        super().close()
        self._server.stop(_STOP_S)
        self._pairs.close()


def _check_name(name: str, host: str) -> None:
    """Check that trainers of other machines, to whom refs carry the name, would not look for it on their own."""
    address = name if is_loopback(name) else loopback_of(name)
    if not address or is_loopback(host):  # it was said to be for this machine alone
        return
    fix = "name the address that trainers reach, nccl://ADDRESS:PORT, or mend this machine's name in /etc/hosts"
    if host in _WILDCARDS and address != name:  # it does listen there, and others may know the name better
        _log.warning("refs_name_a_loopback_address", name=name, address=address, fix=fix)
        return
    wanted = "an address of this machine that others reach"
    raise ConfigError("trainers elsewhere would not find it", subject=name, wanted=wanted, got=address, fix=fix)


def _backends(options: PeerOptions) -> tuple[Backend, ...]:
    if options.data_plane == "auto":
        return ("nccl",) if options.device.startswith("cuda") else ()
    return () if options.data_plane == "http" else (options.data_plane,)


def _pair_port(port: int) -> int:
    return port + _PAIR_PORTS if 0 < port <= _MAX_PORT - _PAIR_PORTS else 0
