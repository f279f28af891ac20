"""The demo as a user starts it: the whole job on the real target, from a folder of the user's own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = [
    "produced",
    "acked",
    "lost",
    "dead",
    "redelivered",
    "loss_first",
    "loss_last",
    "accept_length",
    "accept_length_untrained",
    "accept_length_prompt_lookup",
    "bitwise_equal",
    "report",
    "seconds",
]


def _environment() -> dict[str, str]:
    """As a user has it: the demo chooses its own threads."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


@pytest.mark.target
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_keeps_every_promise_it_prints(tmp_path: Path) -> None:
    deep = tmp_path / ("a folder with a long name, " * 4)
    deep.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "eaglefeed", "demo", "--json"],
        cwd=deep,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    document = json.loads(ended.stdout.strip().split("\n")[-1])
    assert list(document) == KEYS
    assert document["produced"] == document["acked"] >= 200
    assert (document["lost"], document["dead"], document["bitwise_equal"]) == (0, 0, True)
    assert document["redelivered"] > 0
    assert document["loss_last"] < document["loss_first"]
    assert document["accept_length"] > 1.1 * document["accept_length_untrained"] >= 1.1
    assert document["accept_length_prompt_lookup"] >= 1.0
    assert "FAILED" not in ended.stderr
    assert list(deep.glob("runs/*/draft/export-*/model.safetensors"))
    told = json.loads(Path(document["report"]).with_name("report.json").read_text())
    assert told["outcome"]["state"] == "done"
    assert told["evaluation"]["accept_length"] == document["accept_length"]
    assert told["produced"] == document["produced"]
    assert len(told["series"]) > 1
    assert not list(deep.glob("runs/*/shards/*/*.safetensors"))


@pytest.mark.target
@pytest.mark.parametrize("moment", [b"preparing", b"fed "])
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, moment: bytes) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "eaglefeed", "demo"], cwd=tmp_path, env=_environment(), stderr=subprocess.PIPE
    )
    assert demo.stderr is not None
    assert any(line.startswith(moment) for line in demo.stderr)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert [process for process in Path("/proc").glob("[0-9]*") if str(tmp_path) in _about(process)] == []


def _about(process: Path) -> str:
    """Its command line and folder; a process that is gone has none."""
    try:
        return (process / "cmdline").read_text(errors="replace") + str((process / "cwd").readlink())
    except OSError:
        return ""
