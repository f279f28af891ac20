"""A vLLM server that this process starts: it dies, it is not there, its starter dies. A stand-in plays the server."""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from eaglefeed.errors import ConfigError, TargetUnavailable
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engines import guard
from eaglefeed.producer.engines.vllm import VLLMEagle3TargetModel, open_vllm
from eaglefeed.producer.engines.vllm_launch import CONNECTOR_DIR, launch_of
from eaglefeed.producer.opening import open_target
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.storage.control import ControlClient, Refused
from fake_vllm import interpreter
from tiny_target import tiny_model, tiny_sizes

AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12]])
ONES = torch.ones_like(IDS)
WAIT_S = 20.0


@pytest.fixture
def model(tmp_path: Path) -> Any:
    torch.set_num_threads(1)
    model = tiny_model(hf.LlamaConfig(**tiny_sizes(max_position_embeddings=128)))
    model.save_pretrained(tmp_path / "model")
    return model


@pytest.fixture
def checkpoint(model: Any, tmp_path: Path) -> Checkpoint:
    return Checkpoint(str(tmp_path / "model"), dtype="float32")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path


def started(checkpoint: Checkpoint, place: Path, python: str) -> VLLMEagle3TargetModel:
    return open_vllm(checkpoint, AUX, device="cpu", compact=False, folder=place, python=python)


def eventually(condition: Any) -> bool:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_running(session: int) -> bool:
    return bool(subprocess.run(["pgrep", "--runstates", "RSD", "-g", str(session)], capture_output=True).stdout)


def test_an_engine_that_dies_at_its_start_is_told_with_the_end_of_its_log(
    checkpoint: Checkpoint, place: Path, tmp_path: Path
):
    with pytest.raises(TargetUnavailable, match=r"(?s)ended at its start.*No available memory for the cache blocks"):
        started(checkpoint, place, interpreter(tmp_path, fault="at start"))
    assert list(place.iterdir()) == []


def test_an_engine_that_is_started_here_answers_nobody_without_its_key(
    checkpoint: Checkpoint, place: Path, tmp_path: Path
):
    target = started(checkpoint, place, interpreter(tmp_path))
    try:
        server = target._server
        for token in ("", "another-key-than-its-own"):
            client = ControlClient(server.url, token=token)
            with pytest.raises(Refused) as refused:
                client.call("/v1/completions", b"{}", timeout_s=WAIT_S)
            assert refused.value.status == 401
            client.close()
        group = subprocess.run(["pgrep", "-a", "-g", str(server._process.pid)], capture_output=True, text=True).stdout
        assert "fake_vllm.py" in group
        assert server.key not in group
        assert server.key not in server._log_path.read_text()
    finally:
        target.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200),
        ("/v1/completions", 200),
        ("/invocations", 404),
        ("//v1/completions", 404),
        ("/v1", 404),
        ("/v2/embed", 404),
        ("/metrics", 404),
    ],
)
def test_what_the_key_of_an_engine_does_not_guard_is_shut(path: str, status: int):
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        said.append(message)

    said: list[Any] = []
    gate = runpy.run_path(str(CONNECTOR_DIR / "eaglefeed_gate.py"))["Gate"](app)
    asyncio.run(gate({"type": "http", "path": path}, None, send))
    assert said[0]["status"] == status


def test_an_engine_that_dies_in_its_work_is_started_again(
    checkpoint: Checkpoint, place: Path, tmp_path: Path, model: Any
):
    target = started(checkpoint, place, interpreter(tmp_path, fault="once"))
    try:
        first = target._server._process.pid
        got = target.generate_batch(IDS, ONES, ONES)
        wanted = HFEagle3TargetModel(model, AUX).generate_batch(IDS, ONES, ONES)
        torch.testing.assert_close(got.aux_hidden_states, wanted.aux_hidden_states, rtol=1e-4, atol=1e-4)
        assert target._server._process.pid != first
        assert target.max_positions == 128
        last = target._server._process.pid
    finally:
        target.close()
    assert list(place.iterdir()) == []
    assert eventually(lambda: not is_running(first) and not is_running(last))


def test_an_engine_that_cannot_be_started_again_is_told_with_its_log(
    checkpoint: Checkpoint, place: Path, tmp_path: Path
):
    target = started(checkpoint, place, interpreter(tmp_path))
    try:
        interpreter(tmp_path, fault="at start")  # in the place of the one before
        os.killpg(target._server._process.pid, signal.SIGKILL)
        with pytest.raises(TargetUnavailable, match=r"(?s)ended at its start.*No available memory"):
            target.generate_batch(IDS, ONES, ONES)
    finally:
        target.close()
    assert list(place.iterdir()) == []


STARTER = """
import sys
from pathlib import Path
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engines.vllm import open_vllm
name, place, python = sys.argv[1:]
target = open_vllm(
    Checkpoint(name, dtype="float32"), (4, 0, 2), device="cpu", compact=False, folder=Path(place), python=python
)
print(target._server._process.pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_and_its_folder_go_when_the_process_that_started_it_is_killed(
    model: Any, place: Path, tmp_path: Path
):
    words = [sys.executable, "-c", STARTER, str(tmp_path / "model"), str(place), interpreter(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        lines = iter(starter.stdout.readline, "")
        session = next(int(line) for line in lines if line.strip().isdigit())
        assert is_running(session)
        starter.kill()
    assert eventually(lambda: not is_running(session) and list(place.iterdir()) == [])


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The guard of a shell that ends by no signal but KILL, as does its child."""
    folder = tmp_path / "folder"
    folder.mkdir()
    script = f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/child; wait; wait"
    words = [sys.executable, "-I", guard.__file__, "0.3", str(folder), "sh", "-c", script]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    yield process, folder
    if is_running(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_what_does_not_end_by_itself_is_killed(stubborn: tuple[subprocess.Popen[bytes], Path], tmp_path: Path):
    process, folder = stubborn
    assert eventually((tmp_path / "child").exists)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(WAIT_S)
    assert not folder.exists()
    assert eventually(lambda: not is_running(process.pid))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"vLLM is not installed there.*pip install 'vllm>=0\.32'.*target\.engine_python"),
        ({"engine_python": "/nowhere/python"}, "not a Python interpreter"),
        ({"engine_python": "old"}, r"vLLM is too old there, wanted >=0\.32, got 0\.11\.2"),
    ],
)
def test_without_a_usable_vllm_the_error_says_what_to_install(
    model: Any, tmp_path: Path, options: dict[str, str], message: str
):
    if options.get("engine_python") == "old":
        options = {"engine_python": interpreter(tmp_path, version="0.11.2")}
    with pytest.raises(ConfigError, match=message):
        open_target(str(tmp_path / "model"), engine="vllm", **options)


def test_a_place_that_cannot_be_written_to_is_told(checkpoint: Checkpoint, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no place for captures.*target\.engine_dir"):
        started(checkpoint, tmp_path / "missing", interpreter(tmp_path))


def test_the_command_asks_for_room_for_the_longest_row_and_the_token_after_it(checkpoint: Checkpoint):
    layers = (1, 3, 5, 7)
    launch = launch_of(checkpoint, python="python", layers=layers, tp_size=2, max_length=2048, device="cpu")
    words = launch.command(1234, Path("/captures"))
    after = dict(pairwise(words))
    assert after["--max-model-len"] == "129"  # the target has 128 positions
    assert after["--tensor-parallel-size"] == "2"
    assert "--no-enable-prefix-caching" in words
    assert after["--kv-cache-memory-bytes"] == str(2**30)
    assert f"PYTHONPATH={CONNECTOR_DIR}" in words
    assert after["--middleware"] == "eaglefeed_gate.Gate"
    loaded = {"eaglefeed_connector.py", "eaglefeed_gate.py"}
    assert {path.name for path in CONNECTOR_DIR.iterdir() if path.name != "__pycache__"} == loaded
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7]' in after["--speculative-config"]
    on_gpu = launch_of(checkpoint, python="python", layers=layers, tp_size=1, max_length=64, device="cuda")
    assert "--kv-cache-memory-bytes" not in on_gpu.command(1, Path("/captures"))
    assert on_gpu.max_length == 65
