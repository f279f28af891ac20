"""The document of the stores' bench and its failures, at sizes that are too small for figures; no time is looked at."""

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from commands import Shell
from eaglefeed.bench import storage_table
from eaglefeed.bench.storage_peers import STORE_PEERS, find_store_peers, served
from eaglefeed.bench.storage_plan import StoragePlan
from eaglefeed.bench.storage_run import run_storage_bench
from eaglefeed.bench.storage_sides import make_cold
from eaglefeed.errors import EaglefeedError

TINY = StoragePlan(
    rounds=2,
    tokens=64,
    hidden=4096,
    vocab=48,
    draft_vocab=32,
    moves=1,
    few=2,
    many=20,
    resident_calls=1,
    memory_tokens=64,
    memory_samples=8,
)
# bfloat16 aux states and target_probs, three int64 a token, and position_mask.
SAMPLE_BYTES = 64 * (3 * 4096 * 2 + 32 * 2 + 3 * 8 + 1)
HEADER_BYTES = 4096
BOUNDS = {
    "put_over_nemo_automodel": (5, "higher"),
    "get_over_nemo_automodel": (5, "higher"),
    "write_over_memmove": (0.35, "higher"),
    "write_over_save_file": (1.25, "higher"),
    "hot_read_over_memmove": (0.6, "higher"),
    "cold_read_over_load_file": (1.4, "higher"),
    "bytes_a_token_last_hidden_states": (33_000, "lower"),
    "bytes_a_token_fp8_aux": (21_000, "lower"),
    # One sample is written while the next is made.
    "producer_memory_samples": (2, "lower"),
    # Two ahead, four with the loop and one buffer that is read into; and one more.
    "trainer_memory_samples": (8, "lower"),
}
# A peer as its driver would be: every put takes half a second and every get a quarter.
FAKE_PEER = """
import json, sys
def say(**fields): print(json.dumps(fields), flush=True)
if sys.argv[-1] == "about":
    say(version="1", settings="none", does_more=["nothing"], does_less=["everything"])
    sys.exit()
task = json.loads(sys.stdin.readline())
say(ready=True)
for line in sys.stdin:
    if FAILS: sys.exit("the peer broke")
    say(took_s={"put": 0.5, "get": 0.25}.get(json.loads(line)["op"], 0.0))
"""


def fake_peers(folder: Path, *, failing: bool = False) -> Path:
    bin_folder = folder / "stores" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "fake.py").write_text(FAKE_PEER.replace("FAILS", str(failing)))
    python = bin_folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {bin_folder}/fake.py "$@"\n')
    python.chmod(0o755)
    return folder


def quiet(_line: str) -> None:
    """Tell nobody."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    peers = find_store_peers(fake_peers(folder / "peers"))
    relative = Path(os.path.relpath(folder / "measured"))  # as the command's own default is
    found = run_storage_bench(relative, TINY, peers, tell=quiet)
    assert not list((folder / "measured").iterdir())
    return found


def medians(document: Mapping[str, Any]) -> dict[str, float]:
    return {name: figure["median"] for name, figure in document["figures"].items()}


def test_the_document_holds_every_bound_and_every_peer(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document)) == document
    assert all(set(entry) == {"name", "value", "bound", "better"} for entry in document["must"])
    assert {entry["name"]: (entry["bound"], entry["better"]) for entry in document["must"]} == BOUNDS
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in document["figures"].values())
    assert set(document["peers"]) == set(STORE_PEERS) == {"nemo-automodel", "specforge", "speculators"}
    assert {"machine", "versions", "figures"} <= set(document)
    encodings = {name.split(".")[1] for name in document["figures"] if name.startswith("encoding.")}
    assert encodings == {"logits", "target_probs", "last_hidden_states", "fp8_aux"}


def test_a_peers_figures_are_what_its_driver_timed(document: dict[str, Any]) -> None:
    found = medians(document)
    for peer in STORE_PEERS:
        assert found[f"put.{peer}"] == pytest.approx(SAMPLE_BYTES / 0.5 / 1e9)
        assert found[f"get_hot.{peer}"] == found[f"get_cold.{peer}"] == pytest.approx(SAMPLE_BYTES / 0.25 / 1e9)
        for residents in (2, 20):
            assert found[f"residents.{residents}.put.{peer}"] == pytest.approx(500)
            assert found[f"residents.{residents}.get.{peer}"] == pytest.approx(250)
        assert document["peers"][peer]["medians"][f"put.{peer}"] == found[f"put.{peer}"]
    assert (found["loader.speculators.write"], found["loader.speculators.read_hot"]) == (500, 250)


def test_each_bound_is_computed_of_its_figures(document: dict[str, Any]) -> None:
    found = medians(document)
    value = {entry["name"]: entry["value"] for entry in document["must"]}
    ours, theirs = found["put.eaglefeed"], SAMPLE_BYTES / 0.5 / 1e9
    assert value["put_over_nemo_automodel"] == pytest.approx(ours / theirs)
    assert value["get_over_nemo_automodel"] == pytest.approx(found["get_hot.eaglefeed"] / (2 * theirs))
    assert value["write_over_memmove"] == pytest.approx(ours / found["memmove"])
    assert value["write_over_save_file"] == pytest.approx(ours / found["put.safetensors"])
    assert value["hot_read_over_memmove"] == pytest.approx(found["get_hot.eaglefeed"] / found["memmove"])
    assert value["cold_read_over_load_file"] == pytest.approx(
        found["get_cold.eaglefeed"] / found["get_cold.safetensors"]
    )
    assert value["producer_memory_samples"] == found["memory.producer"]
    assert value["trainer_memory_samples"] == found["memory.trainer"]


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        # Aux states, last hidden states, the argmax, and three int64.
        ("bytes_a_token_last_hidden_states", 3 * 4096 * 2 + 4096 * 2 + 4 + 3 * 8),
        # Aux states of one byte, with a scale.
        ("bytes_a_token_fp8_aux", 3 * 4096 + 4 + 4096 * 2 + 4 + 3 * 8),
    ],
)
def test_bytes_a_token_are_those_of_the_tensors_and_a_header(
    document: dict[str, Any], name: str, token_bytes: int
) -> None:
    value = {entry["name"]: entry["value"] for entry in document["must"]}[name]
    assert token_bytes < value <= token_bytes + HEADER_BYTES / TINY.tokens


def test_memory_is_counted_in_samples(document: dict[str, Any]) -> None:
    found = medians(document)
    assert found["memory.one_sample"] == pytest.approx(SAMPLE_BYTES / 1e6)
    # A trainer that keeps four, with two ahead, cannot have had less.
    assert found["memory.trainer"] > 6


def test_its_tables_hold_every_figure(document: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nlast year's\n<!-- figures: end -->\nafter\n")
    (tmp_path / "result.json").write_text(json.dumps(document))
    storage_table.main(tmp_path / "result.json", page)
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "last year's" not in written
    assert all(f"`{name}`" in written for name in [*BOUNDS, *document["figures"]])


def test_a_missing_peer_is_a_failure_of_the_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ended = Shell(capsys).run("bench", "storage", "--json", "--quick", "--dir", tmp_path, "--peers-folder", tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert "nemo-automodel: this peer is not installed" in ended.err
    assert "make bench-peers" in ended.err


def test_a_peer_that_fails_is_a_failure_of_the_comparison(tmp_path: Path) -> None:
    peers = find_store_peers(fake_peers(tmp_path, failing=True))[1:2]
    put = pytest.raises(EaglefeedError, match=r"specforge: it ended.*the peer broke")
    with served(peers, tmp_path, {"a": torch.zeros(2)}) as (side,), put:
        side.put(0)


def test_a_cold_file_is_not_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(2**20))
    assert is_cached(path)
    make_cold(tmp_path)
    assert not is_cached(path)


def is_cached(path: Path) -> bool:
    """Whether a read of its end has to wait for no device; skips where the file system cannot tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], 2**20 - 1, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        pytest.skip("this file system does not tell what is cached")
    finally:
        os.close(fd)


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What the peers' drivers share; it lives beside them, outside the package."""
    import eaglefeed.bench

    monkeypatch.syspath_prepend(str(Path(eaglefeed.bench.__file__).parent / "peers"))
    import store_protocol

    yield store_protocol
    del sys.modules["store_protocol"]


class DictStore:
    """A peer's store that may lose a bit."""

    def __init__(self, folder: Path, loses: bool) -> None:
        self._folder, self._loses, self._kept = folder, loses, dict[int, dict[str, torch.Tensor]]()

    def put(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        self._kept[number] = {name: tensor.clone() for name, tensor in tensors.items()}

    def get(self, number: int) -> dict[str, torch.Tensor]:
        if self._loses:
            self._kept[number]["a"].view(torch.uint8)[0] ^= 1
        return self._kept[number]

    def drop(self, number: int) -> None:
        del self._kept[number]

    def resident(self, number: int) -> Path:
        return self._folder / f"{number}"


def serve(
    protocol: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *operations: object, loses: bool = False
) -> None:
    save_file({"a": torch.tensor([float("nan"), 1.0])}, folder / "sample")
    lines = [{"folder": str(folder), "sample": str(folder / "sample")}, *operations]
    monkeypatch.setattr(sys, "argv", ["driver", "serve"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    protocol.main({}, lambda root, _tensors: DictStore(root, loses))


def test_a_driver_answers_each_operation_with_its_time(
    protocol: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put, drop = ({"op": name, "number": 3} for name in ("put", "drop"))
    get, fill = {"op": "get", "number": 3, "check": True}, {"op": "fill", "start": 5, "end": 8}
    serve(protocol, monkeypatch, tmp_path, put, get, drop, fill)
    ready, *times = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready == {"ready": True}
    assert [set(told) for told in times] == [{"took_s"}] * 4
    assert {path.name for path in tmp_path.iterdir()} == {"sample", "5", "6", "7"}


def test_a_peer_that_returns_another_sample_ends_the_comparison(
    protocol: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="a is not what was put"):
        serve(
            protocol,
            monkeypatch,
            tmp_path,
            {"op": "put", "number": 0},
            {"op": "get", "number": 0, "check": True},
            loses=True,
        )
