"""The bench's document in words: Markdown tables, for a terminal and for the documentation.

`python -m eaglefeed.bench.table RESULT.json docs/benchmarks.md` writes them between the marks in that file.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "render"]

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
_SECTIONS = (
    ("Rates on a full queue, one client", "rate."),
    ("Rates on a full queue, four processes", "rate_4_processes."),
    ("CPU time of the server", "server_cpu."),
    ("Of it, in scripts", "server_scripts."),
    ("From put to ack, two processes", "end_to_end."),
    ("Peers, from put to ack, two processes", "peer."),
    ("Memory of an item", "memory."),
    ("Latency", ("lease_ack_p50.", "handover.", "nothing_expired_check", "renew.")),
    ("Longest script", "script."),
)


def render(document: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    lines = [*_origin(document), "", *_must_table(document["must"])]
    for title, prefix in _SECTIONS:
        rows = [
            (f"`{name}`", figure["unit"], *(_number(figure[key]) for key in ("min", "median", "max")))
            for name, figure in document["figures"].items()
            if name.startswith(prefix)
        ]
        if rows:
            lines += ["", f"**{title}**", "", *_table(("figure", "unit", "min", "median", "max"), rows)]
    return [*lines, *_peers(document)]


def _origin(document: dict[str, Any]) -> list[str]:
    machine, server = document["machine"], document["server"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    size = "A quick run, its figures mean little" if document["quick"] else "A full run"
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {machine['kernel']}"
    return [
        f"{size}: {document['rounds']} rounds, {document['took_s']:.0f} s, payload {document['payload_bytes']} bytes,",
        f"on {where}; {versions};",
        f"appendonly {server['appendonly']}, appendfsync {server['appendfsync']}; allocator {server['allocator']};",
        f"CPU time is {server['cpu_time']}.",
    ]


def _must_table(entries: Iterable[dict[str, Any]]) -> list[str]:
    rows = [
        (f"`{e['name']}`", _number(e["value"]), f"{'≥' if e['better'] == 'higher' else '≤'} {e['bound']:g}")
        for e in entries
    ]
    return _table(("bound", "measured", "wanted"), rows)


def _peers(document: dict[str, Any]) -> list[str]:
    if not document["peers"]:
        return []
    rows = [
        (name, peer["version"], f"`{peer['best']}`", _number(peer["messages_a_second"]), "; ".join(peer["does_more"]))
        for name, peer in document["peers"].items()
    ]
    head = ("peer", "version", "its fastest", "messages/s", "what it does more a message")
    return ["", "**Peers**", "", *_table(head, rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(result: Path, page: Path) -> None:
    """Write the tables of `result` between the marks in `page`."""
    head, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    lines = render(json.loads(result.read_text(encoding="utf-8")))
    page.write_text("\n".join([f"{head}{_BEGIN}", "", *lines, "", f"{_END}{tail}"]), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
