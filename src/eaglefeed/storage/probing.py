"""Whether a folder can do what shards need of it, tried before the first one is made."""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eaglefeed.errors import ConfigError
from eaglefeed.logs import get_logger
from eaglefeed.storage import files
from eaglefeed.storage.temporaries import temporary, temporary_name

if TYPE_CHECKING:
    from eaglefeed.storage.base import Durability

__all__ = ["UNSUPPORTED", "probe_folder"]

UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems answer to a call that they do not have."""

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {*UNSUPPORTED, *_DENIED, errno.EXDEV, errno.EMLINK}
_WRITE_FIX = "let this user write to it (a group, setgid folders, umask 002), or pass --store with another folder"
_SYNC_FIX = "use another file system, or set store.durability=none: a crash of the machine then costs samples"
_LINK_FIX = "use a file system with hard links (ext4, xfs, NFS, Lustre), or s3:// for a bucket instead of its mount"

log = get_logger(__name__)


def probe_folder(fd: int, path: Path, durability: "Durability") -> None:
    """Write a file in an open folder, sync it and link it to another name; nothing of it stays.

    What may pass, such as no room or an I/O error, is left to the first write.

    Raises:
        ConfigError: one of these cannot be done here.
    """

    def fill(file: int) -> None:
        files.write_at(file, b"probe", 0)
        with _needed(path, "files cannot be synced", UNSUPPORTED, _SYNC_FIX):
            files.sync(file, durability)

    linked = temporary_name()
    try:
        with _needed(path, f"uid {os.geteuid()} cannot write", _DENIED, _WRITE_FIX), temporary(fd, fill) as made:
            with _needed(path, "no hard links, by which shards get their names", _NO_LINKS, _LINK_FIX):
                os.link(made, linked, src_dir_fd=fd, dst_dir_fd=fd)
            with _needed(path, "files cannot be deleted", {*UNSUPPORTED, *_DENIED}, _WRITE_FIX):
                os.unlink(linked, dir_fd=fd)
    except OSError as error:
        log.warning("store_not_probed", store=str(path), reason=error.strerror)


@contextmanager
def _needed(path: Path, what: str, codes: Collection[int], fix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in codes:
            raise ConfigError(what, subject=str(path), got=error.strerror, fix=fix) from None
        raise
