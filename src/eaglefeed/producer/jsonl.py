"""JSONL as people really bring it: one object a line, bounded lines, every row that cannot be used reported."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from eaglefeed.errors import ConfigError, InputError

__all__ = ["MAX_LINE_BYTES", "ReadReport", "Rejection", "Row", "parse_json", "read_rows"]

MAX_LINE_BYTES = 64 * 2**20
_MAX_KEPT_REJECTIONS = 1000
_MAX_REASONS = 1000
_KEPT_OF_A_REASON = 10
_SKIP_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_OTHER_FORMS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16 or UTF-32",
    b"\xfe\xff": "UTF-16",
    b"\0\0\xfe\xff": "UTF-32",
    b"{\0": "UTF-16 or UTF-32",
    b"\0{": "UTF-16",
}
"""What a file that is no text in UTF-8 begins with."""
_ARRAY = re.compile(rb"\[\s*(\{|$)")


class Row(NamedTuple):
    """A JSON object and its line, counted from 1."""

    line: int
    data: dict[str, Any]

    @property
    def id(self) -> str:
        """The row's own id, for reports; "" without one."""
        found = self.data.get("id")
        return "" if found is None else str(found)[:128]


class Rejection(NamedTuple):
    """A row that was not used: its line, its id as far as known, and why."""

    line: int
    id: str
    reason: str


@dataclass
class ReadReport:
    """What became of a file's rows. Counts are exact; kept are the first 1000 rejections, and 10 of every reason.

    Args:
        accepted: rows that were used.
        duplicates: rows with an id and a content that came before.
        rejections: the kept rejections.
        reasons: rejected rows by reason, without the row's own details; beyond 1000 reasons as "other reasons".
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
        kind = reason.split(":", 1)[0]
        if kind not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            kind = "other reasons"
        self.reasons[kind] += 1
        if len(self.rejections) < _MAX_KEPT_REJECTIONS or self.reasons[kind] <= _KEPT_OF_A_REASON:
            self.rejections.append(Rejection(line, row_id, reason))

    def require_accepted(self, path: Path, *, max_rejected_share: float = 1.0) -> None:
        """Check that the file held anything of use, and not more rows of no use than it may.

        Args:
            path: of the file.
            max_rejected_share: rejected rows of all rows, 0 to 1.

        Raises:
            InputError: it did not; names the first reason.
        """
        if not self.rejected and not self.accepted:
            raise InputError("no rows in it", subject=str(path), fix="bring one JSON object a line")
        num_rows = self.accepted + self.duplicates + self.rejected
        if self.accepted and self.rejected <= max_rejected_share * num_rows:
            return
        first = self.rejections[0]
        got = f"{self.rejected} rejected, the first at line {first.line}: {first.reason}"
        if not self.accepted:
            raise InputError("no row in it can be used", subject=str(path), got=got)
        wanted = f"at most {max_rejected_share:.2%} of {num_rows} (feed.max_rejected_share)"
        raise InputError("too many rows cannot be used", subject=str(path), wanted=wanted, got=got)


def read_rows(path: Path, report: ReadReport, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Row]:
    """Read the JSON objects of a file, one line at a time; lines that are none go into `report`.

    Lines end at a line feed and nowhere else; blank ones are passed over. A byte-order mark may open the file. What is
    read once, such as /dev/stdin, will do.

    Raises:
        ConfigError: the file cannot be read.
        InputError: it is of another form: compressed, in another encoding, or one JSON array.
    """
    try:
        with path.open("rb") as file:
            _check_form(file.peek(_SKIP_BYTES), path)
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


def parse_json(text: str) -> Any:
    """Parse JSON as its standard has it: no NaN, no Infinity, and each name once in its object.

    Raises:
        ValueError: it is none; says why.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:  # whose own text has the line of what is one line always
        raise ValueError(f"{error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {twice[:64]!r} twice in one object")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _check_form(start: bytes, path: Path) -> None:
    """Refuse at once what would be rejected line by line, or nearly: the last line of an array can look like a row."""
    wanted = "text in UTF-8, one JSON object a line"
    for magic, form in _OTHER_FORMS.items():
        if start.startswith(magic):
            fix = "unpack or convert it first; `eaglefeed feed <(zcat FILE)` does without a second file"
            raise InputError("another form of file", subject=str(path), wanted=wanted, got=form, fix=fix)
    if _ARRAY.match(start.removeprefix(_BOM).lstrip().split(b"\n", 1)[0]):
        fix = "write its rows a line each: jq -c '.[]' FILE"
        raise InputError("another form of file", subject=str(path), wanted=wanted, got="one JSON array", fix=fix)


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
        data = parse_json(text.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte {error.start} of the line"
    except ValueError as error:
        return f"not JSON: {error}"
    return data if isinstance(data, dict) else f"not an object: {type(data).__name__}"
