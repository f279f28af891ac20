"""Safetensors and JSON files that appear whole or not at all, readable as the umask says."""

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from eaglefeed.errors import StorageError, StoreFull

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read_safetensors", "sync_folder", "translated", "write_safetensors", "write_whole"]

_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_safetensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> None:
    """Write tensors from any device.

    Raises:
        StorageError: (StoreFull without room) nothing is left behind.
    """
    import safetensors.torch  # not above: a report is written by this file too, without torch

    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, safetensors.torch.save(on_cpu, metadata=dict(metadata)))


def read_safetensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Tensors and metadata of a file.

    Raises:
        StorageError: not there, or not a safetensors file.
    """
    try:
        with translated(path), safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise StorageError("not a safetensors file", subject=str(path), got=str(error)) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write, sync and rename into place; replaces what stood there.

    Raises:
        StorageError: (StoreFull without room) nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with translated(path, len(data)):
        try:
            with os.fdopen(os.open(temporary, _NEW_FLAGS, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def translated(path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turn OSError into this project's errors."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(str(path), num_bytes=num_bytes, free_bytes=0, reason=reason) from None
        raise StorageError(reason, subject=str(path), fix="check the path and its permissions") from None
