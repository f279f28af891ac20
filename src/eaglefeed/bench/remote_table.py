"""The document of a remote target's bench in words: Markdown tables, for a terminal and for the documentation.

`python -m eaglefeed.bench.remote_table RESULT.json PAGE.md` writes them between the marks in that page.
"""

import json
import sys
from pathlib import Path
from typing import Any

from eaglefeed.bench.table import figure_tables, must_table, origin, peer_table, write_tables

__all__ = ["main", "render"]

_SECTIONS = (
    ("Into memory that was written before", "bare."),
    ("A large answer, bytes", "wire."),
    ("A large answer, requests", "requests."),
    ("A small answer", "small."),
    ("A target that sleeps", "sleeping."),
    ("Memory of a server", "memory."),
)


def render(document: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    return [
        *_origin(document),
        "",
        *must_table(document["must"]),
        *figure_tables(document["figures"], _SECTIONS),
        *peer_table(document["peers"]),
    ]


def _origin(document: dict[str, Any]) -> list[str]:
    sizes = document["sizes"]
    run, where = origin(document)
    return [
        f"{run}; a large answer of {sizes['tokens']} tokens,",
        f"H {sizes['hidden']}, D {sizes['draft_vocab']}, {sizes['answer_bytes'] / 1e6:.1f} MB;",
        f"on {where}.",
    ]


def main(result: Path, page: Path) -> None:
    """Write the tables of `result` between the marks in `page`."""
    write_tables(render(json.loads(result.read_text(encoding="utf-8"))), page)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
