"""Commands as a user types them, in this process."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny_target
from eaglefeed.cli import main
from eaglefeed.errors import ConfigError
from eaglefeed.queue import EmbeddedServer, connect
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.server_process import find_server_binary


@dataclass
class Ended:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON on its last line."""
        return dict(json.loads(self.out.strip().split("\n")[-1]))


class Shell:
    """Runs commands with the options that all of a run's commands need."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *common: str) -> None:
        self._capsys, self.common = capsys, common

    def run(self, *words: str | Path) -> Ended:
        """Run one command to its end."""
        self._capsys.readouterr()
        code = 0
        try:
            main([*self.common, *map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = self._capsys.readouterr()
        return Ended(code, captured.out, captured.err)


def write_rows(path: Path, rows: list[dict[str, Any] | str]) -> Path:
    """Write rows as JSONL; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def conversation(index: int) -> dict[str, Any]:
    """A short conversation."""
    return {"id": f"c-{index}", "messages": tiny_target.turns(f"say {index}", f"it is {index}")}


def save_tiny_target(folder: Path) -> Path:
    """A random target with its tokenizer, as a local folder."""
    tiny_target.tiny_model().save_pretrained(folder)
    tiny_target.tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def run_server(folder: Path) -> Iterator[QueueClient]:
    """The server of a run's folder, kept running between commands; where none is installed, the test is skipped."""
    try:
        find_server_binary()
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedServer(folder / "queue") as server, closing(connect(server.url)) as client:
        yield client
