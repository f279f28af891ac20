"""The report of a run: report.html for people and report.json for programs, each whole or not at all."""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from eaglefeed import __version__
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.files import translated, write_whole
from eaglefeed.ops.facts import RunFacts
from eaglefeed.ops.report_document import report_document
from eaglefeed.ops.report_page import render
from eaglefeed.ops.report_sections import report_page

__all__ = ["Written", "write_report"]

_LEFT_BEHIND_S = 3600.0


class Written(NamedTuple):
    """Where a report lies, and what it says first."""

    page: Path
    document: Path
    state: str
    sentence: str
    bottleneck: dict[str, str]


def write_report(facts: RunFacts, folder: Path, *, clock: Clock = SYSTEM_CLOCK) -> Written:
    """Write what is known of a run, in the place of an earlier report.

    Args:
        facts: of the run.
        folder: made if it is not there.
        clock: tells how old files are that a killed writer left behind.

    Raises:
        StorageError: it cannot be written; nothing is left behind.
    """
    document = report_document(facts, version=__version__)
    page, data = folder / "report.html", folder / "report.json"
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in (page, data):
            _sweep(path, clock)
    write_whole(data, json.dumps(document, indent=1, allow_nan=False).encode())
    write_whole(page, render(report_page(document)).encode())
    ended = document["outcome"]
    return Written(page, data, ended["state"], ended["sentence"], document["bottleneck"])


def _sweep(path: Path, clock: Clock) -> None:
    """Remove what writers that were killed left behind; younger ones may still be at work."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(FileNotFoundError):  # it was renamed into place meanwhile
            if clock.time() - left.stat().st_mtime > _LEFT_BEHIND_S:
                left.unlink()
