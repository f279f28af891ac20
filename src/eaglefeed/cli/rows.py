"""The rows of a conversations file, checked without a target."""

from pathlib import Path
from typing import TYPE_CHECKING

from eaglefeed.errors import EaglefeedError

if TYPE_CHECKING:
    from eaglefeed.config import FeedSection
    from eaglefeed.producer.jsonl import ReadReport

__all__ = ["check_rows"]

_KIND = "InputError"


def check_rows(path: Path, feed: "FeedSection") -> tuple[int, list[dict[str, str]]]:
    """How many rows a file has, and what is wrong with them; or with the file as a whole."""
    from eaglefeed.producer.jsonl import ReadReport

    report = ReadReport()
    try:
        _read(path, feed, report)
        if not report.rejected:
            report.require_accepted(path)
    except EaglefeedError as error:
        return 1, [{"name": str(path), "fault": str(error), "kind": type(error).__name__}]
    faults = [{"name": f"{path}:{line}", "fault": why, "kind": _KIND} for line, _, why in report.rejections]
    if report.rejected > len(faults):
        more = f"{report.rejected - len(faults)} more rows cannot be used"
        faults.append({"name": str(path), "fault": more, "kind": _KIND})
    return report.accepted + report.duplicates + report.rejected, faults


def _read(path: Path, feed: "FeedSection", report: "ReadReport") -> None:
    from eaglefeed.producer.chat import ChatIds, RowFault, parse_chat
    from eaglefeed.producer.jsonl import read_rows

    ids = ChatIds()
    for row in read_rows(path, report, max_line_bytes=feed.max_line_bytes):
        try:
            is_new = ids.is_new(parse_chat(row.data, feed.role_aliases), row.line)
        except RowFault as fault:
            report.reject(row.line, row.id, str(fault))
        else:
            report.accepted, report.duplicates = report.accepted + is_new, report.duplicates + (not is_new)
