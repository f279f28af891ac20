"""A run that is started again: what is there is not made again, and one changed setting is refused by its name."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from transformers import AutoTokenizer

import pipeline
import tiny_target
from commands import Ended, Shell, conversation, save_tiny_target, write_rows
from eaglefeed.cli import main
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue.redis import RedisLeaseQueue
from eaglefeed.schema.refs import decode_ref
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.shared_dir import SharedDirStore

NUM, HALF = 6, 3
PRODUCE = ["produce", "--vocab", "vocab.safetensors"]
SHARDS = Path("runs/default/shards")


class KilledError(BaseException):
    """A SIGKILL: what was leased stays so."""


def _files(folder: Path) -> dict[str, tuple[int, str]]:
    """Name → time of the last change and digest, of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, xxhash.xxh3_64_hexdigest(path.read_bytes())) for path in files}


def test_a_producer_after_a_kill_makes_what_is_missing_and_touches_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=SharedDirStore(tmp_path, durability="none"))
    run.feed(*(pipeline.prompt(index, rows=(pipeline.PromptRow((1 + index % 40, 2), (0, 1)),)) for index in range(100)))
    encoded = []

    def encode(ids: Any) -> None:
        if len(encoded) == 50:
            raise KilledError
        encoded.append(ids)

    run.target.before = encode
    with monkeypatch.context() as patch:
        patch.setattr(ProducerWorker, "_leave", lambda _worker, _why: None)
        with pytest.raises(KilledError):
            run.produce()
    assert run.samples.stats().ready == 50
    before = _files(tmp_path)
    run.clock.advance(100)  # its lease runs out
    run.target.before = encoded.append
    assert run.produce(name="second").produced == 50
    assert len(encoded) == 100
    after = _files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(decode_ref(each.payload).sample_id for each in run.samples.payloads()) == sorted(
        f"p-{index}" for index in range(100)
    )
    assert len([name for name in after if name.endswith(".safetensors") and "assets" not in name]) == 100


# by its commands


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def common(target: Path) -> list[str]:
    return [f"target.name={target}", "target.dtype=float32"]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, common: list[str]) -> Path:
    """A run of which half is produced; whoever is refused leaves it as it is."""
    folder = tmp_path_factory.mktemp("half")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        write_rows(Path("rows.jsonl"), [conversation(index) for index in range(NUM)])
        for name, ids in (("vocab", range(200)), ("other", range(210))):
            VocabMapping.from_ids(torch.tensor(ids), vocab_size=259).save(Path(f"{name}.safetensors"))
        _stop_at(patch, HALF)
        for words in (AS_BEFORE, PRODUCE):
            with pytest.raises(SystemExit, match=r"^0$"):
                main([*common, *words])
    return folder


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], half: Path, common: list[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(half)
    return Shell(capsys, *common)


def _stop_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """A producer hears its first Ctrl-C while it makes this sample."""
    run, make, made = ProducerWorker.run, ProducerWorker._make, []

    def make_or_stop(worker: ProducerWorker, token: int, item: Any) -> None:
        made.append(item)
        if len(made) == number:
            worker.stop.set()  # type: ignore[attr-defined]
        make(worker, token, item)

    def run_with(worker: ProducerWorker, stop: Any) -> Any:
        worker.stop = stop  # type: ignore[attr-defined]
        return run(worker, stop)

    patch.setattr(ProducerWorker, "run", run_with)
    patch.setattr(ProducerWorker, "_make", make_or_stop)


@contextlib.contextmanager
def changed(target: Path, change: Callable[[Path], object]) -> Iterator[None]:
    """The same name stands for something else."""
    kept = target.with_name("kept")
    shutil.copytree(target, kept)
    try:
        change(target)
        yield
    finally:
        shutil.rmtree(target)
        kept.rename(target)


def _one_space_more(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages %}", "in messages  %}")
    tokenizer.save_pretrained(folder)


def _refused(ended: Ended, *texts: str) -> None:
    assert ended.code == 3, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("eaglefeed: ")]
    for text in texts:
        assert text in line


FEED = ["feed", "rows.jsonl", "--vocab", "vocab.safetensors"]
AS_BEFORE = [*FEED, "--max-length", "64"]
OTHER = {
    "max_length": ([*FEED, "--max-length", "63"], ["max_length=64", "max_length=63"]),
    "batch size": ([*AS_BEFORE, "--batch-size", "2"], ["batch_size=1", "batch_size=2"]),
    "packing": ([*AS_BEFORE, "--packing"], ["packing=False", "packing=True"]),
    "dtype": ([*PRODUCE, "target.dtype=bfloat16"], ["dtype=float32", "dtype=bfloat16"]),
    "layers": ([*PRODUCE, "target.aux_layer_ids=1,2,4"], ["aux_layer_ids=(1, 2, 3)", "aux_layer_ids=(1, 2, 4)"]),
    "vocabulary map": (["produce", "--vocab", "other.safetensors"], ["vocab_map_digest="]),
    "encoding": ([*PRODUCE, "produce.supervision=logits"], ["supervision=target_probs", "supervision=logits"]),
    "aux storage": (
        [*PRODUCE, "produce.supervision=last_hidden_states", "produce.aux_storage=fp8"],
        ["aux_storage=same", "aux_storage=fp8"],
    ),
    "rows": (
        [*PRODUCE, "produce.supervision=last_hidden_states", "produce.supervision_rows=supervised"],
        ["supervision_rows=all", "supervision_rows=supervised"],
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_changed_setting_is_refused_with_both_values_and_changes_nothing(shell: Shell, name: str) -> None:
    words, texts = OTHER[name]
    files = _files(SHARDS)
    _refused(shell.run(*words), *texts)
    assert _files(SHARDS) == files
    stats = shell.run("queue", "stats", "--json").document["prompts"]
    assert (stats["ready"], stats["done"], stats["leased"], stats["dead"]) == (NUM - HALF, HALF, 0, 0)


BEHIND_THE_NAME: dict[str, tuple[Callable[[Path], object], list[list[str]], str]] = {
    "weights": (lambda folder: tiny_target.tiny_model(seed=1).save_pretrained(folder), [PRODUCE], "target_fingerprint"),
    "template": (_one_space_more, [AS_BEFORE, PRODUCE], "template_fingerprint"),
    "tokenizer": (
        lambda folder: tiny_target.tiny_tokenizer(adds_bos=True).save_pretrained(folder),
        [AS_BEFORE, PRODUCE],
        "tokenizer_fingerprint",
    ),
}


@pytest.mark.parametrize("name", BEHIND_THE_NAME)
def test_another_target_of_the_same_name_is_refused_by_what_differs(shell: Shell, target: Path, name: str) -> None:
    change, commands, field = BEHIND_THE_NAME[name]
    files = _files(SHARDS)
    with changed(target, change):
        for words in commands:
            _refused(shell.run(*words), f"{field}=")
    assert _files(SHARDS) == files


def test_conversations_that_were_changed_or_reordered_are_refused(shell: Shell) -> None:
    rows = [conversation(index) for index in range(NUM)]
    old = Path("rows.jsonl").read_bytes()
    stat = Path("rows.jsonl").stat()
    for changed_rows in ([*rows[:2], rows[2] | {"messages": conversation(9)["messages"]}, *rows[3:]], rows[::-1]):
        write_rows(Path("rows.jsonl"), changed_rows)
        os.utime("rows.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # neither its size nor its time tells
        assert Path("rows.jsonl").stat().st_size == len(old)
        _refused(shell.run(*AS_BEFORE), "rows.jsonl", "changed since it was fed", f"data={len(old)} bytes with digest")
    Path("rows.jsonl").write_bytes(old)


def test_the_same_settings_go_on_skip_what_is_there_and_are_held_to_it_at_the_end_too(shell: Shell) -> None:
    before = _files(SHARDS)
    fed = shell.run(*AS_BEFORE, "--json").document
    assert (fed["queued"], fed["known"], fed["conflicts"]) == (0, NUM, [])
    told = shell.run(*PRODUCE).out
    assert f"produced {NUM - HALF} samples" in told
    assert f"skipped {HALF}, which had their samples before" in told
    after = _files(SHARDS)
    assert {name: after[name] for name in before} == before
    _refused(shell.run(*PRODUCE, "target.dtype=bfloat16"), "dtype=")  # although nothing is left to do
    assert shell.run(*PRODUCE, "--json").document["skipped"] == NUM


def test_a_feed_that_was_killed_is_finished_by_the_same_feed_and_by_no_other(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(10)])
    words = ["run.id=killed", "feed", rows, "--max-length", "64", "--batch-size", "2", "--json"]
    monkeypatch.setattr("eaglefeed.cli.feed._CHUNK", 3)
    put, puts = RedisLeaseQueue.put, []

    def die_midway(queue: RedisLeaseQueue, items: Any) -> Any:
        if queue.name == "prompts" and puts:
            raise KilledError
        puts.append(len(items))
        return put(queue, items)

    with monkeypatch.context() as patch:
        patch.setattr(RedisLeaseQueue, "put", die_midway)
        with pytest.raises(KilledError):
            shell.run(*words)
    write_rows(rows, [conversation(index) for index in range(11)])  # every pair of rows would be another one
    _refused(shell.run(*words), "changed since it was fed")
    write_rows(rows, [conversation(index) for index in range(10)])
    fed = shell.run(*words).document
    assert (puts, fed["queued"], fed["known"], fed["conflicts"]) == ([3], 2, 3, [])


def test_a_run_is_not_closed_over_a_file_whose_feed_was_killed(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_rows(tmp_path / "one.jsonl", [conversation(index) for index in range(4)])
    two = write_rows(tmp_path / "two.jsonl", [conversation(index) for index in range(4, 6)])
    for run, last in (("both", one), ("without", two)):
        with monkeypatch.context() as patch:
            patch.setattr("eaglefeed.cli.feed._put_all", _killed)
            with pytest.raises(KilledError):
                shell.run(f"run.id={run}", "feed", one)
        fed = shell.run(f"run.id={run}", "feed", two)
        assert (fed.code, "one.jsonl: not fed to its end, so the run stays open" in fed.err) == (0, True)
        assert not shell.run(f"run.id={run}", "queue", "stats", "--json").document["prompts"]["closed"]
        assert shell.run(f"run.id={run}", "feed", last).err == ""
        stats = shell.run(f"run.id={run}", "queue", "stats", "--json").document["prompts"]
        assert (stats["closed"], stats["ready"]) == (True, 6 if last == one else 2)


def test_a_run_is_not_closed_over_what_a_file_was_grown_by_either(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_rows(tmp_path / "one.jsonl", [conversation(index) for index in range(2)])
    two = write_rows(tmp_path / "two.jsonl", [conversation(index) for index in range(4, 6)])
    assert shell.run("run.id=grown", "feed", one, "--keep-open").code == 0
    write_rows(one, [conversation(index) for index in range(4)])
    with monkeypatch.context() as patch:
        patch.setattr("eaglefeed.cli.feed._put_all", _killed)
        with pytest.raises(KilledError):
            shell.run("run.id=grown", "feed", one)
    assert "one.jsonl: not fed to its end, so the run stays open" in shell.run("run.id=grown", "feed", two).err
    assert shell.run("run.id=grown", "feed", one).err == ""
    stats = shell.run("run.id=grown", "queue", "stats", "--json").document["prompts"]
    assert (stats["closed"], stats["ready"]) == (True, 6)


def _killed(*_: object) -> None:
    raise KilledError
