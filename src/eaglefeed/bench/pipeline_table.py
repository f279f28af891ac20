"""The document of the pipeline's bench in words: Markdown tables, for a terminal and for the documentation.

`python -m eaglefeed.bench.pipeline_table RESULT.json PAGE.md` writes them between the marks in that page.
"""

import json
import sys
from pathlib import Path
from typing import Any

from eaglefeed.bench.table import figure_tables, must_table, origin, write_tables

__all__ = ["main", "render"]

_SECTIONS = (
    ("A draft that is trained on the processor, while a producer works", "draft."),
    ("A step that waits for an accelerator", "device."),
)


def render(document: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    return [*_origin(document), "", *must_table(document["must"]), *figure_tables(document["figures"], _SECTIONS)]


def _origin(document: dict[str, Any]) -> list[str]:
    run, where = origin(document)
    return [f"{run};", *(_load(name, document["sizes"][name]) for name in ("draft", "device")), f"on {where}."]


def _load(name: str, load: dict[str, Any]) -> str:
    step = "trained" if load["step_s"] is None else f"{load['step_s'] * 1e3:g} ms a step"
    sizes = f"{load['tokens']} tokens, H {load['hidden']}, D {load['draft_vocab']}, {load['dtype']}"
    return f"{name}: {sizes}, {step}, {load['steps']} steps;"


def main(result: Path, page: Path) -> None:
    """Write the tables of `result` between the marks in `page`."""
    write_tables(render(json.loads(result.read_text(encoding="utf-8"))), page)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
