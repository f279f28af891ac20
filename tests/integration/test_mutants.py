"""scripts/mutants: the tests notice when a script breaks a guarantee, and the program notices when they do not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TWELVE = {
    "ack-unfenced",
    "handoff-unfenced",
    "put-no-ledger",
    "no-reclaim",
    "head-reversed",
    "deliveries-not-counted",
    "lease-mates-blamed",
    "no-hysteresis",
    "ack-of-any-session",
    "commit-beyond-step",
    "restore-gives-nothing-back",
    "released-too-early",
}


def mutants(*words: str) -> tuple[int, list[dict[str, Any]]]:
    """The program's exit status, and its row for each mutant."""
    command = [sys.executable, str(ROOT / "scripts" / "mutants"), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["mutants"]


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in rows}


def table(folder: Path, **changes: tuple[str, str, str]) -> str:
    """A table of changes to the renew script: name → old text, new text and test."""
    path = folder / "table.toml"
    keys = ("old", "new", "killed_by")
    path.write_text(
        "\n".join(
            f"[renew.{name}]\nbreaks = 'what it says'\n"
            + "\n".join(f"{key} = '{value}'" for key, value in zip(keys, change, strict=True))
            for name, change in changes.items()
        )
    )
    return str(path)


def test_every_mutant_applies_once_and_compiles_and_names_a_test() -> None:
    status, rows = mutants("--check")
    assert (status, {row["verdict"] for row in rows}) == (0, {"applies"}), rows
    assert len({row["name"] for row in rows}) == len(rows) >= 16
    assert {row["name"] for row in rows} >= TWELVE


@pytest.mark.timeout(300)
def test_a_dozen_mutants_are_killed_each_by_the_test_whose_business_it_is() -> None:
    status, rows = mutants("--narrow", *TWELVE)
    assert (status, verdicts(rows)) == (0, dict.fromkeys(TWELVE, "killed")), rows


RENEWS = "test_a_renewed_lease_outlives_its_first_deadline"


@pytest.mark.timeout(300)
def test_a_mutant_that_nobody_notices_survives_and_one_that_crashes_counts_for_nothing(tmp_path: Path) -> None:
    told = table(
        tmp_path,
        same=("-- renew: moves", "-- renew: shifts", RENEWS),
        shorter=("now_ms() + tonumber(ARGV[2])", "now_ms() + 1", RENEWS),
        crashes=("return deadline", "return nobody()", RENEWS),
    )
    status, rows = mutants("--narrow", "--table", told)
    assert (status, verdicts(rows)) == (1, {"same": "survived", "shorter": "killed", "crashes": "unusable"}), rows
    assert [row["by"] for row in rows if row["name"] == "shorter"] == [f"test_lease_queue.py::{RENEWS}[fakeredis]"]


def test_a_mutant_that_does_not_apply_is_an_error_and_no_skip(tmp_path: Path) -> None:
    told = table(
        tmp_path,
        gone=("no such text", "", RENEWS),
        twice=("call(", "", RENEWS),
        no_lua=("return deadline", "return return", RENEWS),
        no_test=("return deadline", "return 1", "test_that_nobody_wrote"),
    )
    status, rows = mutants("--check", "--table", told)
    assert (status, {row["verdict"] for row in rows}) == (1, {"unusable"}), rows


def test_a_script_that_cannot_lease_is_no_mutant(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    change = "old = 'if #ids == 0 then return nothing()'\nnew = 'if true then return nothing()'"
    path.write_text(f"[lease.never]\nbreaks = 'everything'\n{change}\nkilled_by = '{RENEWS}'")
    status, rows = mutants("--narrow", "--table", str(path))
    assert (status, verdicts(rows)) == (1, {"never": "unusable"}), rows
