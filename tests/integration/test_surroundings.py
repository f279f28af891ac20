"""Where a command is run: users without a name or a home, closed streams, encodings, locales, limits."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from commands import Shell, conversation, run_server, save_tiny_target, write_rows

HOMES = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
PACKAGED = "target.name=SmolLM2-135M-Instruct"
ODD_NAME = "rows of Zoë 😀.jsonl"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a file of an odd name with a row that is none, and a run whose queue's server lives."""
    folder = tmp_path_factory.mktemp("here")
    write_rows(folder / ODD_NAME, [conversation(0), {"text": "no turns"}, conversation(1)])
    (folder / "run.yaml").write_bytes(b"\xef\xbb\xbfrun:\r\n  id: r\r\nfeed:\r\n  max_length: 32\r\n")
    with run_server(folder / "runs" / "r"):
        yield folder


def shell_line(place: Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of sh, with `$0` for the interpreter."""
    return subprocess.run(
        ["sh", "-c", line, sys.executable],
        cwd=place,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=100,
        check=False,
    )


STATS = "-m eaglefeed queue stats run.id=r"
CHECKED = f"-m eaglefeed validate '{ODD_NAME}'"


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "utf-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "latin-1", "utf-8", "the C locale"],
)
def test_a_terminal_that_cannot_show_a_files_name_changes_no_outcome(environment: dict[str, str], place: Path) -> None:
    ended = shell_line(place, f'exec "$0" {CHECKED}', **environment)
    assert ended.returncode == 3, ended.stderr
    assert "3 checked, 1 with faults" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert "rows of Zo" in ended.stdout


def test_a_name_that_is_no_text_is_told_too(place: Path) -> None:
    (place / "no\udce9text").write_bytes(b"x")
    ended = shell_line(place, 'exec "$0" -m eaglefeed validate no*text')
    assert ended.returncode == 3, ended.stderr
    assert "1 checked, 1 with faults" in ended.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_does_not_make_a_failure_of_what_is_done(closed: str, place: Path) -> None:
    ended = shell_line(place, f'exec "$0" {STATS} {closed}')
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ("prompts:" in ended.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("flags", ["-OO", "-X dev -W error"])
def test_the_interpreters_flags_change_no_outcome(flags: str, place: Path) -> None:
    assert shell_line(place, f'exec "$0" {flags} {STATS}').returncode == 0
    wrong = shell_line(place, f'exec "$0" {flags} {CHECKED}')
    assert wrong.returncode == 3, wrong.stderr


def test_settings_with_the_line_ends_of_windows_and_a_mark_are_read_with_few_open_files(place: Path) -> None:
    ended = shell_line(place, 'ulimit -n 64; umask 077; exec "$0" -m eaglefeed queue stats --config run.yaml')
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """Of a user whom the machine does not know, and who has no home."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in HOMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(3)])
    with run_server(tmp_path / "runs" / "r"):
        yield Shell(capsys, "run.id=r", "feed.max_length=64")


def test_a_user_without_a_name_and_a_home_runs_what_needs_none(shell: Shell, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target")
    for words in (("feed", "rows.jsonl"), ("produce", "produce.supervision=logits"), ("queue", "stats")):
        ended = shell.run(*words, "target.name=target", "target.num_threads=1")
        assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    "words",
    [
        (PACKAGED,),
        (PACKAGED, "target.cache_dir=~/kept"),
        ("store.uri=~/shards", "target.cache_dir=."),
        ("store.uri=~nobody-of-this-name/shards", "target.cache_dir=."),
    ],
)
def test_a_home_that_is_not_there_is_said_with_what_to_set(words: tuple[str, ...], shell: Shell) -> None:
    ended = shell.run("feed" if PACKAGED in words else "store", "rows.jsonl" if PACKAGED in words else "gc", *words)
    assert ended.code == 2, ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith("eaglefeed: ~")
    assert "HOME" in line
    assert "target.cache_dir" in line


def test_a_cache_that_cannot_be_written_is_said_with_what_to_set(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    ended = shell.run("feed", "rows.jsonl", PACKAGED, "target.cache_dir=a file/below")
    assert ended.code == 2, ended.err
    assert "set target.cache_dir" in ended.err.splitlines()[-1]
