"""Who takes part: memmove, safetensors' own functions, our store, and the peers; each stores one sample in one folder.

A side times its own calls, in the process that does the work. What it put is written back and dropped from the page
cache by `make_cold`, so that the next get reads the device.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eaglefeed.bench.partners import Partner
from eaglefeed.bench.storage_samples import Sample
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import EaglefeedError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import Durability, open_store, shard_key
from eaglefeed.storage.buffers import BufferRing

__all__ = ["OurSide", "PeerSide", "SafetensorsSide", "Side", "make_cold", "move"]


class Side(Protocol):
    """A store with the same sample under any number. Times are in seconds."""

    name: str
    folder: Path

    def put(self, number: int) -> float:
        """Store the sample."""
        ...

    def get(self, number: int, *, check: bool = False) -> float:
        """Bring it into memory; with `check`, compare it afterwards with what was put."""
        ...

    def drop(self, number: int) -> None:
        """Remove it."""
        ...

    def fill(self, start: int, end: int) -> None:
        """Add empty files with the names of the samples of these numbers."""
        ...


def make_cold(folder: Path) -> None:
    """Write the files of a folder back, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def move(tensors: Mapping[str, Tensor], ring: BufferRing) -> Tensor:
    """Copy the tensors' bytes, one after the other, into a buffer of the ring."""
    buffer = ring.take(sum(tensor.nbytes for tensor in tensors.values()), "memmove")
    position = buffer.data_ptr()
    for tensor in tensors.values():
        ctypes.memmove(position, tensor.data_ptr(), tensor.nbytes)
        position += tensor.nbytes
    return buffer


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check(name: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for feature, tensor in wanted.items():
        if not torch.equal(_as_bytes(found[feature]), _as_bytes(tensor)):
            raise EaglefeedError(f"{feature} is not what was put", subject=name)


class OurSide:
    """Our store.

    Args:
        folder: its root.
        sample: is encoded once; `last_ref` is its ref as last put.
        ring: where gets go; fresh memory without it.
        durability: see `open_store`.
        name: how readings call it.
    """

    def __init__(
        self,
        folder: Path,
        sample: Sample,
        ring: BufferRing | None,
        *,
        durability: Durability = "none",
        name: str = "eaglefeed",
    ) -> None:
        self.name, self.folder, self._sample, self._ring = name, folder, sample, ring
        self._store = open_store(f"file://{folder}", durability=durability, verify="always")
        self._tensors, self._refs = sample.encode(), dict[int, SampleRef]()

    @property
    def last_ref(self) -> SampleRef:
        """The ref of the sample that was put last and is still there."""
        return list(self._refs.values())[-1]

    def put(self, number: int) -> float:
        """See Side.put."""
        start_s = SYSTEM_CLOCK.monotonic()
        self._refs[number] = self._store.put(self._sample.numbered(number), self._tensors)
        return SYSTEM_CLOCK.monotonic() - start_s

    def get(self, number: int, *, check: bool = False) -> float:
        """See Side.get."""
        ref, start_s = self._refs[number], SYSTEM_CLOCK.monotonic()
        found = self._store.get(ref, self._ring)
        took_s = SYSTEM_CLOCK.monotonic() - start_s
        if check:
            _check(self.name, found, self._tensors)
        return took_s

    def drop(self, number: int) -> None:
        """See Side.drop."""
        self._store.delete(self._refs.pop(number))

    def fill(self, start: int, end: int) -> None:
        """See Side.fill."""
        for number in range(start, end):
            path = self.folder / shard_key(f"s-{number}", 1)
            path.parent.mkdir(exist_ok=True)
            path.touch()

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class SafetensorsSide:
    """save_file and load_file of safetensors; what load_file maps is copied into a warm buffer."""

    name = "safetensors"

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], ring: BufferRing) -> None:
        self.folder, self._tensors, self._ring = folder, dict(tensors), ring

    def _path(self, number: int) -> Path:
        return self.folder / f"s-{number}.safetensors"

    def put(self, number: int) -> float:
        """See Side.put."""
        start_s = SYSTEM_CLOCK.monotonic()
        save_file(self._tensors, self._path(number))
        return SYSTEM_CLOCK.monotonic() - start_s

    def get(self, number: int, *, check: bool = False) -> float:
        """See Side.get."""
        start_s = SYSTEM_CLOCK.monotonic()
        found = load_file(self._path(number))
        move(found, self._ring)
        took_s = SYSTEM_CLOCK.monotonic() - start_s
        if check:
            _check(self.name, found, self._tensors)
        return took_s

    def drop(self, number: int) -> None:
        """See Side.drop."""
        self._path(number).unlink()

    def fill(self, start: int, end: int) -> None:
        """See Side.fill."""
        for number in range(start, end):
            self._path(number).touch()


class PeerSide:
    """A peer's store, in a process of its own that serves it; see `peers/store_protocol.py`."""

    def __init__(self, name: str, folder: Path, partner: Partner) -> None:
        self.name, self.folder, self._partner = name, folder, partner

    def put(self, number: int) -> float:
        """See Side.put."""
        return self._ask("put", number=number)

    def get(self, number: int, *, check: bool = False) -> float:
        """See Side.get."""
        return self._ask("get", number=number, check=check)

    def drop(self, number: int) -> None:
        """See Side.drop."""
        self._ask("drop", number=number)

    def fill(self, start: int, end: int) -> None:
        """See Side.fill."""
        self._ask("fill", start=start, end=end)

    def _ask(self, operation: str, **words: object) -> float:
        return float(self._partner.ask(op=operation, **words)["took_s"])
