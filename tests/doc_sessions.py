"""The commands that README and docs show, in order, each with what it is shown to print."""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = "docs/reference.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:^    \S.*\n)+", re.MULTILINE)
_CUT_DIGEST = re.compile(r"\b[0-9a-f]{4}…[0-9a-f]{4}\b")
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )?(?:eaglefeed|make|docker|docker-compose|torchrun|vllm|pip|python|pytest|scripts/\S+|deploy/\S+"
    r"|\.venv/bin/\S+)(?: .*)?"
)


@dataclass(frozen=True)
class Shown:
    """A command of a page, and the lines below it."""

    page: str
    command: str
    output: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether it is shown to end with an error, or to find faults."""
        return any(re.search(r"^eaglefeed: |[1-9]\d* with faults", line) for line in self.output)


def commands_of(page: str) -> list[Shown]:
    """In the page's order. In a block with `$ ` only such lines are commands, and the others what they print."""
    text = "" if page == GENERATED else PAGES[page]
    blocks = [block for kind, block in _FENCED.findall(text) if kind in ("", "bash")]
    found: list[Shown] = []
    for block in blocks + _INDENTED.findall(_FENCED.sub("", text)):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if any(line.startswith("$ ") for line in lines):
            found += _session(page, lines)
        else:
            found += [Shown(page, line) for line in lines if _COMMAND.fullmatch(line)]
    return found


def _session(page: str, lines: list[str]) -> list[Shown]:
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")] + [len(lines)]
    return [
        Shown(page, lines[start].removeprefix("$ "), tuple(lines[start + 1 : end])) for start, end in pairwise(starts)
    ]


def shape(text: str) -> str:
    """A line without its numbers, digests, sizes, rates and columns."""
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{4,}\b", "N", re.sub(r" +", " ", text))
    text = re.sub(r"\d+(?:[.,]\d+)*", "N", text)
    return re.sub(r"N/(?:s|min|h)\b|(?<= )-(?= |$)", "RATE", re.sub(r"N (?:[KMGT]i)?B\b", "SIZE", text))


def missing(output: tuple[str, ...], printed: str) -> list[str]:
    """Lines that are shown, and that no printed line has the shape of, in order; "…" stands for anything."""
    left, absent = [shape(line.strip()) for line in printed.splitlines()], []
    for line in (_CUT_DIGEST.sub("0", line) for line in output):
        pattern = re.compile(".*".join(re.escape(shape(part)) for part in line.split("…")))
        index = next((index for index, each in enumerate(left) if pattern.fullmatch(each)), None)
        if index is None:
            absent.append(line)
        else:
            left = left[index + 1 :] if line.strip("…") else left
    return absent
