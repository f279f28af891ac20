"""file:// : a folder that producers and trainers share.

root/contract.json  root/target_assets.safetensors     files of the run
root/3f/<sample_id>.<token>.safetensors                 shards, fanned out over 256 folders
root/3f/.tmp-<host>-<pid>-…                             a write in progress, or what a crash left of one
"""

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eaglefeed.errors import ConfigError, SampleCorrupt, SampleMissing, StorageError, StoreFull
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import FeatureStore, StoredShard, StoreHealth
from eaglefeed.storage.header import HEADER_READ_BYTES, ShardHeader, parse_header

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedDirStore"]

_KEY = re.compile(r"[0-9a-f]{2}/[A-Za-z0-9][A-Za-z0-9._-]*\.[0-9]+\.safetensors")
_DOCUMENT = re.compile(r"[a-z][a-z0-9_]*\.(json|safetensors)")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]


class SharedDirStore(FeatureStore):
    """Shards as files below one root; symbolic links below it are never followed.

    Raises:
        ConfigError: the folder cannot be made or opened.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.uri = f"file://{self.root}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._root_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError("cannot be used as a store", subject=str(self.root), got=error.strerror) from None

    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """See FeatureStore.put; whole and on disk (file and folder synced) when it returns."""
        from eaglefeed.storage.shard import encode_shard

        folder, name = self._split(ref)
        ref, data = encode_shard(replace(ref, store_uri=self.uri), tensors)
        with self._translated(ref.sample_id, len(data)), self._folder(folder, create=True) as folder_fd:
            if not self._write_once(folder_fd, name, data):
                raise StorageError("written before, shards are never replaced", subject=ref.sample_id, got=name)
        return ref

    def get(self, ref: SampleRef) -> dict[str, "Tensor"]:
        """See FeatureStore.get."""
        from eaglefeed.storage.shard import decode_shard

        return decode_shard(ref, self._read_shard(ref))

    def header(self, ref: SampleRef) -> ShardHeader:
        """See FeatureStore.header."""
        folder, name = self._split(ref)
        with self._opened(folder, name, ref.sample_id) as fd:
            return parse_header(os.pread(fd, HEADER_READ_BYTES, 0), os.fstat(fd).st_size, ref.sample_id)

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete."""
        folder, name = self._split(ref)
        try:
            with self._folder(folder) as folder_fd:
                os.unlink(name, dir_fd=folder_fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed(ref.sample_id, "cannot be deleted", error) from None
        return True

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan."""
        for folder in sorted(os.listdir(self._root_fd)):
            if not re.fullmatch(r"[0-9a-f]{2}", folder):
                continue
            with self._folder(folder) as folder_fd:
                for name in sorted(os.listdir(folder_fd)):
                    if not _KEY.fullmatch(f"{folder}/{name}"):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        info = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            yield StoredShard(f"{folder}/{name}", info.st_size, info.st_mtime)

    def health(self) -> StoreHealth:
        """See FeatureStore.health."""
        info = os.statvfs(self._root_fd)
        return StoreHealth(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)

    def put_document(self, name: str, data: bytes) -> bool:
        """See FeatureStore.put_document."""
        self._check_document(name)
        with self._translated(name, len(data)):
            return self._write_once(self._root_fd, name, data)

    def get_document(self, name: str) -> bytes | None:
        """See FeatureStore.get_document."""
        self._check_document(name)
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=self._root_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(name, "cannot be read", error) from None
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def has_document(self, name: str) -> bool:
        """See FeatureStore.has_document."""
        self._check_document(name)
        return name in os.listdir(self._root_fd)

    def close(self) -> None:
        """Close the root's handle."""
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    def _split(self, ref: SampleRef) -> tuple[str, str]:
        keys = set(ref.feature_keys.values())
        key = keys.pop() if len(keys) == 1 else ""
        if not _KEY.fullmatch(key):
            got = sorted(set(ref.feature_keys.values()))
            wanted = "one key for all features, xx/<sample_id>.<token>.safetensors"
            raise SampleCorrupt(ref.sample_id, "impossible key", wanted=wanted, got=got)
        folder, _, name = key.partition("/")
        return folder, name

    def _check_document(self, name: str) -> None:
        if not _DOCUMENT.fullmatch(name):
            raise StorageError("impossible name for a file of the run", subject=name, wanted=_DOCUMENT.pattern)

    @contextlib.contextmanager
    def _folder(self, name: str, *, create: bool = False) -> Iterator[int]:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o777, dir_fd=self._root_fd)
                os.fsync(self._root_fd)
        fd = os.open(name, _DIR_FLAGS, dir_fd=self._root_fd)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self, folder: str, name: str, sample_id: str) -> Iterator[int]:
        try:
            with self._folder(folder) as folder_fd:
                fd = os.open(name, _READ_FLAGS, dir_fd=folder_fd)
        except FileNotFoundError:
            raise SampleMissing(sample_id, f"{folder}/{name}") from None
        except OSError as error:
            raise self._failed(sample_id, f"{folder}/{name} cannot be opened as uid {os.getuid()}", error) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SampleCorrupt(sample_id, "no regular file", got=f"{folder}/{name}")
            yield fd
        finally:
            os.close(fd)

    def _read_shard(self, ref: SampleRef) -> bytearray:
        folder, name = self._split(ref)
        with self._opened(folder, name, ref.sample_id) as fd:
            size = os.fstat(fd).st_size
            if size != ref.stored_bytes:
                what = "shard of another size"
                raise SampleCorrupt(ref.sample_id, what, wanted=f"{ref.stored_bytes} bytes", got=size)
            data = bytearray(size)
            try:
                done = _read_into(fd, memoryview(data))
            except OSError as error:
                raise self._failed(ref.sample_id, f"{folder}/{name} cannot be read", error) from None
        if done != size:
            raise SampleCorrupt(ref.sample_id, "cut short while it was read", wanted=f"{size} bytes", got=done)
        return data

    def _write_once(self, folder_fd: int, name: str, data: bytes) -> bool:
        """Write a file whole and synced, unless there is one of that name."""
        with self._temporary(folder_fd, data) as temporary:
            try:  # link, unlike rename, never replaces what another process wrote first
                os.link(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except FileExistsError:
                return False
        os.fsync(folder_fd)
        return True

    @contextlib.contextmanager
    def _temporary(self, folder_fd: int, data: bytes) -> Iterator[str]:
        name = f".tmp-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=folder_fd)
        try:
            try:
                _write_all(fd, memoryview(data))
                os.fsync(fd)
            finally:
                os.close(fd)
            yield name
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder_fd)

    @contextlib.contextmanager
    def _translated(self, subject: str, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NO_ROOM:
                free = self.health().free_bytes
                reason = os.strerror(error.errno)
                raise StoreFull(self.uri, num_bytes=num_bytes, free_bytes=free, reason=reason) from None
            raise self._failed(subject, "cannot be written", error) from None

    def _failed(self, subject: str, what: str, error: OSError) -> StorageError:
        fix = "check the folder's owner, mode and file system"
        return StorageError(f"{what} in {self.root}", subject=subject, got=error.strerror, fix=fix)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_into(fd: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data[done : done + 8 * 2**20]], done)
        if not got:
            break
        done += got
    return done
