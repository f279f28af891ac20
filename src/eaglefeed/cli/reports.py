"""How the commands tell what became of a file's rows, and what a size is."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglefeed.producer.jsonl import ReadReport

__all__ = ["describe_read", "human_bytes"]

_SHOWN = 20
_STEP = 1024


def describe_read(report: "ReadReport", path: Path) -> tuple[dict[str, Any], list[str]]:
    """Every row's fate: as a document, and as lines, the first rejections one by one."""
    document = {
        "accepted": report.accepted,
        "duplicates": report.duplicates,
        "rejected": report.rejected,
        "reasons": dict(report.reasons),
        "rejections": [row._asdict() for row in report.rejections],
    }
    lines = [f"{path}:{row.line} ({row.id or 'no id'}): rejected, {row.reason}" for row in report.rejections[:_SHOWN]]
    if report.rejected > _SHOWN:
        lines.append(f"{path}: {report.rejected - _SHOWN} more rejected; --json lists them")
    lines += [f"{path}: {count} rejected: {reason}" for reason, count in report.reasons.most_common()]
    lines.append(f"{path}: {report.accepted} accepted, {report.duplicates} duplicates, {report.rejected} rejected")
    return document, lines


def human_bytes(num_bytes: float) -> str:
    """A size for people, such as 1.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < _STEP:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= _STEP
    return f"{num_bytes:.1f} TiB"
