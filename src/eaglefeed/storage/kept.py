"""The samples that a producer keeps in its memory, within a bound, until nobody needs them any more."""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.clock import Clock
from eaglefeed.errors import SchemaError, StorageError, StoreFull
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import key_of
from eaglefeed.storage.shard import ShardWriter

__all__ = ["Kept", "KeptSamples", "own_tensors"]

_POLL_S = 0.02
_FULL = "store.peer_bytes reached, and no trainer committed a sample"
_FULL_FIX = "train on more ranks, commit more often, raise store.peer_bytes, or start more producers"
_LARGE_FIX = "raise store.peer_bytes, or lower feed.max_length; then requeue its prompt"


def own_tensors(tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    """Dense tensors that keep nothing else alive: the same ones, or copies of those that are parts of something.

    Args:
        tensors: nobody writes to them any more.
        pinned: copy all of them to page-locked host memory.
    """
    return {name: _pinned(tensor) if pinned else _dense(tensor.detach()) for name, tensor in tensors.items()}


def _dense(tensor: Tensor) -> Tensor:
    found = tensor.contiguous()
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())


class Kept(NamedTuple):
    """A sample: its tensors as a file in the making, the ref that names it, and when it came, seconds since the epoch.

    The writer has hashed them already.
    """

    writer: ShardWriter
    ref: SampleRef
    modified_s: float


class KeptSamples:
    """A bounded table of samples by key.

    Args:
        name: of the store, for errors.
        capacity_bytes: of all samples, as they would be stored.
        clock: measures the wait for room.
    """

    def __init__(self, name: str, capacity_bytes: int, clock: Clock) -> None:
        self._name, self.capacity_bytes, self._clock = name, capacity_bytes, clock
        self._samples: dict[str, Kept | None] = {}
        self._lock = threading.Lock()
        self._used_bytes = self._largest_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What is left of the bound."""
        return self.capacity_bytes - self._used_bytes

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether a sample as large as the largest so far has room, within `timeout_s`."""
        deadline_s = self._clock.monotonic() + timeout_s
        while self._largest_bytes > self.free_bytes:
            if self._clock.monotonic() >= deadline_s:
                return False
            self._clock.sleep(_POLL_S)
        return True

    def add(self, ref: SampleRef, tensors: Mapping[str, Tensor], *, wait_s: float) -> SampleRef:
        """Hash and keep a sample; returns its ref with checksums and stored_bytes.

        Args:
            ref: its store_uri filled in.
            tensors: of `own_tensors`.
            wait_s: for room.

        Raises:
            StoreFull: no sample went in that time.
            SchemaError: it is larger than the bound, and will be so at each attempt.
            StorageError: its key is taken.
        """
        key, writer = key_of(ref), ShardWriter(ref, tensors)
        self._reserve(key, writer.file_bytes, ref, wait_s)
        try:
            for _ in writer.chunks():
                pass  # each is hashed on the way
            stored, _ = writer.finish()
        except BaseException:
            self._release(key, writer.file_bytes)
            raise
        self._samples[key] = Kept(writer, stored, self._clock.time())
        return stored

    def get(self, key: str) -> Kept | None:
        """The sample at `key`, if it is kept."""
        return self._samples.get(key)

    def pop(self, key: str) -> bool:
        """Keep the sample at `key` no longer; False if it was not. Whoever is sent it now still gets all of it."""
        kept = self._samples.get(key)
        return kept is not None and self._release(key, kept.writer.file_bytes)

    def all(self) -> list[Kept]:
        """Every whole sample."""
        with self._lock:
            return [kept for kept in self._samples.values() if kept is not None]

    def _reserve(self, key: str, num_bytes: int, ref: SampleRef, wait_s: float) -> None:
        if num_bytes > self.capacity_bytes:
            wanted, what = f"at most {self.capacity_bytes} bytes", "larger than all that a producer keeps"
            raise SchemaError(what, subject=ref.sample_id, wanted=wanted, got=num_bytes, fix=_LARGE_FIX)
        deadline_s = self._clock.monotonic() + wait_s
        while True:
            with self._lock:
                if key in self._samples:
                    raise StorageError("written before, shards are never replaced", subject=ref.sample_id, got=key)
                if num_bytes <= self.free_bytes:
                    self._samples[key] = None
                    self._used_bytes += num_bytes
                    self._largest_bytes = max(self._largest_bytes, num_bytes)
                    return
            if self._clock.monotonic() >= deadline_s:
                free = self.free_bytes
                raise StoreFull(self._name, num_bytes=num_bytes, free_bytes=free, reason=_FULL, fix=_FULL_FIX)
            self._clock.sleep(_POLL_S)

    def _release(self, key: str, num_bytes: int) -> bool:
        with self._lock:
            if key not in self._samples:
                return False
            del self._samples[key]
            self._used_bytes -= num_bytes
            return True
