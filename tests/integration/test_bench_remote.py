"""The document of a remote target's bench, and its failures; the sizes are too small for figures, no time counts."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import Shell
from eaglefeed.bench import remote_plan, remote_run, remote_table
from eaglefeed.bench.comparison import Peer
from eaglefeed.bench.partners import Partner
from eaglefeed.bench.plan import Reading
from eaglefeed.bench.remote_answers import SMALL_TOKENS, Answer, write_answers
from eaglefeed.bench.remote_bed import RemoteBed, Server
from eaglefeed.bench.remote_peers import find_remote_peer, remote_peer
from eaglefeed.bench.remote_plan import RemotePlan
from eaglefeed.cli import main
from eaglefeed.errors import EaglefeedError

TINY = RemotePlan(
    rounds=2,
    tokens=64,
    hidden=256,
    draft_vocab=512,
    requests=2,
    several=2,
    peer_requests=1,
    small_requests=10,
    sleep_s=0.02,
    sleeping_requests=8,
    memory_tokens=4096,
    slow_clients=2,
    growth_warm_up=20,
    growth_requests=40,
    quick=True,
)
# bfloat16 aux states, float32 target_probs, three int64 a token, and position_mask.
TOKEN_BYTES = 3 * 256 * 2 + 512 * 4 + 3 * 8 + 1
REQUIREMENTS = "src/eaglefeed/bench/peers/requirements/stores.txt"
OWN_BOUNDS = {
    "wire_over_raw_tcp": (0.5, "higher"),
    "gloo_over_bare_gloo": (0.8, "higher"),
    "two_servers_over_one": (1.8, "higher"),
    "server_memory_answers": (1.0, "lower"),
    "server_memory_growth_10k": (2.0, "lower"),
}
PEER_BOUNDS = {"wire_bytes_over_nemo_automodel": (4.0, "higher")}
ANSWER_BYTES = 64 * TOKEN_BYTES
# A process that measures: every answer takes half a second, or what it is told.
FAKE_PEER = """
import json, sys
def say(**fields): print(json.dumps(fields), flush=True)
role = sys.argv[-1]
if role == "about":
    say(version="1", settings="none", does_more=["nothing"], does_less=["everything"])
    sys.exit()
task = json.loads(sys.stdin.readline())
say(ready=True, url="http://127.0.0.1:1")
for line in sys.stdin:
    if FAILS: sys.exit("the peer broke")
    say(took_s=json.loads(line)["count"] * task.get("answer_s", 0.5))
"""


def fake_peer(folder: Path, *, failing: bool = False) -> Path:
    bin_folder = folder / "stores" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "fake.py").write_text(FAKE_PEER.replace("FAILS", str(failing)))
    python = bin_folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {bin_folder}/fake.py "$@"\n')
    python.chmod(0o755)
    return folder


def bench(*options: str | Path) -> dict[str, Any]:
    """The document of `eaglefeed bench remote --quick` at tiny sizes, where its bounds mean nothing."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        patch.setattr(remote_plan, "QUICK", TINY)
        main(["bench", "remote", "--quick", "--json", *map(str, options)])
    return dict(json.loads(out.getvalue()))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """That of real processes, without the peer."""
    return bench("--no-peers")


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """That of processes which say that an answer takes half a second by the peer, and a quarter by everybody else."""
    peer = find_remote_peer(fake_peer(tmp_path))
    command = [sys.executable, str(tmp_path / "stores" / "bin" / "fake.py")]

    @contextlib.contextmanager
    def opened(_plan: RemotePlan, _peer: Peer | None) -> Iterator[RemoteBed]:
        with Partner("us", command, {"answer_s": 0.25}) as us, remote_peer(peer, {}) as they:
            us.line()
            answers = {TINY.tokens: Answer(tmp_path, ANSWER_BYTES)}
            yield RemoteBed(answers=answers, client=us, small=Server(us), slow=Server(us), bare=us, peer=they)

    monkeypatch.setattr(remote_run, "opened_remote_bed", opened)
    monkeypatch.setattr(
        remote_run, "measure_slow_clients", lambda *_: [Reading("memory.peak_over_in_flight", "answers/request", 0.75)]
    )
    monkeypatch.setattr(remote_run, "measure_growth", lambda *_: [Reading("memory.growth", "MB", 1.5)])
    return remote_run.run_remote_bench(TINY, peer, tell=lambda _line: None)


def medians(document: Mapping[str, Any]) -> dict[str, float]:
    return {name: figure["median"] for name, figure in document["figures"].items()}


def bounds(document: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    assert all(set(entry) == {"name", "value", "bound", "better"} for entry in document["must"])
    return {entry["name"]: (entry["bound"], entry["better"]) for entry in document["must"]}


def test_the_command_measures_all_paths_and_lists_its_own_bounds(document: dict[str, Any]) -> None:
    assert bounds(document) == OWN_BOUNDS
    assert document["peers"] is None
    assert {"machine", "versions", "figures", "sizes"} <= set(document)
    assert document["quick"] is True
    assert document["sizes"]["answer_bytes"] == ANSWER_BYTES
    ways = ("http.in_flight_1", "http.in_flight_2", "gloo.in_flight_1", "gloo.in_flight_2")
    assert {f"{kind}.{way}" for kind in ("wire", "requests") for way in ways} <= set(document["figures"])
    positive = [figure for name, figure in document["figures"].items() if name != "memory.growth"]
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in positive)


def test_with_a_peer_its_bounds_are_there_too(compared: dict[str, Any]) -> None:
    assert json.loads(json.dumps(compared)) == compared
    assert bounds(compared) == OWN_BOUNDS | PEER_BOUNDS
    assert set(compared["peers"]) == {"nemo-automodel"}
    assert compared["peers"]["nemo-automodel"]["medians"]["requests.nemo-automodel.in_flight_1"] == pytest.approx(2)


def test_rates_are_what_each_process_timed(compared: dict[str, Any]) -> None:
    found = medians(compared)
    for way in ("in_flight_1", "in_flight_2"):
        for who, rate in (("nemo-automodel", 2), ("http", 4), ("gloo", 4)):
            assert found[f"requests.{who}.{way}"] == pytest.approx(rate)
            assert found[f"wire.{who}.{way}"] == pytest.approx(rate * ANSWER_BYTES / 1e9)
    assert found["bare.tcp"] == found["bare.gloo"] == pytest.approx(4 * ANSWER_BYTES / 1e9)
    assert found["small.nemo-automodel.in_flight_1"] == pytest.approx(2)
    assert found["small.http.in_flight_2"] == found["sleeping.servers_2"] == pytest.approx(4)


def test_each_bound_is_computed_of_its_figures(compared: dict[str, Any], document: dict[str, Any]) -> None:
    value = {entry["name"]: entry["value"] for entry in compared["must"]}
    assert value["wire_bytes_over_nemo_automodel"] == pytest.approx(2)
    assert value["wire_over_raw_tcp"] == value["gloo_over_bare_gloo"] == value["two_servers_over_one"]
    assert value["two_servers_over_one"] == pytest.approx(1)
    assert (value["server_memory_answers"], value["server_memory_growth_10k"]) == (0.75, 1.5)
    found = medians(document)
    value = {entry["name"]: entry["value"] for entry in document["must"]}
    http, gloo = found["wire.http.in_flight_1"], found["wire.gloo.in_flight_1"]
    assert value["wire_over_raw_tcp"] == pytest.approx(http / found["bare.tcp"])
    assert value["gloo_over_bare_gloo"] == pytest.approx(gloo / found["bare.gloo"])
    assert value["two_servers_over_one"] == pytest.approx(found["sleeping.servers_2"] / found["sleeping.servers_1"])
    assert value["server_memory_growth_10k"] == found["memory.growth"]


def test_memory_is_counted_in_answers_over_the_requests_in_flight(document: dict[str, Any]) -> None:
    found = medians(document)
    # Two clients that do not read, and one whose turn has not come.
    assert found["memory.in_flight"] == 3
    assert found["memory.peak"] > 1.5
    value = {entry["name"]: entry["value"] for entry in document["must"]}
    assert value["server_memory_answers"] == pytest.approx(found["memory.peak"] / 3)


def test_a_sleeping_target_is_as_fast_as_it_sleeps(document: dict[str, Any]) -> None:
    # One forward at a time, of 20 ms at least.
    assert medians(document)["sleeping.servers_1"] <= 1 / 0.02
    assert medians(document)["sleeping.servers_2"] <= 2 / 0.02


def test_its_tables_hold_every_figure(compared: dict[str, Any], document: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for result in (document, compared):
        page.write_text("before\n<!-- figures: begin -->\nlast year's\n<!-- figures: end -->\nafter\n")
        (tmp_path / "result.json").write_text(json.dumps(result))
        remote_table.main(tmp_path / "result.json", page)
        written = page.read_text()
        assert "last year's" not in written
        assert all(f"`{name}`" in written for name in [*bounds(result), *result["figures"]])


def test_a_missing_peer_is_a_failure_of_the_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ended = Shell(capsys).run("bench", "remote", "--json", "--quick", "--peers-folder", tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert "nemo-automodel: this peer is not installed" in ended.err
    assert "make bench-peers" in ended.err


def test_a_peer_that_fails_is_a_failure_of_the_comparison(tmp_path: Path) -> None:
    peer = find_remote_peer(fake_peer(tmp_path, failing=True))
    answer = pytest.raises(EaglefeedError, match=r"nemo-automodel: it ended.*the peer broke")
    with remote_peer(peer, {}) as client, answer:
        client.ask(tokens=1, count=1, in_flight=1, check=False)


@pytest.fixture
def small_answer(tmp_path: Path) -> Path:
    return write_answers(tmp_path, TINY)[SMALL_TOKENS].path


def other_answer(path: Path) -> Path:
    """The same but for one bit."""
    tensors = load_file(path)
    tensors["target_probs"].view(torch.uint8)[0, -1, -1] ^= 1
    save_file(tensors, path.with_name("other"))
    return path.with_name("other")


def test_an_answer_that_is_not_the_servers_ends_the_bench(small_answer: Path) -> None:
    command = [sys.executable, "-m", "eaglefeed.bench.remote_worker"]
    serving = {"answers": {SMALL_TOKENS: str(small_answer)}, "device": "cpu", "sleep_s": 0, "max_in_flight": 1}
    with Partner("server", [*command, "serve"], serving | {"are_copied": False}) as server:
        words = {"urls": [server.line()["url"]], "data_plane": "http", "device": "cpu"}
        models = {"http": words | {"in_flight": 1, "draft_vocab": 64}}
        fetching = {"answers": {SMALL_TOKENS: str(other_answer(small_answer))}, "models": models}
        with Partner("client", [*command, "fetch"], fetching) as client:
            client.line()
            run = {"model": "http", "tokens": SMALL_TOKENS, "count": 1, "in_flight": 1}
            assert client.ask(**run, check=False)["took_s"] > 0
            with pytest.raises(EaglefeedError, match="target_probs is not what the server has"):
                client.ask(**run, check=True)


def is_installed() -> bool:
    """Whether `make bench-peers` has made this version's environment of the peer."""
    wanted, made = (Path(path) for path in (REQUIREMENTS, ".bench-peers/stores/installed.txt"))
    return made.exists() and made.read_bytes() == wanted.read_bytes()


@pytest.mark.skipif(not is_installed(), reason="make bench-peers was not run")
def test_the_peer_that_is_installed_answers_with_what_it_was_given(small_answer: Path) -> None:
    peer = find_remote_peer(Path(".bench-peers"))
    with remote_peer(peer, {str(SMALL_TOKENS): str(small_answer)}) as client:
        assert client.ask(tokens=SMALL_TOKENS, count=3, in_flight=2, check=True)["took_s"] > 0
