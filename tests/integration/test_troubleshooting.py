"""What the troubleshooting page quotes is what the code says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FILES = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".lua")]
# A message that stands on two lines of a file is put together again.
SOURCE = re.sub(r'"\s+f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in FILES))
# Said by torch and Python.
FOREIGN = {"OutOfMemoryError", "RuntimeError"}


def rows() -> list[tuple[str, str]]:
    """Heading and first cell of each row."""
    found, heading = [], ""
    for line in PAGE.splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        if line.startswith("| ") and not line.startswith(("| what it says |", "| reason or error |")):
            found.append((heading, line.split(" | ")[0].removeprefix("| ")))
    return found


QUOTES = [
    quote
    for heading, cell in rows()
    if heading != "Nothing moves"
    for quote in re.findall(r"`([^`]+)`", cell)
    if quote not in FOREIGN
]


@pytest.mark.parametrize("quote", QUOTES)
def test_an_error_that_the_page_quotes_is_one_of_the_code(quote: str) -> None:
    for part in re.split(r"\s*…\s*", quote):
        assert part in SOURCE, f"nothing says {part!r}"


def test_the_page_quotes_errors_at_all() -> None:
    assert len(QUOTES) > 60
