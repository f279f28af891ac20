"""`eaglefeed store`, as an operator uses it, on a run's local server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import samples as made
from commands import Shell, conversation, run_server, save_tiny_target, write_rows
from eaglefeed.producer.ledger import register
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from eaglefeed.queue.connection import QueueClient
from eaglefeed.schema.contract import CONTRACT_FILE, CONTRACT_RECORD, RunContract
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import Janitor, delete_released
from eaglefeed.storage.shared_dir import SharedDirStore

SHARDS = Path("runs/default/shards")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.checkpoint_every=4", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


@pytest.fixture
def client(shell: Shell, tmp_path: Path) -> Iterator[QueueClient]:
    """The run's server, kept running between commands."""
    with run_server(tmp_path / "runs" / "default") as opened:
        yield opened


@pytest.fixture
def samples(client: QueueClient) -> LeaseQueue:
    return open_queue(client, "default", "samples")


@pytest.fixture
def store(shell: Shell, tmp_path: Path) -> SharedDirStore:
    return SharedDirStore(tmp_path / SHARDS, durability="none")


def put(store: SharedDirStore, sample_id: str, token: int = 1, run_id: str = "default") -> SampleRef:
    tensors = made.tensors()
    return store.put(made.ref(tensors, sample_id=sample_id, token=token, run_id=run_id), tensors)


def item(ref: SampleRef) -> QueueItem:
    return QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)


def lease(queue: LeaseQueue, n: int = 1) -> Lease:
    got = queue.lease(n, visibility_timeout_s=60, consumer="test")
    assert isinstance(got, Lease)
    return got


def one_of_each(store: SharedDirStore, samples: LeaseQueue, prompts: LeaseQueue) -> dict[str, SampleRef]:
    """A shard in each state, by the state's name."""
    register(store, samples, "default")
    refs = {name: put(store, name) for name in ("dead_lettered", "released", "referenced", "orphan")}
    refs["foreign"] = put(store, "foreign", run_id="other")
    samples.put([item(refs[name]) for name in ("dead_lettered", "released", "referenced")])
    samples.nack(lease(samples).token, ["dead_lettered"], reason="bad", retryable=False)
    samples.ack(lease(samples).token, ["released"])
    prompts.put([QueueItem("leased", b"x")])
    refs["leased"] = put(store, "leased", lease(prompts).token)
    folder = store.root / "3f"
    folder.mkdir(exist_ok=True)
    (folder / "unreadable.1.safetensors").write_bytes(b"cut")
    return refs


def age(store: SharedDirStore) -> None:
    for path in store.root.rglob("*.safetensors"):
        os.utime(path, (1, 1))


# losing the queue


def learn(samples: LeaseQueue, store: SharedDirStore, n: int) -> list[str]:
    """What a trainer without checkpoints does with `n` samples."""
    held = lease(samples, n)
    ids = [each.id for each in held.items]
    assert list(samples.ack(held.token, ids).ok) == ids
    assert delete_released(samples, store) == n
    return ids


def test_a_run_goes_on_after_its_server_lost_everything(
    shell: Shell, client: QueueClient, samples: LeaseQueue, store: SharedDirStore, tmp_path: Path
) -> None:
    some = write_rows(tmp_path / "some.jsonl", [conversation(index) for index in range(6)])
    rows = write_rows(tmp_path / "all.jsonl", [conversation(index) for index in range(10)])
    shell.run("feed", some)
    assert shell.run("produce", "--json").document["produced"] == 6
    learned = learn(samples, store, 2)
    kept = {shard.key for shard in store.scan()}
    assert len(kept) == 4

    client.call("FLUSHALL")
    age(store)
    refused = shell.run("store", "gc")
    assert refused.code == 2
    assert "`eaglefeed store rebuild`" in refused.err
    assert "Traceback" not in refused.err
    assert not shell.run("store", "inspect", "--json").document["known"]

    rebuilt = shell.run("store", "rebuild")
    assert rebuilt.code == 0, rebuilt.err
    assert "4 samples are ready again" in rebuilt.out
    assert "at least once" in rebuilt.out
    assert {key_of(decode_ref(each.payload)) for each in samples.payloads()} == kept
    again = shell.run("store", "rebuild")
    assert again.code == 2
    assert "samples: not empty" in again.err

    fed = shell.run("feed", rows, "--json").document
    assert (fed["items"], fed["produced"], fed["queued"], fed["known"], fed["conflicts"]) == (10, 4, 6, 0, [])
    produced = shell.run("produce", "--json").document
    assert (produced["produced"], produced["dead"]) == (6, 0)
    assert (
        shell.run("store", "gc", "--json").document["kept"] + shell.run("store", "gc", "--json").document["young"] == 10
    )
    trained = shell.run("train", "--json")
    assert trained.code == 0, trained.err
    assert (trained.document["acked"], trained.document["drained"]) == (10, True)
    every = {each["id"] for each in (conversation(index) for index in range(10))}
    assert samples.known(every) == every
    assert set(learned) < every
    stats = shell.run("queue", "stats", "--json").document
    assert [(stats[name]["done"], stats[name]["dead"]) for name in ("prompts", "samples")] == [(6, 0), (10, 0)]
    assert list(store.scan()) == []
    late = shell.run("feed", rows, "--json", "feed.keep_open=true")
    assert (late.document["known"], late.document["produced"], late.document["queued"]) == (6, 4, 0)


def test_a_trainer_ends_without_a_producer_when_feed_found_every_sample_there(
    shell: Shell, client: QueueClient, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(3)])
    shell.run("feed", rows)
    assert shell.run("produce", "--json").document["produced"] == 3
    client.call("FLUSHALL")
    assert shell.run("store", "rebuild").code == 0
    assert shell.run("feed", rows, "--json").document["produced"] == 3
    trained = shell.run("train", "--json").document
    assert (trained["acked"], trained["drained"]) == (3, True)


def test_a_rebuilt_queue_has_the_groups_of_the_settings(
    shell: Shell, client: QueueClient, store: SharedDirStore
) -> None:
    put(store, "a")
    document = shell.run("store", "rebuild", "queue.groups=ema,own", "--json").document
    assert (document["refs"], document["damaged"], document["run"]) == (1, {}, "default")
    stats = shell.run("queue", "stats", "--json").document
    assert {name: each["ready"] for name, each in stats["groups"].items()} == {"ema": 1, "own": 1}


def test_a_rebuild_names_what_is_damaged(shell: Shell, client: QueueClient, store: SharedDirStore) -> None:
    put(store, "a")
    (store.root / "3f").mkdir(exist_ok=True)
    for number in range(22):
        (store.root / "3f" / f"d{number}.1.safetensors").write_bytes(b"cut")
    ended = shell.run("store", "rebuild")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert sum(": damaged, left where it is: " in line for line in lines) == 20
    assert "2 more damaged; --json lists them" in lines
    assert any("1 samples are ready again" in line and "22 damaged" in line for line in lines)


# what the other commands do with it


def test_produce_collects_between_its_rounds_and_train_refuses_a_folder_of_another_contract(
    shell: Shell, client: QueueClient, samples: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[Janitor] = []
    monkeypatch.setattr(Janitor, "maybe_run", lambda janitor: rounds.append(janitor))
    shell.run("feed", write_rows(tmp_path / "rows.jsonl", [conversation(0)]))
    assert shell.run("produce", "--json").document["produced"] == 1
    assert rounds
    folder = RunContract.from_json((tmp_path / SHARDS / CONTRACT_FILE).read_bytes())
    assert samples.agreed()[CONTRACT_RECORD] == folder.to_json()
    client.call("HSET", "eaglefeed:{default}:run", CONTRACT_RECORD, folder.model_copy(update={"dtype": "x"}).to_json())
    refused = shell.run("train")
    assert refused.code == 3
    assert "wanted dtype=x, got dtype=float32" in refused.err
    assert samples.stats().ready == 1


# gc


def test_gc_deletes_what_nobody_needs_and_says_what_it_left(
    shell: Shell, client: QueueClient, samples: LeaseQueue, store: SharedDirStore
) -> None:
    refs = one_of_each(store, samples, open_queue(client, "default", "prompts"))
    age(store)
    before = {shard.key for shard in store.scan()}
    dry = shell.run("store", "gc", "--dry-run")
    assert dry.code == 0, dry.err
    assert "would delete 1 released, 1 orphans (" in dry.out
    assert {shard.key for shard in store.scan()} == before
    ended = shell.run("store", "gc", "--json")
    document = ended.document
    assert (document["released"], document["orphans"], document["orphan_bytes"]) == (
        1,
        1,
        refs["orphan"].stored_bytes,
    )
    assert (document["kept"], document["leased"], document["foreign"], document["unreadable"]) == (2, 1, 1, 1)
    assert document["unreadable_keys"] == ["3f/unreadable.1.safetensors"]
    gone = {key_of(refs["released"]), key_of(refs["orphan"])}
    assert {shard.key for shard in store.scan()} == before - gone
    told = shell.run("store", "gc").out.splitlines()
    assert told[0] == "3f/unreadable.1.safetensors: unreadable, left where it is"
    assert told[1] == (
        f"{store.uri}: deleted 0 released, 0 orphans (0 B), 0 temporaries; left 2 kept, 1 leased, 1 foreign, "
        "1 unreadable"
    )


def test_a_look_at_a_run_that_is_not_there_makes_none(shell: Shell) -> None:
    for command in ("gc", "inspect"):
        ended = shell.run("store", command)
        assert ended.code == 2
        assert "no such run here" in ended.err
    assert not Path("runs").exists()


# inspect


def test_inspect_counts_shards_by_their_state(
    shell: Shell, client: QueueClient, samples: LeaseQueue, store: SharedDirStore
) -> None:
    refs = one_of_each(store, samples, open_queue(client, "default", "prompts"))
    document = shell.run("store", "inspect", "--json").document
    assert document["known"]
    for name, ref in refs.items():
        assert document["states"][name] == {"shards": 1, "bytes": ref.stored_bytes}, name
    assert (document["states"]["unreadable"], document["temporaries"]) == ({"shards": 1, "bytes": 3}, 0)
    left = store.root / "3f" / ".tmp-elsewhere-1-2-0123abcd"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    assert "temporaries: 1 files that crashed writes left" in shell.run("store", "inspect").out
    assert shell.run("store", "gc", "--dry-run", "--json").document["temporaries"] == 1
    left.unlink()
    lines = shell.run("store", "inspect").out.splitlines()
    assert lines[0] == "3f/unreadable.1.safetensors: unreadable"
    assert {line.partition(":")[0] for line in lines[1:]} == {name.replace("_", "-") for name in refs} | {"unreadable"}


def test_inspect_shows_a_shard_by_its_key_or_its_path(shell: Shell, store: SharedDirStore) -> None:
    ref = put(store, "a")
    by_key = shell.run("store", "inspect", key_of(ref), "--json").document["shards"][0]
    by_path = shell.run("store", "inspect", store.root / key_of(ref), "--json").document["shards"][0]
    assert by_key["ref"]["sample_id"] == by_path["ref"]["sample_id"] == "a"
    assert by_key["tensors"] == by_path["tensors"]
    assert {name: each["xxh3_128"] for name, each in by_key["tensors"].items()} == ref.checksums
    assert by_key["tensors"]["loss_mask"]["shape"] == [2, 6]
    assert by_key["num_bytes"] == ref.stored_bytes
    shown = shell.run("store", "inspect", key_of(ref)).out
    assert '  sample_id: "a"' in shown.splitlines()
    assert f"xxh3_128 {ref.checksums['loss_mask']}" in shown


def test_inspect_names_what_is_no_shard(shell: Shell, store: SharedDirStore) -> None:
    assert shell.run("store", "inspect", "nowhere").code == 2
    assert "no such shard" in shell.run("store", "inspect", "3f/a.1.safetensors").err
    (store.root / "3f").mkdir(exist_ok=True)
    (store.root / "3f" / "a.1.safetensors").write_bytes(b"\x1b[2J")
    damaged = shell.run("store", "inspect", "3f/a.1.safetensors")
    assert damaged.code == 3
    assert "\x1b" not in damaged.err + damaged.out


def test_store_commands_need_no_torch(tmp_path: Path, samples: LeaseQueue, store: SharedDirStore) -> None:
    put(store, "a")
    for words in (["rebuild"], ["gc"], ["inspect"], ["inspect", key_of(put(store, "b"))]):
        code = f"""
import sys
from eaglefeed.cli import main
try:
    main({["store", *words]})
except SystemExit as ended:
    sys.exit(100 * ("torch" in sys.modules) or int(ended.code or 0))
"""
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
