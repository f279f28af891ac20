"""The whole job by its commands, on a random target and a real server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.cli.limits import check_limits, queue_limits
from eaglefeed.config import load_settings
from eaglefeed.errors import ConfigError
from eaglefeed.schema.refs import decode_ref, ref_to_json
from eaglefeed.storage.base import ENDLESS, StoreHealth
from eaglefeed.storage.shared_dir import SharedDirStore


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.checkpoint_every=4", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "conversations.jsonl", [conversation(index) for index in range(10)])


def test_the_whole_job_by_its_commands(shell: Shell, rows: Path, tmp_path: Path) -> None:
    assert shell.run("vocab", rows, "-o", "vocab.safetensors", "--json").document["coverage"] == 1.0
    fed = shell.run("feed", rows, "--vocab", "vocab.safetensors", "--json").document
    assert (fed["items"], fed["queued"], fed["rejected"]) == (10, 10, 0)
    produced = shell.run("produce", "--vocab", "vocab.safetensors", "--json").document
    assert (produced["produced"], produced["dead"]) == (10, 0)
    # The estimate is of the tensors; a shard holds them and a header.
    assert fed["num_bytes"] < produced["num_bytes"] < fed["num_bytes"] + 10 * 4096
    checked = shell.run("validate", "--queue", "--values", "--json").document
    assert (checked["checked"], checked["faults"]) == (10, [])
    assert shell.run("validate", "runs/default/shards").code == 0
    trained = shell.run("train", "--json")
    assert trained.code == 0, trained.err
    assert (trained.document["steps"], trained.document["acked"], trained.document["drained"]) == (10, 10, True)
    stats = shell.run("queue", "stats", "--json").document
    assert (stats["samples"]["done"], stats["samples"]["ready"], stats["samples"]["dead"]) == (10, 0, 0)
    draft = Path(trained.document["draft"])
    assert load_file(draft / "model.safetensors")["lm_head.weight"].shape == (259, 32)
    assert not list(Path("runs/default/shards").glob("*/*.safetensors"))


def test_what_a_run_would_take_is_told_without_queueing_anything(
    shell: Shell, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = shell.run("feed", rows, "--dry-run")
    assert dry.code == 0
    assert "nothing was queued" in dry.out
    assert "more than is free" not in dry.out
    assert not Path("runs/default/queue").exists()
    told = shell.run("feed", rows, "--dry-run", "--json").document
    fed = shell.run("feed", rows, "--json").document
    assert fed["queued"] == 10
    assert {name: told[name] for name in ("items", "tokens", "num_bytes", "largest_bytes")} == {
        name: fed[name] for name in ("items", "tokens", "num_bytes", "largest_bytes")
    }
    monkeypatch.setattr(SharedDirStore, "health", lambda _store: StoreHealth(told["num_bytes"] // 2, 2**40))
    waits = shell.run("feed", rows, "--dry-run")
    assert "the samples take more than is free: producers wait for trainers" in waits.out
    assert "so it will fill" in shell.run("feed", rows, "--dry-run", "train.retain=true").out


def test_full_logits_need_no_vocabulary_map(shell: Shell, rows: Path) -> None:
    shell.run("feed", rows)
    assert shell.run("produce", "--json").document["produced"] == 10
    assert shell.run("train", "--json").document["acked"] == 10


def test_batches_of_rows_are_one_sample(shell: Shell, rows: Path) -> None:
    assert shell.run("feed", rows, "--batch-size", "4", "--json").document["items"] == 3
    assert shell.run("produce", "--json").document["produced"] == 3
    assert shell.run("train", "--json").document["acked"] == 3


def test_feeding_twice_queues_nothing_twice(shell: Shell, rows: Path) -> None:
    assert shell.run("feed", rows, "--keep-open", "--json").document["queued"] == 10
    again = shell.run("feed", rows, "--json").document
    assert (again["queued"], again["known"]) == (0, 10)


def test_feed_says_what_the_run_takes_on_disk_before_it_queues(shell: Shell, rows: Path) -> None:
    lines = shell.run("feed", rows).out.splitlines()
    where = [index for index, line in enumerate(lines) if "samples take" in line]
    assert where
    assert where[0] < next(index for index, line in enumerate(lines) if "queued 10" in line)


def test_feed_declares_the_groups_and_every_sample_reaches_each(shell: Shell, rows: Path) -> None:
    assert shell.run("feed", rows, "queue.groups=ema,own").code == 0
    assert shell.run("produce", "--json").document["produced"] == 10
    stats = shell.run("queue", "stats", "--json").document
    assert {name: each["ready"] for name, each in stats["groups"].items()} == {"ema": 10, "own": 10}
    assert (stats["prompts"]["group"], stats["prompts"]["done"]) == ("main", 10)
    again = shell.run("feed", rows, "queue.groups=own,ema", "--json")
    assert again.document["known"] == 10
    other = shell.run("feed", rows, "queue.groups=own")
    assert other.code == 2
    assert "ema" in other.err


def test_feed_refuses_room_for_less_than_one_step_and_queues_nothing(shell: Shell, rows: Path) -> None:
    for words, told in [
        (["queue.high_bytes=4096"], "queue.high_bytes: room for less than one step, wanted 1 * "),
        (
            ["queue.high_bytes=300000", "train.samples_per_step=9"],
            "queue.high_bytes: room for less than one step, wanted 9 * ",
        ),
        (["queue.high_count=3", "train.samples_per_step=4"], "wanted at least train.samples_per_step = 4, got 3"),
        (["queue.low_bytes=9", "queue.high_bytes=8"], "low_bytes 9 is above high_bytes 8"),
    ]:
        ended = shell.run("feed", rows, *words)
        assert ended.code == 2, words
        assert told in ended.err
        assert not Path("runs/default/queue").exists()


def test_feed_tells_how_many_bytes_a_step_takes() -> None:
    settings = load_settings(None, ["train.samples_per_step=3"])
    small_store = StoreHealth(free_bytes=500, total_bytes=1000)
    with pytest.raises(ConfigError) as caught:
        check_limits(queue_limits(settings, small_store), settings, 200, small_store)
    assert str(caught.value) == (
        "queue.high_bytes: room for less than one step, wanted 3 * 200 B (the largest sample) = 600 B, got 400 B, 80% "
        "of the 500 B that the store has free; free space in the store, or lower feed.max_length or "
        "train.samples_per_step"
    )
    check_limits(queue_limits(settings, small_store), settings, 133, small_store)


def test_feed_names_the_setting_that_makes_shared_memory_small() -> None:
    settings = load_settings(None, ["store.uri=shm://small"])
    docker_default = StoreHealth(free_bytes=64 * 2**20, total_bytes=64 * 2**20)
    with pytest.raises(ConfigError, match="raise the container's shm_size"):
        check_limits(queue_limits(settings, docker_default), settings, 60 * 2**20, docker_default)


def test_a_store_without_an_end_bounds_nothing() -> None:
    settings = load_settings(None, ["queue.high_bytes=1000000"])
    limits = queue_limits(settings, ENDLESS)
    assert (limits.high_bytes, limits.low_bytes) == (1_000_000, 750_000)


def test_a_settings_file_and_words_on_the_command_line(shell: Shell, rows: Path) -> None:
    Path("run.yaml").write_text("run: {id: from-file}\nfeed: {max_length: 5}\n")
    fed = shell.run("feed", rows, "--config", "run.yaml", "feed.max_length=128", "--json").document
    assert (fed["run"], fed["rejected"]) == ("from-file", 0)


def test_a_trainer_started_first_waits_for_the_producer(shell: Shell, rows: Path, tmp_path: Path) -> None:
    shell.run("feed", rows)
    words = [sys.executable, "-m", "eaglefeed", "train", "--json", *shell.common]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trainer:
        assert shell.run("produce", "--json").document["produced"] == 10
        out, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err
    assert json.loads(out)["acked"] == 10


def test_a_ref_in_json_is_validated(shell: Shell, rows: Path, tmp_path: Path) -> None:
    from eaglefeed.queue import open_queue
    from eaglefeed.queue.connection import connect
    from eaglefeed.queue.embedded import EmbeddedServer

    shell.run("feed", rows)
    shell.run("produce")
    with EmbeddedServer(tmp_path / "runs/default/queue") as server:
        client = connect(server.url)
        payload = next(iter(open_queue(client, "default", "samples").payloads())).payload
        client.close()
    fields = ref_to_json(decode_ref(payload))
    (tmp_path / "good.json").write_text(json.dumps(fields))
    (tmp_path / "old.json").write_text(json.dumps(fields | {"schema_version": 3}))
    assert shell.run("validate", "good.json").code == 0
    ended = shell.run("validate", "good.json", "old.json", "--json")
    assert ended.code == 3
    assert [fault["kind"] for fault in ended.document["faults"]] == ["SchemaVersionError"]


def test_answers_are_resumed_and_can_be_fed(shell: Shell, tmp_path: Path) -> None:
    prompts = [{"id": f"q-{index}", "messages": [{"role": "user", "content": f"q {index}"}]} for index in range(3)]
    path = write_rows(tmp_path / "prompts.jsonl", prompts)
    first = shell.run("answers", path, "-o", "answers.jsonl", "--max-new-tokens", "4", "--json").document
    assert (first["answered"], first["kept"]) == (3, 0)
    again = shell.run("answers", path, "-o", "answers.jsonl", "--max-new-tokens", "4", "--json").document
    assert (again["answered"], again["kept"]) == (0, 3)


_RUN_COMMAND = """
import sys
from eaglefeed.cli import main
try:
    main({words})
except SystemExit as ended:
    sys.exit(100 * ("torch" in sys.modules) or int(ended.code or 0))
"""
_IMPORT = "import sys, {modules}\nsys.exit('torch' in sys.modules)"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (_IMPORT.format(modules="eaglefeed\neaglefeed.SampleRef"), 0),
        (_IMPORT.format(modules="eaglefeed.queue.redis, eaglefeed.queue.memory, eaglefeed.queue.embedded"), 0),
        (_IMPORT.format(modules="eaglefeed.ops.report"), 0),
        (_RUN_COMMAND.format(words=["--help"]), 0),
        (_RUN_COMMAND.format(words=["produce", "--help"]), 0),
        (_RUN_COMMAND.format(words=["validate", "nothing"]), 2),
    ],
    ids=["the package", "the queue", "the report", "help", "a command's help", "validate"],
)
def test_torch_stays_out_of(code: str, wanted: int) -> None:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert ended.returncode == wanted, ended.stderr.decode()


def test_validating_headers_needs_no_torch(shell: Shell, rows: Path, tmp_path: Path) -> None:
    shell.run("feed", rows)
    shell.run("produce")
    code = _RUN_COMMAND.format(words=["validate", "runs/default/shards", "--queue", "--headers"])
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"20 checked, 0 with faults" in ended.stdout


def test_a_result_that_nobody_reads_any_more_does_not_make_the_work_a_failure() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "from eaglefeed.cli.common import emit; emit(False, {}, ['trained']); emit(True, {'steps': 1}, [])"
    with os.fdopen(write, "wb") as gone:
        words = [sys.executable, "-c", code]
        ended = subprocess.run(words, stdout=gone, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
