"""Bodies that would run code if anything unpickled them: no endpoint does, and nothing in this repository can."""

import ast
import gzip
import http.client
import io
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import peers
from coded_target import CodedTarget, check_answer, row
from eaglefeed.schema import protocol
from eaglefeed.schema.protocol import SESSION_HEADER, TENSOR_BODY
from target_servers import Asker, rows_body, serving

ROOT = Path(__file__).parents[2]
SESSION = "0" * 32
ASKED = (protocol.HEALTH, protocol.READY, protocol.METRICS)
POSTED = (
    protocol.MODEL_INFO,
    protocol.INPUT_EMBEDDINGS,
    protocol.TARGET_ASSETS,
    protocol.SET_VOCAB_MAPPING,
    protocol.GENERATE,
    protocol.INIT_NCCL,
    protocol.HEARTBEAT,
    protocol.DISCONNECT,
)
READS_NO_BODY = {protocol.MODEL_INFO, protocol.INPUT_EMBEDDINGS, protocol.TARGET_ASSETS, protocol.DISCONNECT}


class Creates:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (open, (str(self.path), "w"))


def bodies(trap: Path) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.save({"input_ids": Creates(trap)}, saved)
    good = bytes(rows_body(row(1, 2)))
    return {
        "a pickle": pickle.dumps(Creates(trap)),
        "a pickle of protocol 0": pickle.dumps(Creates(trap), protocol=0),
        "torch.save": saved.getvalue(),
        "a pickle behind safetensors": good + pickle.dumps(Creates(trap)),
        "a pickle in a header": len(pickle.dumps(Creates(trap))).to_bytes(8, "little") + pickle.dumps(Creates(trap)),
        "gzip": gzip.compress(good),
        "a bomb": gzip.compress(bytes(2**24)),
        "msgpack without end": b"\xdd\xff\xff\xff\xff" * 20,
        "JSON of 10,000 depths": b"[" * 10_000,
        "no bytes": b"",
        "random bytes": bytes(range(256)) * 8,
        "a header of 2**63 bytes": (2**63 - 1).to_bytes(8, "little") + b"{}",
    }


KINDS = list(bodies(Path("trap")))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(CodedTarget()) as server:
        yield server.url


def send(url: str, path: str, body: bytes, *, method: str = "POST", **headers: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, body, {SESSION_HEADER: SESSION} | headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_endpoint_runs_what_it_is_sent(kind: str, url: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    body = bodies(trap)[kind]
    for path in POSTED:
        for headers in ({}, {"content-type": TENSOR_BODY}, {"content-encoding": "gzip"}):
            status = send(url, path, body, **headers)
            assert 400 <= status < 500 or path in READS_NO_BODY, (path, status)
    for path in ASKED:
        assert send(url, path, body) == 405
        assert send(url, path, body, method="GET") == 200
    assert not trap.exists()
    with Asker(url) as client:
        check_answer(client.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))


PATHS = (
    "/../../etc/passwd",
    "/generate/../health/x",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd",
    "/generate/",
    "/x\x0by",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_none_of_ours_is_not_found(path: str, url: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    connection._validate_path = lambda _path: None  # type: ignore[attr-defined] # that of a client without manners
    connection.request("POST", path, b"x")
    assert connection.getresponse().status in {400, 404}
    connection.close()


def test_a_producer_that_keeps_its_samples_runs_nothing_and_leaves_its_own_keys(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with ExitStack() as stack:
        store = stack.enter_context(peers.keeping())
        peers.put(store)
        url, nonce = f"http://127.0.0.1:{peers.port_of(store)}", store.uri.rpartition("/")[2]
        for body in bodies(trap).values():
            for path in (protocol.INIT_NCCL, protocol.GENERATE, f"/{nonce}/samples/x", f"/{nonce}/documents/x"):
                assert 400 <= send(url, path, body) < 500
        for path in ("samples/../../../etc/passwd", "samples/%2e%2e/%2e%2e/etc/passwd", "documents/..%2fx"):
            for method in ("GET", "DELETE"):
                assert send(url, f"/{nonce}/{path}", b"", method=method) in {404, 405}
    assert not trap.exists()


FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
UNPICKLES = {"torch.load", "numpy.load", "pandas.read_pickle", "torch.distributed.broadcast_object_list"}
RUNS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "builtins.eval"}


def faults_of(source: str) -> list[str]:
    """What of a module's text loads or runs code, whatever name it was given there."""
    tree, names, found = ast.parse(source), dict[str, str](), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for each in node.names:
                names[each.asname or each.name.partition(".")[0]] = origin + (
                    each.name if each.asname or origin else each.name.partition(".")[0]
                )
                if (origin + each.name).partition(".")[0] in FORBIDDEN:
                    found.append(f"{node.lineno}: {origin}{each.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, _called(node.value, names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [f"{node.lineno}: {what}" for what in _faults_of_call(node, _called(node.func, names))]
    return found


def _called(node: ast.AST, names: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).partition(".")
    return names.get(first, first) + dot + rest


def _faults_of_call(node: ast.Call, name: str) -> Iterator[str]:
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if name in RUNS or name.partition(".")[0] in FORBIDDEN:
        yield name
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in {"numpy.load", "np.load"} and given.get("allow_pickle", "False") != "False":
        yield "numpy.load with allow_pickle"
    if name in UNPICKLES - {"torch.load", "numpy.load"} or name.endswith(("_object_list", "gather_object")):
        yield name
    if given.get("shell", "False") != "False":
        yield "a shell"


def programs() -> list[Path]:
    folders = [ROOT / name for name in ("src", "scripts", "examples", "deploy")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    shebang = b"#!/usr/bin/env python"
    return [file for file in files if file.suffix == ".py" or file.read_bytes()[: len(shebang)] == shebang]


def test_nothing_here_unpickles_evaluates_or_starts_a_shell() -> None:
    files = programs()
    assert len(files) > 250
    found = {str(file.relative_to(ROOT)): faults_of(file.read_text(encoding="utf-8")) for file in files}
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "import torch\ntorch.load(f)",
        "import torch as t\nt.load(f, weights_only=False)",
        "from torch import load as fetch\nfetch(f)",
        "import torch\nread = torch.load\nread(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import yaml\nyaml.load(f, Loader=x)",
        "from yaml import load\nload(f)",
        "eval('1')",
        "import subprocess as s\ns.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import torch.distributed as dist\ndist.broadcast_object_list(x)",
    ],
)
def test_what_is_looked_for_is_found_under_any_name(source: str) -> None:
    assert faults_of(source)
