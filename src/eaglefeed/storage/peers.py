"""The producers that a process pulls samples from, and what is said to one of them."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from eaglefeed.access import is_loopback
from eaglefeed.clock import Clock
from eaglefeed.errors import (
    ConfigError,
    EaglefeedError,
    PeerGone,
    SampleCorrupt,
    SampleMissing,
    StorageError,
    TargetError,
)
from eaglefeed.schema.protocol import FILE_BYTES_HEADER, HEALTH
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import Verify, check_document_name, is_verified, key_of
from eaglefeed.storage.buffers import BufferRing, memory_for
from eaglefeed.storage.control import ControlClient, Refused
from eaglefeed.storage.exchange import Answer, TensorExchange
from eaglefeed.storage.header import ShardHeader, check_header, parse_header
from eaglefeed.storage.options import PeerOptions
from eaglefeed.storage.pair_pool import PairPool
from eaglefeed.storage.shard import ShardReader, in_order

__all__ = ["Peer", "Peers"]

T = TypeVar("T")

_URI = re.compile(r"nccl://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})/([0-9a-f]{16})")
_CALL_S, _PULL_S, _FILE_S = 5.0, 60.0, 300.0
_MAX_PAIRS = 2
_GONE_S, _MAX_GONE_S = 5.0, 60.0
_WAITS = 3
"""How many times as long as it took to find out that a producer is gone it is not asked again."""
_MAX_PEERS = 256
_ELSEWHERE = (
    "its ref names this machine alone: a producer of another machine is to name an address that trainers reach, "
    "eaglefeed produce --store nccl://ADDRESS:PORT"
)
_MAX_DOCUMENT_BYTES, _MAX_ASSETS_BYTES = 2**20, 2**40


class Peer:
    """A producer's process that keeps samples.

    Args:
        uri: nccl://HOST:PORT/NONCE.
        options: token, data_plane and device.

    Raises:
        ConfigError: no such address.
    """

    def __init__(self, uri: str, options: PeerOptions) -> None:
        match = _URI.fullmatch(uri)
        if match is None:
            fix = "start this process with the store that the run's producers have"
            raise ConfigError("the sample lies in another kind of store", subject=uri, wanted="nccl://", fix=fix)
        self.uri, self._nonce = uri, match[3]
        self._client = ControlClient(f"http://{match[1]}:{match[2]}", token=options.token, unavailable=PeerGone)
        self._pool = _pool(self._client, options)
        self._exchange = TensorExchange(self._client, self._pool)

    def pull(self, ref: SampleRef, ring: BufferRing | None, verify: Verify) -> dict[str, Tensor]:
        """A sample's tensors; see FeatureStore.get."""
        key, name = key_of(ref), ref.sample_id
        opened = self._exchange.open(
            f"/{self._nonce}/samples/{key}",
            method="GET",
            timeout_s=_PULL_S,
            subject=name,
            max_bytes=ref.stored_bytes,
        )
        with self._answering(name, key), opened as answer:
            return _read(answer, ref, ring, verify)

    def header(self, ref: SampleRef) -> ShardHeader:
        """A sample's header; see FeatureStore.header."""
        with self._answering(ref.sample_id, key := key_of(ref)):
            reply = self._client.call(f"/{self._nonce}/headers/{key}", method="GET", timeout_s=_CALL_S)
        try:
            file_bytes = int(reply.headers[FILE_BYTES_HEADER])
        except (KeyError, ValueError):
            raise SampleCorrupt(ref.sample_id, "a header of a file of unknown size", got=self.uri) from None
        return parse_header(reply.body, file_bytes, ref.sample_id)

    def delete(self, ref: SampleRef) -> bool:
        """Let the producer keep a sample no longer; False if it did not any more."""
        try:
            with self._answering(ref.sample_id, key := key_of(ref)):
                self._client.call(f"/{self._nonce}/samples/{key}", method="DELETE", timeout_s=_CALL_S)
        except SampleMissing:
            return False
        return True

    def has_document(self, name: str) -> bool:
        """Whether the producer has a file of the run; hangs up before it is sent."""
        try:
            with self._answering(name, name), self._client.open(self._path(name), method="GET", timeout_s=_CALL_S):
                return True
        except SampleMissing:
            return False

    def document(self, name: str) -> bytes | None:
        """A file of the run; None if the producer has none of that name."""
        try:
            with self._answering(name, name):
                reply = self._client.call(
                    self._path(name), method="GET", timeout_s=_CALL_S, max_bytes=_MAX_DOCUMENT_BYTES
                )
        except SampleMissing:
            return None
        return reply.body

    def assets(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Tensors and metadata of a file of the run; None if the producer has none of that name."""
        try:
            with self._answering(name, name):
                found = self._client.fetch(
                    self._path(name), method="GET", timeout_s=_FILE_S, subject=name, max_bytes=_MAX_ASSETS_BYTES
                )
        except SampleMissing:
            return None
        return found.tensors, found.metadata

    def close(self) -> None:
        """Hang up."""
        if self._pool is not None:
            self._pool.close()
        self._client.close()

    def _path(self, name: str) -> str:
        check_document_name(name)
        return f"/{self._nonce}/documents/{name}"

    @contextmanager
    def _answering(self, subject: str, key: str) -> Iterator[None]:
        """Around one exchange about what lies at `key`: what is said there as an error of a store."""
        try:
            yield
        except Refused as refused:
            raise self._meaning(refused.error, subject, key) from None
        except SampleCorrupt as error:
            if self._is_itself():
                raise
            raise self._somebody_else(error) from None

    def _meaning(self, error: EaglefeedError, subject: str, key: str) -> EaglefeedError:
        if isinstance(error, SampleMissing):
            return SampleMissing(subject, key)
        if isinstance(error, StorageError):
            return error
        if not self._is_itself() or not isinstance(error, ConfigError | TargetError):
            return self._somebody_else(error)
        return (
            error if isinstance(error, ConfigError) else StorageError("its producer failed", subject=subject, got=error)
        )

    def _somebody_else(self, error: EaglefeedError) -> PeerGone:
        return PeerGone("its producer does not answer there any more", subject=self.uri, got=error)

    def _is_itself(self) -> bool:
        """Whether it is the very process; it tells everybody, so that a wrong token is not taken for its death."""
        try:
            reply = self._client.call(HEALTH, method="GET", timeout_s=_CALL_S)
            return bool(json.loads(reply.body)["instance"] == self._nonce)
        except (Refused, PeerGone, ValueError, TypeError, KeyError):
            return False


def _pool(client: ControlClient, options: PeerOptions) -> PairPool | None:
    """Pair groups with a producer; None where samples come in the body."""
    device = torch.device(options.device)
    plane = options.data_plane
    if plane == "auto":
        plane = "nccl" if device.type == "cuda" else "http"
    if plane == "http":
        return None
    place = device if plane == "nccl" else torch.device("cpu")
    return PairPool(client, backend=plane, device=place, max_pairs=_MAX_PAIRS, timeout_s=_PULL_S)


def _read(answer: Answer, ref: SampleRef, ring: BufferRing | None, verify: Verify) -> dict[str, Tensor]:
    """A shard's tensors, checked against its ref; what comes over nccl is in memory of the GPU."""
    if answer.is_on_device:
        check_header(answer.header, ref)
        hashed = is_verified(verify, ref.sample_id)
        return in_order(ref, answer.read_on_device(ref.sample_id, hashed=hashed))
    memory = memory_for(answer.num_bytes, ring, ref.sample_id)
    try:
        reader = ShardReader(ref, answer.header, memory, verify)
        answer.read(memory, reader.advance)
        return reader.tensors()
    except BaseException:
        memory.release()  # or whoever keeps the error would keep a buffer of the ring
        raise


def _again(error: PeerGone, fix: str) -> PeerGone:
    return PeerGone(error.what, subject=error.subject, wanted=error.wanted, got=error.got, fix=fix)


class _Gone(NamedTuple):
    until_s: float
    error: PeerGone


class Peers:
    """The producers that this process knows; one that is gone is not asked again for some seconds.

    Args:
        options: token, data_plane and device.
        clock: measures those seconds.
    """

    def __init__(self, options: PeerOptions, clock: Clock) -> None:
        self._options, self._clock = options, clock
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._gone: OrderedDict[str, _Gone] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, uri: str, question: Callable[[Peer], T]) -> T:
        """What the producer at `uri` answers.

        Raises:
            PeerGone: nobody, or another process, answers there, or did not a moment ago.
            ConfigError: no address of a producer, or a wrong token.
        """
        peer, started_s = self._open(uri), self._clock.monotonic()
        try:
            return question(peer)
        except PeerGone as error:
            told = _again(error, _ELSEWHERE) if is_loopback(urlsplit(uri).hostname or "") else error
            self._drop(uri, told, self._clock.monotonic() - started_s)
            raise told from None

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    def _open(self, uri: str) -> Peer:
        left, now_s = list[Peer](), self._clock.monotonic()
        with self._lock:
            if uri in self._gone:
                if now_s < self._gone[uri].until_s:
                    known = self._gone[uri].error
                    raise _again(known, known.fix)
                del self._gone[uri]
            if uri not in self._peers:
                self._peers[uri] = Peer(uri, self._options)
            self._peers.move_to_end(uri)
            while len(self._peers) > _MAX_PEERS:
                left.append(self._peers.popitem(last=False)[1])
            peer = self._peers[uri]
        for old in left:
            old.close()
        return peer

    def _drop(self, uri: str, error: PeerGone, took_s: float) -> None:
        """Others must not starve behind one that costs its whole timeout each time that it is asked."""
        pause_s = max(_GONE_S, min(_WAITS * took_s, _MAX_GONE_S))
        with self._lock:
            peer = self._peers.pop(uri, None)
            self._gone[uri] = _Gone(self._clock.monotonic() + pause_s, error)
            while len(self._gone) > _MAX_PEERS:
                self._gone.popitem(last=False)
        if peer:
            peer.close()
