"""A folder whose files are reached through its handle alone; what the system says of them becomes a storage error."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eaglefeed.errors import ConfigError, SampleCorrupt, SampleDenied, SampleMissing, StorageError, StoreFull
from eaglefeed.logs import get_logger
from eaglefeed.storage import files
from eaglefeed.storage.base import StoreHealth, Swept
from eaglefeed.storage.probing import UNSUPPORTED, probe_folder
from eaglefeed.storage.temporaries import is_leftover, temporary

if TYPE_CHECKING:
    from eaglefeed.storage.base import Durability

__all__ = ["RootFolder"]

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SHARE_FIX = "give all who write here one group, setgid folders and umask 002"
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_MEMORY_FIX = "raise its size (shm_size in docker compose, --shm-size of docker run), or lower queue.high_bytes"

log = get_logger(__name__)


class RootFolder:
    """The root of a store and the folders in it; symbolic links below it are never followed.

    Args:
        path: where it lies; made if need be.
        durability: what a write waits for; see open_store.

    Attributes:
        in_memory: it lies in a memory file system.

    Raises:
        ConfigError: it cannot be made or opened.
    """

    def __init__(self, path: Path, durability: "Durability") -> None:
        self.path, self._durability = path, durability
        self._durable_folders, self._told_of_folders = {"."}, False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            got = f"{error.strerror}{_barrier(path)} for uid {os.geteuid()}" if error.errno == errno.EACCES else ""
            raise ConfigError("cannot be used as a store", subject=str(path), got=got or error.strerror) from None
        self.in_memory = files.file_system(self._fd) in files.IN_MEMORY

    def close(self) -> None:
        """Close the handle."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def health(self) -> StoreHealth:
        """Free and total bytes.

        Raises:
            StorageError: the file system does not say.
        """
        try:
            info = os.statvfs(self._fd)
        except OSError as error:
            raise self._failed(".", "its room cannot be asked for", error) from None
        return StoreHealth(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)

    def time(self) -> float | None:
        """Seconds since the epoch by the clock of whoever dates the files; None where none can be made."""
        with contextlib.suppress(OSError), self._opened_folder(".") as fd, temporary(fd, os.utime) as made:
            return os.stat(made, dir_fd=fd, follow_symlinks=False).st_mtime
        return None

    def folders(self) -> list[str]:
        """The folders that shards are fanned out over."""
        return [name for name in self.names(".") if _FAN_OUT.fullmatch(name)]

    def names(self, folder: str) -> list[str]:
        """What lies in a folder ("." is the root)."""
        with self._listing(folder) as fd:
            return sorted(os.listdir(fd))

    def regular_files(self, folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
        """The files in a folder whose folder/name fits the pattern."""
        with self._listing(folder) as fd:
            for name in sorted(os.listdir(fd)):
                if pattern.fullmatch(f"{folder}/{name}"):
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            yield name, info

    def write_once(self, folder: str, name: str, write: Callable[[int], None], num_bytes: int) -> bool:
        """Write a file whole or not at all, under a name that nobody has used; False if one has.

        Raises:
            StoreFull: no room.
            StorageError: the write failed.
        """
        with self._translated(folder, name, num_bytes):
            self._check_room(num_bytes)
            self._make_folder(folder)
            return self._write_into(folder, name, write)

    def probe(self) -> None:
        """See probe_folder."""
        probe_folder(self._fd, self.path, self._durability)

    def _make_folder(self, folder: str) -> None:
        try:
            os.mkdir(folder, 0o777, dir_fd=self._fd)
        except FileExistsError:
            if folder in self._durable_folders:
                return
        if self._durability == "full":  # also one that is there: whoever made it may not have come this far
            self._sync_folder(self._fd)
        self._durable_folders.add(folder)

    def _write_into(self, folder: str, name: str, write: Callable[[int], None]) -> bool:
        with self._opened_folder(folder) as fd:
            with temporary(fd, lambda file: self._write(file, write)) as made:
                try:  # link, unlike rename, never replaces what another process wrote first
                    os.link(made, name, src_dir_fd=fd, dst_dir_fd=fd)
                except FileExistsError:
                    return False
            self._sync_names(fd, name)
            return True

    @contextlib.contextmanager
    def reading(self, folder: str, name: str, subject: str) -> Iterator[int]:
        """A file's handle; errors of the system within the block are translated too.

        Raises:
            SampleMissing: no such file.
            SampleCorrupt: something else than a file.
            SampleDenied: this user may not read it.
            StorageError: it cannot be read.
        """
        where = f"{folder}/{name}"
        fd = self._open(folder, name, subject)
        try:
            _check_regular(fd, subject)
            yield fd
        except SampleCorrupt as error:
            raise error.found_in(str(self.path / where)) from None
        except OSError as error:
            raise self._failed(subject, f"{where} cannot be read", error) from None
        finally:
            os.close(fd)

    def _open(self, folder: str, name: str, subject: str) -> int:
        where = f"{folder}/{name}"
        try:
            with self._opened_folder(folder) as folder_fd:
                return os.open(name, _READ_FLAGS, dir_fd=folder_fd)
        except FileNotFoundError:
            raise SampleMissing(subject, str(self.path / where)) from None
        except PermissionError as error:
            what = f"{self.path / where} cannot be opened as uid {os.geteuid()}"
            raise SampleDenied(what, subject=subject, got=f"{error.strerror}{self._whose(folder, name)}") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise SampleCorrupt(subject, "a symbolic link", where=str(self.path / where)) from None
            raise self._failed(subject, f"{where} cannot be opened as uid {os.geteuid()}", error) from None

    def _whose(self, folder: str, name: str) -> str:
        is_open = os.access(folder, os.R_OK | os.X_OK, dir_fd=self._fd, effective_ids=True)
        place = f"{folder}/{name}" if is_open else folder
        with contextlib.suppress(OSError):
            return _owner(self.path / place, os.stat(place, dir_fd=self._fd, follow_symlinks=False))
        return ""

    def remove(self, folder: str, name: str, subject: str) -> bool:
        """Delete a file; False if it was gone.

        Raises:
            StorageError: it cannot be deleted.
        """
        try:
            with self._opened_folder(folder) as fd:
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed(subject, f"{folder}/{name} cannot be deleted", error) from None
        return True

    def remove_leftovers(self, folder: str, older_than_s: float, now_s: float, *, dry_run: bool) -> Swept:
        """Delete what crashed writes left in a folder; what cannot be deleted is told, and the others go."""
        removed = stuck = 0
        with self._listing(folder) as fd:
            for name in os.listdir(fd):
                try:
                    if is_leftover(name, fd, older_than_s, now_s):
                        if not dry_run:
                            os.unlink(name, dir_fd=fd)
                        removed += 1
                except FileNotFoundError:  # another sweep was first
                    continue
                except OSError as error:
                    log.warning("temporary_stays", store=str(self.path), name=f"{folder}/{name}", reason=error.strerror)
                    stuck += 1
        return Swept(removed, stuck)

    @contextlib.contextmanager
    def _listing(self, name: str) -> Iterator[int]:
        try:
            with self._opened_folder(name) as fd:
                yield fd
        except OSError as error:
            raise self._failed(name, "cannot be listed or swept", error) from None

    @contextlib.contextmanager
    def _opened_folder(self, name: str) -> Iterator[int]:
        fd = os.open(name, _DIR_FLAGS, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _check_room(self, num_bytes: int) -> None:
        # Memory that a shard does not fit into is not filled first: others on this host need it meanwhile.
        if self.in_memory and num_bytes > self.health().free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write(self, fd: int, write: Callable[[int], None]) -> None:
        write(fd)
        files.sync(fd, self._durability)

    def _sync_names(self, folder_fd: int, name: str) -> None:
        if self._durability == "full":
            try:
                self._sync_folder(folder_fd)
            except OSError:  # nobody knows of it yet, and whether it is there after a power cut nobody can say
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder_fd)
                raise

    def _sync_folder(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            # Some network file systems sync no folder, and have a name on the server when the call that made it ends.
            if not self._told_of_folders:
                log.warning("folders_not_synced", store=str(self.path), reason=error.strerror)
            self._told_of_folders = True

    @contextlib.contextmanager
    def _translated(self, folder: str, subject: str, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            what = f"uid {os.geteuid()} cannot write in {self.path}"
            got = f"{error.strerror}{self._whose('.', folder)}"
            raise StorageError(what, subject=subject, got=got, fix=_SHARE_FIX) from None
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise self._failed(subject, "cannot be written", error) from None
            raise StoreFull(
                str(self.path),
                num_bytes=num_bytes,
                free_bytes=self.health().free_bytes,
                reason=os.strerror(error.errno),
                fix=_MEMORY_FIX if self.in_memory else "",
            ) from None

    def _failed(self, subject: str, what: str, error: OSError) -> StorageError:
        fix = "check the folder's owner, mode and file system"
        return StorageError(f"{what} in {self.path}", subject=subject, got=error.strerror, fix=fix)


def _check_regular(fd: int, subject: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise SampleCorrupt(subject, "no regular file")


def _barrier(path: Path) -> str:
    """What keeps this user from a folder: it, or one above it; whose it is, and its mode."""
    for place in (*reversed(path.parents), path):
        if place.exists() and not os.access(place, os.R_OK * (place == path) | os.X_OK, effective_ids=True):
            return _owner(place, place.stat())
    return ""


def _owner(place: Path, info: os.stat_result) -> str:
    return f" ({place} is of {info.st_uid}:{info.st_gid}, mode {stat.S_IMODE(info.st_mode):04o})"
