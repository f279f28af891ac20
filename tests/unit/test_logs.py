"""Log lines: one JSON object each off a terminal, and the same names for the same ids everywhere."""

import ast
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import eaglefeed
from eaglefeed import logs

SOURCES = [path for path in Path(eaglefeed.__file__).parent.rglob("*.py") if "get_logger" in path.read_text("utf-8")]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
OTHER_NAMES = {
    "lease": {"token", "tokens", "lease_token"},
    "sample_id": {"id", "item", "item_id", "sample", "ref", "prompt_id"},
    "sample_ids": {"ids", "items", "item_ids", "samples_ids"},
    "reason": {"error", "err", "exc", "message", "why"},
    "worker": {"consumer", "worker_name"},
    "run": {"run_id", "namespace"},
}


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """What was logged; logging is set back afterwards."""
    before = structlog.get_config()
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logs._bound.clear()
    structlog.configure(**before)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a logger in the package, and where it stands."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
            if is_call and isinstance(node.func.value, ast.Name) and node.func.value.id in {"log", "_log"}:
                yield f"{path.name}:{node.lineno}", node


def test_events_are_names_and_ids_have_one_name_each_in_the_whole_package() -> None:
    found = list(calls())
    assert len(found) > 40, "the loggers are called otherwise now"
    for where, call in found:
        (event,) = call.args
        assert re.fullmatch(r"[a-z][a-z0-9_]+", str(getattr(event, "value", ""))), where
        for keyword in call.keywords:
            for wanted, others in OTHER_NAMES.items():
                assert keyword.arg not in others, f"{where}: {keyword.arg}, elsewhere it is {wanted}"


def test_off_a_terminal_each_line_is_one_json_object_with_what_was_bound(lines: Lines) -> None:
    logs.configure(run="r")
    logs.bind(role="producer", worker="host-1-ab")
    logs.get_logger("test").warning("lease_lost", lease=7, sample_ids=["a", "b\nc"])
    (line,) = lines()
    assert re.fullmatch(r"\d{4}-.*Z", line.pop("timestamp"))
    wanted = {"run": "r", "role": "producer", "worker": "host-1-ab", "lease": 7, "sample_ids": ["a", "b\nc"]}
    assert line == {"event": "lease_lost", "level": "warning"} | wanted


def test_a_line_of_any_thread_says_whose_it_is(lines: Lines) -> None:
    logs.configure(run="r")
    logs.bind(role="trainer", worker="w")
    thread = threading.Thread(target=lambda: logs.get_logger("test").info("from_a_thread", run="another"))
    thread.start()
    thread.join()
    (line,) = lines()
    assert (line["run"], line["role"], line["worker"]) == ("another", "trainer", "w")


def test_what_an_earlier_command_of_this_process_bound_is_forgotten(lines: Lines) -> None:
    logs.configure(run="r")
    logs.bind(role="producer")
    logs.configure(run="s")
    logs.get_logger("test").info("begun")
    (line,) = lines()
    assert (line["run"], "role" in line) == ("s", False)
