"""Work on open files: whole writes straight from tensors, reads into given memory, what the file system is."""

import ctypes
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from eaglefeed.errors import ConfigError, SampleCorrupt
from eaglefeed.storage.header import HEADER_READ_BYTES, ShardHeader, header_bytes, parse_header

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.base import Durability
    from eaglefeed.storage.shard import TensorReader, TensorWriter

__all__ = [
    "IN_MEMORY",
    "at_home",
    "check_digests",
    "file_system",
    "read_header",
    "read_tensors",
    "sync",
    "write_at",
    "write_tensors",
]

# File systems by statfs' f_type (linux/magic.h).
IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
# Elsewhere posix_fallocate writes a byte a block instead (NFS before 4.2), or gains nothing (tmpfs).
_PREALLOCATING = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs"}

_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
_READ_BYTES = 2 * 2**20  # of a network file system each read is a wait


def at_home(path: str | Path) -> Path:
    """The path, a ~ at its beginning filled in.

    Raises:
        ConfigError: there is no such user, or this one has no home, as in a container under a number of its own.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        fix = "write the path in full, or set the variable HOME; the default target's place is target.cache_dir"
        raise ConfigError("there is no such home folder", subject=str(path), fix=fix) from None


def file_system(fd: int) -> int:
    """The statfs type of the file system that an open file lies on; 0 if it cannot be told."""
    answer = ctypes.create_string_buffer(256)  # struct statfs takes 120 bytes; f_type is its first word
    if _LIBC.fstatfs(fd, answer):
        return 0
    return ctypes.c_long.from_buffer(answer).value


def write_at(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of it there."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, position)
        rest, position = rest[done:], position + done


def write_tensors(fd: int, writer: "TensorWriter", durability: "Durability") -> None:
    """Write a whole tensor file: data first, then the header that tells the digests of what went by."""
    # Begun early, most of the way to the device is behind us when the sync at the end waits for it: 1.4 times as fast.
    start_writeback = getattr(_LIBC, "sync_file_range", None) if durability != "none" else None
    if file_system(fd) in _PREALLOCATING and writer.file_bytes:
        _allocate(fd, writer.file_bytes)
    position = writer.data_start
    for chunk in writer.chunks():
        write_at(fd, chunk, position)
        if start_writeback:
            start_writeback(fd, ctypes.c_int64(position), ctypes.c_int64(len(chunk)), _SYNC_FILE_RANGE_WRITE)
        position += len(chunk)
    write_at(fd, writer.header(), 0)


def _allocate(fd: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:  # musl does not emulate what ext3, or a mount below this one, lacks
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def sync(fd: int, durability: "Durability") -> None:
    """Have a file's bytes on the device, as the policy wants it."""
    if durability == "full":
        os.fsync(fd)
    elif durability == "data":
        os.fdatasync(fd)


def read_header(fd: int, file_bytes: int, name: str) -> ShardHeader:
    """Read a header with one small read, or two if it is a long one.

    Raises:
        SampleCorrupt: see parse_header.
    """
    start = os.pread(fd, HEADER_READ_BYTES, 0)
    wanted = header_bytes(start, file_bytes, name)
    if wanted > len(start):
        start = os.pread(fd, wanted, 0)
    return parse_header(start, file_bytes, name)


def check_digests(fd: int, header: ShardHeader, name: str) -> None:
    """Read a file's data, and hold it against the digests in its header, without torch.

    Raises:
        SampleCorrupt: the file has become shorter, or a digest differs.
    """
    for (key, digest), tensor in zip(header.digests(name).items(), header.tensors.values(), strict=True):
        found, position = xxhash.xxh3_128(), tensor.begin
        while position < tensor.end:
            piece = os.pread(fd, min(_READ_BYTES, tensor.end - position), position)
            if not piece:
                raise SampleCorrupt(name, "cut short while it was read", wanted=header.file_bytes, got=position)
            found.update(piece)
            position += len(piece)
        if found.hexdigest() != digest:
            raise SampleCorrupt(name, f"checksum of {key} differs", wanted=digest, got=found.hexdigest())


def read_tensors(fd: int, header: ShardHeader, memory: memoryview, reader: "TensorReader") -> "dict[str, Tensor]":
    """Fill the reader's memory with the file's data, each piece hashed while it is in the cache.

    Unlike a mapping, this cannot be killed by a file that is cut meanwhile, and keeps nothing of it.

    Raises:
        SampleCorrupt: the file has become shorter, or a digest differs.
    """
    done = 0
    while done < len(memory):
        got = os.preadv(fd, [memory[done : done + _READ_BYTES]], header.data_start + done)
        if not got:
            wanted = f"{len(memory)} bytes of data"
            raise SampleCorrupt(reader.name, "cut short while it was read", wanted=wanted, got=done)
        done += got
        reader.advance(done)
    return reader.tensors()
