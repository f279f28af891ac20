"""The document of the stores' bench in words: Markdown tables, for a terminal and for the documentation.

`python -m eaglefeed.bench.storage_table RESULT.json PAGE.md` writes them between the marks in that page.
"""

import json
import sys
from pathlib import Path
from typing import Any

from eaglefeed.bench.table import figure_tables, must_table, origin, peer_table, write_tables

__all__ = ["main", "render"]

_SECTIONS = (
    ("Into memory that was written before", "memmove"),
    ("Put", "put."),
    ("Get from the device", "get_cold."),
    ("Get from the page cache", "get_hot."),
    ("A sample of each encoding", "encoding."),
    ("The data set of speculators, its own form of last hidden states", "loader."),
    ("A small sample beside many residents", "residents."),
    ("Peak memory, in samples", "memory."),
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
    machine, sizes = document["machine"], document["sizes"]
    run, where = origin(document)
    return [
        f"{run}, {sizes['tokens']} tokens a sample,",
        f"H {sizes['hidden']}, V {sizes['vocab']}, D {sizes['draft_vocab']};",
        f"on {machine['file_system']}, {where}.",
    ]


def main(result: Path, page: Path) -> None:
    """Write the tables of `result` between the marks in `page`."""
    write_tables(render(json.loads(result.read_text(encoding="utf-8"))), page)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
