"""How the commands tell what became of a file's rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglefeed.cli.common import emit
from eaglefeed.cli.letters import one_line
from eaglefeed.errors import InputError
from eaglefeed.ops.wording import human_bytes

if TYPE_CHECKING:
    from eaglefeed.producer.jsonl import ReadReport

__all__ = ["describe_read", "human_bytes", "refusal_told"]

_SHOWN = 20


def describe_read(report: "ReadReport", path: Path) -> tuple[dict[str, Any], list[str]]:
    """Every row's fate: as a document, and as lines, the first rejections one by one."""
    document: dict[str, Any] = {
        "accepted": report.accepted,
        "duplicates": report.duplicates,
        "rejected": report.rejected,
        "reasons": dict(report.reasons),
        "rejections": [row._asdict() for row in report.rejections],
        "unsupervised_turns": report.unsupervised_turns,
        "unrendered": dict(report.unrendered),
    }
    lines = [f"{path}:{row.line} ({row.id or 'no id'}): rejected, {row.reason}" for row in report.rejections[:_SHOWN]]
    if report.rejected > _SHOWN:
        lines.append(f"{path}: {report.rejected - _SHOWN} more rejected; --json lists them")
    lines += [f"{path}: {count} rejected: {reason}" for reason, count in report.reasons.most_common()]
    if report.unsupervised_turns:
        why = "the text does not hold them as the target wrote them"
        lines.append(f"{path}: {report.unsupervised_turns} assistant turns are not trained on: {why}")
    lines += [f"{path}: the template leaves out {n} turns of role {role}" for role, n in report.unrendered.items()]
    lines.append(f"{path}: {report.accepted} accepted, {report.duplicates} duplicates, {report.rejected} rejected")
    return document, [one_line(line) for line in lines]


@contextmanager
def refusal_told(report: "ReadReport", path: Path, *, as_json: bool) -> Iterator[None]:
    """Where the file is refused, print what became of its rows, and let the error go on."""
    try:
        yield
    except InputError as error:
        document, lines = describe_read(report, path)
        emit(as_json, document | {"refused": str(error)}, lines if report.accepted or report.rejected else [])
        raise
