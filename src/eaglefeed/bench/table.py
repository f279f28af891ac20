"""The bench's document in words: Markdown tables, for a terminal and for the documentation.

`python -m eaglefeed.bench.table RESULT.json docs/benchmarks.md` writes them between the marks in that file.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["figure_tables", "main", "must_table", "origin", "peer_table", "render", "table", "write_tables"]

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
Sections = Sequence[tuple[str, str | tuple[str, ...]]]
_SECTIONS: Sections = (
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
    return [
        *_origin(document),
        "",
        *must_table(document["must"]),
        *figure_tables(document["figures"], _SECTIONS),
        *_peers(document),
    ]


def figure_tables(figures: Mapping[str, Any], sections: Sections) -> list[str]:
    """A table for each section: a title, and what the names of its figures begin with."""
    lines: list[str] = []
    for title, prefix in sections:
        rows = [
            (f"`{name}`", figure["unit"], *(_number(figure[key]) for key in ("min", "median", "max")))
            for name, figure in figures.items()
            if name.startswith(prefix)
        ]
        if rows:
            lines += ["", f"**{title}**", "", *table(("figure", "unit", "min", "median", "max"), rows)]
    return lines


def _origin(document: dict[str, Any]) -> list[str]:
    server, (run, where) = document["server"], origin(document)
    return [
        f"{run}, payload {document['payload_bytes']} bytes,",
        f"on {where};",
        f"appendonly {server['appendonly']}, appendfsync {server['appendfsync']}; allocator {server['allocator']};",
        f"CPU time is {server['cpu_time']}.",
    ]


def origin(document: Mapping[str, Any]) -> tuple[str, str]:
    """What kind of run a document is of, and where and with what it ran."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    size = "A quick run, its figures mean little" if document["quick"] else "A full run"
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {machine['kernel']}"
    return f"{size}: {document['rounds']} rounds, {document['took_s']:.0f} s", f"{where}; {versions}"


def must_table(entries: Iterable[dict[str, Any]]) -> list[str]:
    """What was measured beside what is wanted."""
    rows = [
        (f"`{e['name']}`", _number(e["value"]), f"{'≥' if e['better'] == 'higher' else '≤'} {e['bound']:g}")
        for e in entries
    ]
    return table(("bound", "measured", "wanted"), rows)


def _peers(document: dict[str, Any]) -> list[str]:
    if not document["peers"]:
        return []
    rows = [
        (name, peer["version"], f"`{peer['best']}`", _number(peer["messages_a_second"]), "; ".join(peer["does_more"]))
        for name, peer in document["peers"].items()
    ]
    head = ("peer", "version", "its fastest", "messages/s", "what it does more a message")
    return ["", "**Peers**", "", *table(head, rows)]


def peer_table(peers: Mapping[str, Any] | None) -> list[str]:
    """What each peer's driver says of it; nothing without peers."""
    if not peers:
        return []
    rows = [
        (name, peer["version"], peer["settings"], "; ".join(peer["does_more"]), "; ".join(peer["does_less"]))
        for name, peer in peers.items()
    ]
    return ["", "**Peers**", "", *table(("peer", "version", "settings", "does more", "does less"), rows)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of one Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(result: Path, page: Path) -> None:
    """Write the tables of `result` between the marks in `page`."""
    write_tables(render(json.loads(result.read_text(encoding="utf-8"))), page)


def write_tables(lines: Sequence[str], page: Path) -> None:
    """Write lines between the marks in `page`."""
    head, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    page.write_text("\n".join([f"{head}{_BEGIN}", "", *lines, "", f"{_END}{tail}"]), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
