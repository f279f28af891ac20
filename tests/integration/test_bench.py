"""The bench's document and its failures, at sizes that are too small for figures; no time is looked at."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Shell
from eaglefeed.bench import table
from eaglefeed.bench.bed import Bed, opened_bed
from eaglefeed.bench.comparison import PEERS, find_peers, measure_peers
from eaglefeed.bench.items import PAYLOAD_BYTES, make_items
from eaglefeed.bench.musts import missed
from eaglefeed.bench.plan import Plan
from eaglefeed.bench.run import run_bench
from eaglefeed.errors import ConfigError, EaglefeedError
from eaglefeed.schema.refs import decode_ref
from queue_servers import real_servers

TINY = Plan(
    rounds=1,
    cycle_messages={16: 32, 128: 256},
    end_to_end_messages={1: 4, 16: 32},
    peer_share=0.0,
    memory_items=256,
    few=64,
    many=128,
    latency_calls=3,
    idle_leases=3,
    server_calls=10,
    handovers=4,
)
OWN_MUSTS = {
    "server_cpu_us_a_message_batch_16": 12.0,
    "server_cpu_us_a_message_batch_128": 8.0,
    "lease_ack_p50_many_over_few_ready": 1.1,
    "nothing_expired_check_ms": 0.2,
    "longest_script_ms_batch_1000": 5.0,
    "renew_1000_over_1_item": 1.5,
    "leased_bytes_over_payload": 600.0,
    "done_bytes": 100.0,
    "enqueue_to_lease_p50_ms": 2.0,
}
# A peer as its driver would be: its bodies end half a second after the first put.
FAKE_PEER = """
import json, sys, time
def say(**fields): print(json.dumps(fields), flush=True)
role = sys.argv[-1]
if role == "about":
    variant = {"messages": 1000, "settings": "none"}
    say(version="1", client="2", variants={"default": variant}, bulk_put=False, does_more=["nothing"])
    sys.exit()
task = json.loads(sys.stdin.readline())
if FAILS: sys.exit("the peer broke")
say(ready=True)
if role == "put":
    sys.stdin.readline()
    say(start=100.0)
    say(end=100.25)
else:
    say(end=100.5)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    if not real_servers():
        pytest.skip("no server is installed")
    with opened_bed(None) as found:
        yield found


def fake_peers(folder: Path, *, failing: str = "") -> Path:
    for name in PEERS:
        bin_folder = folder / name / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "fake.py").write_text(FAKE_PEER.replace("FAILS", str(name == failing)))
        python = bin_folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {bin_folder}/fake.py "$@"\n')
        python.chmod(0o755)
    return folder


def quiet(_line: str) -> None:
    """Tell nobody."""


def test_the_document_holds_every_bound_and_every_peer(bed: Bed, tmp_path: Path) -> None:
    document: dict[str, Any] = run_bench(bed, TINY, find_peers(fake_peers(tmp_path)), tell=quiet)
    assert json.loads(json.dumps(document)) == document
    entries = {entry["name"]: entry for entry in document["must"]}
    higher = {"end_to_end_over_fastest_peer_batch_1": 2.0, "end_to_end_over_fastest_peer_batch_16": 10.0}
    assert {name: entry["bound"] for name, entry in entries.items()} == OWN_MUSTS | higher
    assert all(set(entry) == {"name", "value", "bound", "better"} for entry in document["must"])
    assert {name for name, entry in entries.items() if entry["better"] == "higher"} == set(higher)
    assert all(figure["min"] <= figure["median"] <= figure["max"] for figure in document["figures"].values())
    assert set(document["peers"]) == set(PEERS)
    # Ten messages, of which the last body ended half a second after the first put.
    assert {peer["messages_a_second"] for peer in document["peers"].values()} == {20.0}
    ours = document["figures"]["end_to_end.ack_each.batch_1"]["median"]
    assert entries["end_to_end_over_fastest_peer_batch_1"]["value"] == pytest.approx(ours / 20.0)
    assert bed.client.call("DBSIZE") == 0
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    (tmp_path / "bench.json").write_text(json.dumps(document))
    table.main(tmp_path / "bench.json", page)
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "old" not in written
    assert all(f"`{name}`" in written for name in [*entries, *document["figures"]])


def test_a_missing_peer_is_a_failure_of_the_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (fake_peers(tmp_path) / "saq" / "bin" / "python").unlink()
    ended = Shell(capsys).run("bench", "queue", "--json", "--quick", "--peers-folder", tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert "saq: this peer is not installed" in ended.err
    assert "make bench-peers" in ended.err


def test_a_peer_that_fails_is_a_failure_of_the_comparison(bed: Bed, tmp_path: Path) -> None:
    peers = find_peers(fake_peers(tmp_path, failing="bullmq"))[-1:]
    with pytest.raises(EaglefeedError, match=r"bullmq: it ended.*the peer broke"):
        list(measure_peers(bed, TINY, peers))
    bed.clear()


def test_a_missed_bound_ends_a_full_measurement_and_is_only_told_by_a_quick_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = {"name": "fast_enough", "value": 1.0, "bound": 2.0, "better": "higher"}
    monkeypatch.setattr("eaglefeed.bench.bed.opened_bed", lambda _redis: contextlib.nullcontext())
    monkeypatch.setattr("eaglefeed.bench.run.run_bench", lambda *_args, **_options: {"must": [missed]})
    monkeypatch.setattr("eaglefeed.bench.table.render", lambda _document: [])
    shell = Shell(capsys, "bench", "queue", "--no-peers", "--json")
    quick, full = shell.run("--quick"), shell.run()
    assert (quick.code, quick.document, full.code, full.document) == (0, {"must": [missed]}, 1, {"must": [missed]})
    said = "fast_enough 1 (higher than 2 is wanted)"
    assert f"which says nothing: {said}" in quick.err
    assert f"a bound is missed, got {said}" in full.err


def test_a_missed_bound_is_named_on_either_side() -> None:
    entries = [
        {"name": "fast_enough", "value": 2.0, "bound": 2.0, "better": "higher"},
        {"name": "too_slow", "value": 1.9, "bound": 2.0, "better": "higher"},
        {"name": "small_enough", "value": 5.0, "bound": 5.0, "better": "lower"},
        {"name": "too_large", "value": 5.1, "bound": 5.0, "better": "lower"},
    ]
    assert [told.split()[0] for told in missed(entries)] == ["too_slow", "too_large"]


def test_a_database_that_holds_something_is_left_alone(bed: Bed) -> None:
    bed.client.call("SET", "mine", "1")
    with pytest.raises(ConfigError, match="not empty"), opened_bed(bed.url):
        pass
    assert bed.client.call("GET", "mine") == b"1"
    bed.clear()


def test_its_refs_are_those_of_a_run() -> None:
    first, second = make_items(2, start=7)
    assert (len(first.id), first.id == second.id, len(first.payload)) == (32, False, PAYLOAD_BYTES)
    ref = decode_ref(second.payload)
    assert (ref.sample_id, ref.stored_bytes) == (second.id, second.stored_bytes)
    assert second.id in ref.feature_keys["input_ids"]


@pytest.mark.skipif(not Path(".bench-peers").is_dir(), reason="make bench-peers was not run")
def test_the_drivers_of_installed_peers_start() -> None:
    assert [peer.name for peer in find_peers(Path(".bench-peers"))] == list(PEERS)
    assert not {"rq", "dramatiq", "saq", "taskiq", "bullmq"} & set(sys.modules)
