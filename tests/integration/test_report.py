"""The report by its commands, of a real small run; it is written whole, and never in the way of what it tells of."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import structlog
import torch

import report_runs
from commands import Shell, conversation, run_server, save_tiny_target, write_rows
from eaglefeed.cli import journaling
from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.report import reported, write_or_tell
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import load_settings
from eaglefeed.errors import StorageError
from eaglefeed.ops.report import write_report
from eaglefeed.queue import open_queue
from eaglefeed.queue.connection import QueueClient

torch.set_num_threads(1)
NUM_ROWS = 6
FOLDER = Path("runs/default")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def queues(tmp_path: Path) -> Iterator[RunQueues]:
    """The run's server, kept running between commands."""
    with run_server(tmp_path / FOLDER) as client:
        yield RunQueues(client, "default", *(open_queue(client, "default", name) for name in ("prompts", "samples")))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    rows = [conversation(index) for index in range(NUM_ROWS)]
    write_rows(tmp_path / "rows.jsonl", [*rows, rows[0], "no JSON", {"id": "<script>", "messages": 3}])
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=128")


def _document() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "report.json").read_text()))


@pytest.mark.usefixtures("queues")
def test_a_run_has_a_report_while_it_is_under_way_and_at_its_end(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journaling, "_EVERY_S", 0.02)
    assert shell.run("feed", "rows.jsonl").code == 0
    monkeypatch.setenv("EAGLEFEED_ACCESS__TOKEN", "a-token-that-nobody-may-see")
    ended = shell.run("report", "--json")
    assert ended.code == 0, ended.err
    assert (ended.document["state"], ended.document["sentence"]) == ("stopped", "Stopped with 6 of 6 items left.")
    page = (FOLDER / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert "nobody-may-see" not in page + (FOLDER / "report.json").read_text()
    assert shell.run("produce").code == 0
    ended = shell.run("train", "--json")
    assert Path(ended.document["report"]) == FOLDER / "report.html"
    _check_end(_document())
    assert "All 6 items are produced and trained on." in (FOLDER / "report.html").read_text()
    (FOLDER / "report.json").unlink()
    (FOLDER / "report.json" / "in-the-way").mkdir(parents=True)
    ended = shell.run("train", "--json")  # nothing is left to do but to write the report
    assert ended.code == 0, ended.err
    assert "report" not in ended.document
    assert "report_not_written" in ended.err
    assert shell.run("report", "-o", "elsewhere").out.splitlines()[1] == "elsewhere/report.html"
    assert sorted(path.name for path in Path("elsewhere").iterdir()) == ["report.html", "report.json"]


def _check_end(document: dict[str, Any]) -> None:
    assert document["outcome"]["state"] == "done"
    fed, (lane,), (trainer,) = document["fed"], document["lanes"], document["trainers"]
    assert (fed["accepted"], fed["duplicates"], fed["rejected"], fed["queued"]) == (NUM_ROWS, 1, 2, NUM_ROWS)
    assert sum(fed["reasons"].values()) == 2
    assert (lane["total"], lane["done"], lane["dead"], lane["left"]) == (NUM_ROWS, NUM_ROWS, 0, 0)
    assert (document["produced"], document["producers"]["produced"]) == (NUM_ROWS, NUM_ROWS)
    assert document["producers"]["num_tokens"] == fed["tokens"] > 0
    assert (trainer["step"], trainer["acked"]) == (NUM_ROWS, NUM_ROWS)
    accuracies = trainer["accuracies"]
    assert trainer["accept_length_estimate"] == pytest.approx(
        1 + accuracies[0] + accuracies[0] * accuracies[1] + accuracies[0] * accuracies[1] * accuracies[2]
    )
    assert document["contract"]["max_length"] == 128
    told = [event["what"] for event in document["timeline"]]
    assert told[0] == "fed rows.jsonl: 6 new items, 2 rows rejected"
    assert "trainers of group main exported the draft of step 6" in told
    assert {worker["state"] for worker in document["workers"]} == {"ended"}
    assert len(document["series"]) >= 1


def test_a_run_that_is_not_there_gets_neither_report_nor_folder(shell: Shell, queues: RunQueues) -> None:
    assert shell.run("report", "--run", "other").code == 2
    ended = shell.run("report", "--run", "other", "--redis", queues.address)
    assert ended.code == 2
    assert "nothing is known of this run" in ended.err
    assert not Path("runs/other").exists()


def test_what_ends_by_an_error_has_a_report_too_and_the_error_goes_on(
    queues: RunQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="broke"), reported(load_settings(None, []), queues):
        raise StorageError("broke")
    assert _document()["outcome"]["state"] == "not_fed"


def test_an_evaluation_is_noted_before_the_report_is_written(
    queues: RunQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fact = {"accept_length": 1.625, "accept_length_untrained": 1.0, "mismatches": 0, "num_prompts": 12}
    assert write_or_tell(load_settings(None, []), queues, {"evaluation": fact}) == FOLDER / "report.html"
    assert fact.items() <= _document()["evaluation"].items()
    assert "on 12 held-out prompts; 0 tokens differ" in (FOLDER / "report.html").read_text()


def test_a_queue_that_is_away_is_told_and_stops_nothing(
    queues: RunQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = fakeredis.FakeServer()
    server.connected = False
    gone = QueueClient(fakeredis.FakeRedis(server=server).connection_pool, address="redis://away", max_wait_s=0.1)
    away = RunQueues(gone, "default", queues.prompts, queues.samples)
    with structlog.testing.capture_logs() as logs, reported(load_settings(None, []), away) as told:
        pass
    assert (told.document, told.lines) == ({}, [])
    assert [entry["event"] for entry in logs] == ["report_not_written"]
    assert not (FOLDER / "report.html").exists()


def test_a_report_whose_code_does_not_load_is_told_and_stops_nothing(
    queues: RunQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "eaglefeed.ops.report", None)
    with structlog.testing.capture_logs() as logs, reported(load_settings(None, []), queues) as told:
        pass
    assert (told.document, told.lines) == ({}, [])
    assert [entry["event"] for entry in logs] == ["report_not_written"]


def test_a_report_replaces_an_earlier_one_and_what_a_killed_writer_left(tmp_path: Path) -> None:
    write_report(report_runs.empty(), tmp_path)
    old, young = (tmp_path / f".report.html.{name}.tmp" for name in ("old", "young"))
    for path in (old, young):
        path.touch()
    hours_ago = SYSTEM_CLOCK.time() - 2 * 3600
    os.utime(old, (hours_ago, hours_ago))
    written = write_report(report_runs.usual(), tmp_path)
    assert json.loads(written.document.read_text())["run"] == "weekend"
    assert not old.exists()
    assert young.exists()
