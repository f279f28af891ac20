"""docs/cases.md: a row a case, an outcome each, and every test it names is there and is one that `make test` runs."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CASES = {
    "JSN": (1, 2, 4, 6, 7, 9, 10), "TPL": (1, 2, 4, 5, 6, 8, 10, 11, 12, 15), "VOC": (1, 3, 4, 6, 8), "ALN": (1, 2, 5),
    "NUM": (1, 3, 4), "CAP": (1, 2, 3, 4, 5, 8), "PAD": (1, 2, 3, 6), "SHD": (1, 2, 3, 4, 7, 8, 9), "SFS": (1, 3, 5),
    "QUE": (1, 2, 4, 6, 8), "RDS": (1, 2, 3, 6, 7, 9), "RSM": (1, 2, 3, 7, 8), "DST": (1, 3, 4, 5), "SRV": (1, 2, 3, 5),
    "MEM": (1, 3, 5), "ENV": (1, 2, 4, 5, 7),
}  # fmt: skip
IDS = [f"{kind}-{number:02}" for kind, numbers in CASES.items() for number in numbers]
LEFT_OUT = {"gpu", "sglang", "vllm"}  # markers of tests that `make test` does not run everywhere


class Row(NamedTuple):
    """A line of a table: a case, or (with the letters of its kind alone) a further fault of the kind."""

    id: str
    what: str
    outcome: str
    tests: list[str]


def _rows() -> list[Row]:
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [
        Row(*row[:3], re.findall(r"`([^`]+)`", row[3])) for row in cells if re.fullmatch(r"[A-Z]{3}(-\d\d)?", row[0])
    ]


ROWS = _rows()


@cache
def _tests(path: str) -> dict[str, set[str]]:
    """Name → its markers, of a file's tests."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        node.name: set(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, node.decorator_list))))
        for node in functions
        if node.name.startswith("test_")
    }


def test_each_of_the_eighty_cases_has_one_row() -> None:
    assert len(IDS) == 80
    assert sorted(row.id for row in ROWS if "-" in row.id) == sorted(IDS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_says_what_became_of_it_and_names_tests_that_run(row: Row) -> None:
    assert re.match(r"(handled|fixed)\b|not ours: \w", row.outcome)
    assert row.what
    assert row.tests or row.outcome.startswith("not ours")
    for named in row.tests:
        path, _, name = named.partition("::")
        assert name in _tests(path), named
        assert not _tests(path)[name] & LEFT_OUT, named
