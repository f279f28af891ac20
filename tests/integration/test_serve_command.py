"""`eaglefeed serve-target` and `python -m eaglefeed.producer.server`: one server, two ways to start it."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import eaglefeed.producer.server
from commands import Shell, save_tiny_target
from eaglefeed.errors import ConfigError
from eaglefeed.producer.loading import load_target
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.protocol import READY, ModelInfo
from target_servers import Asker

TOKEN = "-".join(["a", "test's", "own", "token"])
PROGRAMS = {"command": ["-m", "eaglefeed", "serve-target", "target.dtype=float32", "serve.max_in_flight=2"]}
PROGRAMS["module"] = ["-m", "eaglefeed.producer.server", "--dtype", "float32"]
AUX = (4, 0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    (path / "token").write_text(TOKEN + "\n")
    save_tiny_target(path / "tiny")
    return path


def test_both_ways_serve_the_target_as_this_process_runs_it_and_end_well_on_sigterm(folder: Path):
    options = ["--target", folder / "tiny", "--port", "0", "--token-file", folder / "token", "--json"]
    words = [*map(str, options), "--aux-layer-ids", *map(str, AUX)]
    ids = torch.tensor([[5, 9, 33, 2, 60, 7], [8, 3, 50, 0, 0, 0]])
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    torch.set_num_threads(1)
    target = HFEagle3TargetModel(load_target(str(folder / "tiny")), AUX)
    wanted = target.generate_batch(ids, real, real).tensors()
    with ExitStack() as stack:
        started = {name: stack.enter_context(started_with([*start, *words])) for name, start in PROGRAMS.items()}
        for name, process in started.items():
            ready = next_document(process)
            assert ready["nccl_port"] > 0, name
            info = ModelInfo.model_validate_json(json.dumps(ready["model"]))
            assert (info.aux_layer_ids, info.dtype, info.target_fingerprint) == (AUX, "float32", target.fingerprint())
            with Asker(ready["url"], token=TOKEN) as client:
                assert client.call(READY, method="GET", timeout_s=10).status == 200
                answer = client.ask((ids, real, real), exact=True).tensors
            assert all(torch.equal(answer[name], tensor) for name, tensor in wanted.items())
            process.send_signal(signal.SIGTERM)
            assert next_document(process)["answered"] == 1
            assert process.wait(30) == 0


@contextmanager
def started_with(words: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def next_document(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "access.token_file"),
        (["--token-file", "{folder}/none"], 2, "token file cannot be read"),
        (["--aux-layer-ids", "1", "1", "2"], 3, "aux_layer_ids"),
        (["--target", "./nowhere"], 4, "no such folder"),
        (["--tp-size", "2"], 2, "target.tp_size"),
    ],
)
@pytest.mark.parametrize("way", PROGRAMS)
def test_what_a_user_can_get_wrong_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], way: str, words: list[str], code: int, said: str
):
    words = ["--target", str(folder / "tiny"), "--port", "0", *(word.format(folder=folder) for word in words)]
    if way == "command":
        ended = Shell(capsys).run("serve-target", *words)
        assert ended.code == code
        err = ended.err
    else:
        with pytest.raises(SystemExit) as exited:
            eaglefeed.producer.server.main(words)
        assert exited.value.code == code
        err = capsys.readouterr().err
    assert said in err
    assert err.startswith("eaglefeed: ")
    assert err.count("\n") == 1


def test_the_help_shows_the_layers_as_they_are_typed(capsys: pytest.CaptureFixture[str]):
    ended = Shell(capsys).run("serve-target", "--help")
    assert "--aux-layer-ids A B C" in " ".join(ended.out.split())


@pytest.mark.parametrize("option", ["--port", "--nccl-port"])
@pytest.mark.parametrize("way", PROGRAMS)
def test_a_port_in_use_is_found_before_the_target_is_loaded(capsys: pytest.CaptureFixture[str], way: str, option: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--target", "./nowhere", "--port", "0", option, port]
        if way == "command":
            ended = Shell(capsys).run("serve-target", *words)
            code, err = ended.code, ended.err
        else:
            with pytest.raises(SystemExit) as exited:
                eaglefeed.producer.server.main(words)
            code, err = exited.value.code, capsys.readouterr().err
    assert code == 2
    assert f"127.0.0.1 port {port}: cannot listen" in err
    assert "0 takes a free one" in err
    assert "nowhere" not in err


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "eaglefeed.storage.serving", None)
    with pytest.raises(ConfigError, match=r"pip install 'eaglefeed\[serve\]'"):
        eaglefeed.producer.server.check_server("127.0.0.1", "")
