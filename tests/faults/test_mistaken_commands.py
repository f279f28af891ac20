"""What a user gets wrong, and what is wrong with the files: said in one line, with the right exit code."""

import os
import socket
from pathlib import Path

import pytest

import samples as made
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.schema.refs import SampleRef
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.base import key_of, open_store
from eaglefeed.storage.shared_dir import SharedDirStore

SHARDS = Path("runs/default/shards")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(2)])
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def put(folder: Path, sample_id: str, run_id: str = "default") -> SampleRef:
    tensors = made.tensors()
    store = SharedDirStore(folder, durability="none")
    ref = store.put(made.ref(tensors, sample_id=sample_id, token=1, run_id=run_id), tensors)
    store.close()
    return ref


# stores


@pytest.mark.parametrize("command", [["feed", "rows.jsonl"], ["produce"], ["train"]])
def test_a_store_in_the_commands_own_memory_is_refused(shell: Shell, command: list[str]) -> None:
    ended = shell.run(*command, "--store", "mem://x")
    assert ended.code == 2
    for text in ("mem://x", "gone when this command ends", "shm://", "file://"):
        assert text in ended.err
    assert not Path("runs").exists()


def test_a_run_without_shards_is_not_rebuilt(shell: Shell) -> None:
    ended = shell.run("store", "rebuild", "--run", "nosuch")
    assert (ended.code, "no shards of run nosuch" in ended.err) == (2, True)
    assert not Path("runs").exists()
    put(Path("shards"), "a", run_id="other")
    before = sorted(Path("shards").rglob("*"))
    ended = shell.run("store", "rebuild", "--run", "nosuch", "--store", "shards")
    assert (ended.code, "no shards of run nosuch" in ended.err) == (2, True)
    assert sorted(Path("shards").rglob("*")) == before


def test_feed_warns_of_shards_of_the_run_that_its_queue_does_not_know(shell: Shell) -> None:
    put(SHARDS, "other", run_id="other")
    plain = shell.run("feed", "rows.jsonl", "feed.keep_open=true")
    assert (plain.code, plain.err) == (0, "")
    put(SHARDS, "a")
    ended = shell.run("feed", "rows.jsonl", "--json")
    lines = [line for line in ended.err.splitlines() if "`eaglefeed store rebuild`" in line]
    assert (ended.code, len(lines), ended.document["known"]) == (0, 1, 2)
    assert "shards of run default" in lines[0]


@pytest.mark.parametrize("path", ["shards", "./s3:old", "a b/3:4", "run_1:x"])
def test_a_path_is_a_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(path).close()
    assert (tmp_path / path).is_dir()


# inspect


def test_inspect_shows_the_good_shards_and_names_the_bad_ones(shell: Shell) -> None:
    good, bad, last = (put(SHARDS, name) for name in ("a", "b", "c"))
    (SHARDS / key_of(bad)).write_bytes(b"cut")
    names = [key_of(good), str(SHARDS / key_of(bad)), "3f/none.1.safetensors", key_of(last)]
    ended = shell.run("store", "inspect", *names)
    assert ended.code == 3
    assert [line for line in ended.out.splitlines() if "sample_id" in line] == [
        '  sample_id: "a"',
        '  sample_id: "c"',
    ]
    assert [line.partition(": ")[0] for line in ended.err.splitlines()] == names[1:3]
    document = shell.run("store", "inspect", *names, "--json").document
    assert [each["name"] for each in document["shards"]] == [names[0], names[3]]
    assert [(each["name"], each["kind"]) for each in document["faults"]] == [
        (names[1], "SampleCorrupt"),
        (names[2], "SampleMissing"),
    ]


def test_a_shards_store_is_told_alike_by_its_key_and_by_its_path(shell: Shell, tmp_path: Path) -> None:
    ref = put(SHARDS, "a")
    (tmp_path / "alone").mkdir()
    alone = Path("alone") / Path(key_of(ref)).name
    alone.write_bytes((SHARDS / key_of(ref)).read_bytes())
    shown = shell.run("store", "inspect", key_of(ref), SHARDS / key_of(ref), alone, "--json").document["shards"]
    here = f"file://{tmp_path / SHARDS}"
    assert [each["ref"]["store_uri"] for each in shown] == [here, here, f"file://{tmp_path}/alone"]


# validate


def test_what_is_no_regular_file_is_a_fault_and_is_not_opened(shell: Shell, tmp_path: Path) -> None:
    put(SHARDS, "a")
    folder = SHARDS / "3f"
    folder.mkdir(exist_ok=True)
    pipe, inner, json = folder / "pipe.1.safetensors", folder / "folder.1.safetensors", Path("pipe.json")
    os.mkfifo(pipe)
    os.mkfifo(json)
    inner.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.1.safetensors")
    found = shell.run("validate", SHARDS, "--json")
    assert (found.code, found.document["checked"]) == (3, 3)
    assert {each["name"] for each in found.document["faults"]} == {str(pipe), str(inner)}
    single = shell.run("validate", pipe, json, "s.1.safetensors", "--json")
    assert (single.code, single.document["checked"]) == (3, 3)
    for fault in found.document["faults"] + single.document["faults"]:
        assert "no regular file" in fault["fault"]


@pytest.mark.parametrize(
    ("uri", "said"), [("s3://bucket/run", "URI"), ("shm://run", "URI"), ("nccl://host:7800", "nccl://")]
)
def test_validate_says_how_a_store_is_checked(shell: Shell, uri: str, said: str) -> None:
    ended = shell.run("validate", uri)
    assert ended.code == 2
    assert f"validate --queue --store {said}`" in ended.err


# train


def test_a_map_beside_the_runs_own_is_refused_unless_they_are_the_same(shell: Shell) -> None:
    import torch

    VocabMapping.from_ids(torch.arange(200), vocab_size=259).save(Path("run.safetensors"))
    VocabMapping.from_ids(torch.arange(150), vocab_size=259).save(Path("other.safetensors"))
    assert shell.run("feed", "rows.jsonl", "--vocab", "run.safetensors").code == 0
    assert shell.run("produce", "--vocab", "run.safetensors", "--json").document["produced"] == 2
    shard = min(SHARDS.glob("*/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    refused = shell.run("train", "--vocab", "other.safetensors")
    assert refused.code == 2
    assert "wanted 200 tokens, got 150 tokens" in refused.err
    trained = shell.run("train", "--vocab", "run.safetensors")
    assert trained.code == 0, trained.err
    assert "trained 1 steps on 1 samples, at step 1, 1 dead" in trained.out
