"""What an import needs of a folder with another project's features: its files, and the row that each one holds."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from eaglefeed.errors import InputError
from eaglefeed.interop.features import Features
from eaglefeed.schema.refs import safe_sample_id

__all__ = ["FeatureFile", "FeatureFolder", "read_bounded", "sample_id_of", "size_of", "too_large"]


class FeatureFile(NamedTuple):
    """A file of a folder: the sample that it becomes, its name below the folder, and its size."""

    sample_id: str
    name: str
    num_bytes: int


class FeatureFolder(Protocol):
    """A folder of one format; each file is one row."""

    format: str
    num_missing: int
    """Rows that have no file, of those that `files` last looked at."""

    def files(self) -> Sequence[FeatureFile]:
        """All of them, in an order that is always the same.

        Raises:
            InputError: the folder is not what the format says; nothing was imported.
        """
        ...

    def read(self, name: str, max_bytes: int) -> Features:
        """The row of one file, of which no more than `max_bytes` are ever in memory, also if it is compressed.

        Raises:
            InputError: it cannot be read, is larger, or is not what the format says.
        """
        ...


def sample_id_of(text: str, name: str) -> str:
    """Return `text` as a sample id.

    Raises:
        InputError: the file `name` cannot be called that.
    """
    try:
        return safe_sample_id(text)
    except ValueError as error:
        raise InputError("its name makes no sample id", subject=name, got=error, fix="rename the file") from None


def size_of(path: Path, name: str) -> int:
    """The bytes of a file.

    Raises:
        InputError: it is gone, or a link to nothing.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError("cannot be read", subject=name, got=error.strerror) from None


def read_bounded(path: Path, name: str, max_bytes: int) -> bytes:
    """The bytes of a file, decompressed if it ends in .gz.

    Raises:
        InputError: it cannot be read, or holds more than `max_bytes`.
    """
    try:
        if not path.is_file():
            raise InputError("no regular file", subject=name)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError("cannot be read", subject=name, got=error) from None
    if len(data) > max_bytes:
        raise too_large(name, max_bytes, "more")
    return data


def too_large(name: str, max_bytes: int, got: object) -> InputError:
    """A file that holds more than one row of the longest kind would."""
    fix = "raise feed.max_length if rows are longer, in a run of its own if this one has samples"
    wanted = f"at most {max_bytes} bytes, for feed.max_length tokens"
    return InputError("too large", subject=name, wanted=wanted, got=got, fix=fix)
