"""file:// : a folder that producers and trainers share. shm:// : the same in this host's memory, under /dev/shm.

root/contract.json  root/target_assets.safetensors     files of the run
root/3f/<sample_id>.<token>.safetensors                 shards, fanned out over 256 folders
root/3f/.tmp-<host>-<pid>-<process start>-<rand>        a write in progress, or what a crash left of one
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, SampleCorrupt, SampleDenied, SampleMissing, StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage import files
from eaglefeed.storage.base import (
    SHARD_KEY,
    Durability,
    FeatureStore,
    StoredShard,
    StoreHealth,
    Swept,
    Verify,
    check_document_name,
    key_of,
)
from eaglefeed.storage.folder import RootFolder
from eaglefeed.storage.header import ShardHeader, keyed_ref

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.buffers import BufferRing

__all__ = ["SharedDirStore"]

T = TypeVar("T")

_SHM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODE_FIX = "let this user read the store: chmod -R a+rX {0}, and a umask of 022 (002 in one group) from now on"
_SHM_ROOT = Path("/dev/shm/eaglefeed")  # noqa: S108  (what shm:// is)


class SharedDirStore(FeatureStore):
    """Shards as files below one root.

    Args:
        root: the folder.
        durability: what `put` waits for; see open_store.
        verify: whose digests `get` checks.
        clock: tells the age of leftovers where the file system, which dates them, does not say what time it has.

    Raises:
        ConfigError: the folder cannot be made or opened.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        durability: Durability = "full",
        verify: Verify = "always",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.root = files.at_home(root).absolute()
        self.uri = f"file://{self.root}"
        self._durability, self._verify, self._clock = durability, verify, clock
        self._folder = RootFolder(self.root, durability)

    @classmethod
    def in_memory(cls, name: str, *, verify: Verify = "always") -> "SharedDirStore":
        """The store shm://name, which processes of this host share until its next boot.

        Raises:
            ConfigError: an impossible name, or there is no /dev/shm.
        """
        if not _SHM_NAME.fullmatch(name):
            raise ConfigError("impossible name", subject=f"shm://{name}", wanted=_SHM_NAME.pattern)
        store = cls(_SHM_ROOT / name, durability="none", verify=verify)
        if not store._folder.in_memory:
            raise ConfigError("no memory file system", subject=str(_SHM_ROOT.parent), fix="use file:// instead")
        store.uri = f"shm://{name}"
        return store

    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """See FeatureStore.put."""
        from eaglefeed.storage.shard import ShardWriter

        folder, name = _split(key_of(ref))
        writer = ShardWriter(replace(ref, store_uri=self.uri), tensors)
        write = partial(files.write_tensors, writer=writer, durability=self._durability)
        if not self._folder.write_once(folder, name, write, writer.file_bytes):
            raise StorageError("written before, shards are never replaced", subject=ref.sample_id, got=name)
        return writer.finish()[0]

    def get(self, ref: SampleRef, ring: "BufferRing | None" = None) -> dict[str, "Tensor"]:
        """See FeatureStore.get."""
        from eaglefeed.storage.buffers import memory_for
        from eaglefeed.storage.shard import ShardReader

        with self._folder.reading(*_split(key_of(ref)), ref.sample_id) as fd:
            size = os.fstat(fd).st_size
            if size != ref.stored_bytes:
                what = "shard of another size"
                raise SampleCorrupt(ref.sample_id, what, wanted=f"{ref.stored_bytes} bytes", got=size)
            header = files.read_header(fd, size, ref.sample_id)
            memory = memory_for(size - header.data_start, ring, ref.sample_id)
            try:
                return files.read_tensors(fd, header, memory, ShardReader(ref, header, memory, self._verify))
            except BaseException:
                memory.release()  # or whoever keeps the error would keep a buffer of the ring
                raise

    def header(self, ref: SampleRef) -> ShardHeader:
        """See FeatureStore.header."""
        with self._folder.reading(*_split(key_of(ref)), ref.sample_id) as fd:
            return files.read_header(fd, os.fstat(fd).st_size, ref.sample_id)

    def read_ref(self, key: str) -> SampleRef:
        """See FeatureStore.read_ref."""
        if not SHARD_KEY.fullmatch(key):
            raise SampleCorrupt(key, "impossible key", wanted="xx/<sample_id>.<token>.safetensors")
        with self._folder.reading(*_split(key), key) as fd:
            return keyed_ref(files.read_header(fd, os.fstat(fd).st_size, key), self.uri, key)

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete."""
        return self._folder.remove(*_split(key_of(ref)), ref.sample_id)

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan."""
        for folder in self._folder.folders():
            for name, info in self._folder.regular_files(folder, SHARD_KEY):
                yield StoredShard(f"{folder}/{name}", info.st_size, info.st_mtime)

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Swept:
        """See FeatureStore.sweep."""
        now_s = self._folder.time() or self._clock.time()
        folders = [".", *self._folder.folders()]
        swept = [self._folder.remove_leftovers(folder, older_than_s, now_s, dry_run=dry_run) for folder in folders]
        return Swept(sum(each.removed for each in swept), sum(each.stuck for each in swept))

    def health(self) -> StoreHealth:
        """See FeatureStore.health."""
        return self._folder.health()

    def probe(self) -> None:
        """See FeatureStore.probe: a write, a sync and a link."""
        self._folder.probe()

    def put_document(self, name: str, data: bytes) -> bool:
        """See FeatureStore.put_document."""
        return self._put_file_of_run(name, lambda fd: files.write_at(fd, data, 0), len(data))

    def get_document(self, name: str) -> bytes | None:
        """See FeatureStore.get_document."""
        return self._get_file_of_run(name, _read_all)

    def has_document(self, name: str) -> bool:
        """See FeatureStore.has_document."""
        check_document_name(name)
        return name in self._folder.names(".")

    def delete_document(self, name: str) -> bool:
        """See FeatureStore.delete_document."""
        check_document_name(name)
        return self._folder.remove(".", name, name)

    def put_assets(self, name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bool:
        """See FeatureStore.put_assets."""
        from eaglefeed.storage.shard import TensorWriter

        writer = TensorWriter(tensors, metadata)
        write = partial(files.write_tensors, writer=writer, durability=self._durability)
        return self._put_file_of_run(name, write, writer.file_bytes)

    def get_assets(self, name: str) -> "tuple[dict[str, Tensor], dict[str, str]] | None":
        """See FeatureStore.get_assets."""
        return self._get_file_of_run(name, lambda fd: _read_assets(fd, name))

    def close(self) -> None:
        """Close the root's handle."""
        self._folder.close()

    def _put_file_of_run(self, name: str, write: Callable[[int], None], num_bytes: int) -> bool:
        check_document_name(name)
        return self._folder.write_once(".", name, write, num_bytes)

    def _get_file_of_run(self, name: str, read: Callable[[int], T]) -> T | None:
        check_document_name(name)
        try:
            with self._folder.reading(".", name, name) as fd:
                return read(fd)
        except SampleMissing:
            return None
        except SampleDenied as error:  # no fault of the sample at hand
            raise ConfigError(error.what, subject=name, got=error.got, fix=_MODE_FIX.format(self.root)) from None


def _split(key: str) -> tuple[str, str]:
    folder, _, name = key.partition("/")
    return folder, name


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb", closefd=False) as file:
        return file.read()


def _read_assets(fd: int, name: str) -> "tuple[dict[str, Tensor], dict[str, str]]":
    from eaglefeed.storage.buffers import fresh_memory
    from eaglefeed.storage.shard import TensorReader, texts_of

    header = files.read_header(fd, os.fstat(fd).st_size, name)
    memory = fresh_memory(header.file_bytes - header.data_start)
    return files.read_tensors(fd, header, memory, TensorReader(header, memory, name)), texts_of(header)
