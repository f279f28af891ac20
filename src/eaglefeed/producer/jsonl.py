"""JSONL as people really bring it: one object a line, bounded lines, every row that cannot be used reported."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from eaglefeed.errors import ConfigError, InputError

__all__ = ["MAX_LINE_BYTES", "ReadReport", "Rejection", "Row", "read_rows"]

MAX_LINE_BYTES = 64 * 2**20
_MAX_KEPT_REJECTIONS = 1000
_SKIP_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A JSON object and its line, counted from 1."""

    line: int
    data: dict[str, Any]

    @property
    def id(self) -> str:
        """The row's own id, for reports; "" without one."""
        return str(self.data.get("id", ""))[:128]


class Rejection(NamedTuple):
    """A row that was not used: its line, its id as far as known, and why."""

    line: int
    id: str
    reason: str


@dataclass
class ReadReport:
    """What became of a file's rows. Counts are exact; of the rejections the first 1000 are kept.

    Args:
        accepted: rows that were used.
        duplicates: rows with an id and a content that came before.
        rejections: the kept rejections.
        reasons: rejected rows by reason, without the row's own details.
        unsupervised_turns: assistant turns without loss, since the text does not hold them as the target wrote them.
        unrendered: turns that the template leaves out of the text, by role.
    """

    accepted: int = 0
    duplicates: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    unsupervised_turns: int = 0
    unrendered: Counter[str] = field(default_factory=Counter)

    @property
    def rejected(self) -> int:
        """Rows that were rejected."""
        return self.reasons.total()

    def reject(self, line: int, row_id: str, reason: str) -> None:
        """Count a rejection, by the part of the reason before its first colon."""
        self.reasons[reason.split(":", 1)[0]] += 1
        if len(self.rejections) < _MAX_KEPT_REJECTIONS:
            self.rejections.append(Rejection(line, row_id, reason))

    def require_accepted(self, path: Path) -> None:
        """Check that the file held anything of use.

        Raises:
            InputError: not one row was accepted; names the first reason.
        """
        if self.accepted:
            return
        if not self.rejections:
            raise InputError("no rows in it", subject=str(path), fix="bring one JSON object a line")
        first = self.rejections[0]
        got = f"{self.rejected} rejected, the first at line {first.line}: {first.reason}"
        raise InputError("no row in it can be used", subject=str(path), got=got)


def read_rows(path: Path, report: ReadReport, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Row]:
    """Read the JSON objects of a file, one line at a time; lines that are none go into `report`.

    Lines end at a line feed and nowhere else; blank ones are passed over. A byte-order mark may open the file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line, text in _lines(file, max_line_bytes):
                if text is None:
                    report.reject(line, "", f"line too large: over {max_line_bytes} bytes")
                elif text.strip():
                    data = _parse(text)
                    if isinstance(data, str):
                        report.reject(line, "", data)
                    else:
                        yield Row(line, data)
    except OSError as error:
        fix = "pass the path of a JSONL file"
        raise ConfigError("cannot be read", subject=str(path), got=error.strerror, fix=fix) from None


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    line = 0
    while text := file.readline(max_bytes + 1):
        line += 1
        too_large = len(text) > max_bytes and not (text.endswith(b"\n") and len(text) == max_bytes + 1)
        if too_large:
            while not text.endswith(b"\n") and (text := file.readline(_SKIP_BYTES)):
                pass
        yield line, None if too_large else text.removeprefix(_BOM) if line == 1 else text


def _parse(text: bytes) -> dict[str, Any] | str:
    try:
        data = json.loads(text.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte {error.start} of the line"
    except ValueError as error:
        return f"not JSON: {error}"
    except RecursionError:
        return "not JSON: nested too deeply"
    return data if isinstance(data, dict) else f"not an object: {type(data).__name__}"
