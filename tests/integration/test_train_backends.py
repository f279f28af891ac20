"""`eaglefeed train` on a target in this process, on servers, and on a stream: one trainer, the same weights."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny_target
from commands import Ended, Shell, conversation, save_tiny_target, write_rows
from eaglefeed.cli import train_run
from eaglefeed.consumer.export import export_draft
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.consumer.run import only_trainer_of
from eaglefeed.errors import ConfigError, TargetUnavailable
from eaglefeed.producer.loading import load_target
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.vocab import VocabMapping

torch.set_num_threads(1)
COLOCATED = ("--target-backend", "colocated")
NUM_ROWS = 10
MAP = "map.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def url(target: Path) -> Iterator[str]:
    """A server of the same target, in another folder."""
    with _serving(target, f"elsewhere/{target.name}") as server:
        yield server.url


@contextmanager
def _serving(target: Path, name: str, port: int = 0) -> Iterator[TargetServer]:
    server = TargetServer(_loaded(target), info_of(_loaded(target), name), port=port)
    server.start()
    try:
        assert server.wait_ready(60)
        yield server
    finally:
        server.stop(5)


def _loaded(target: Path) -> HFEagle3TargetModel:
    return HFEagle3TargetModel(load_target(str(target), dtype="float32", device="cpu"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM_ROWS)])
    VocabMapping.from_ids(torch.arange(0, 259, 2), vocab_size=259).save(tmp_path / MAP)
    small = ["feed.max_length=128", "train.checkpoint_every=4", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def _train(shell: Shell, backend: str, output: str, *words: str | Path, stop_at: int = 0) -> Ended:
    """One call of the command, which ends well."""
    before = [f"train.target_backend={backend}"] if backend == "stream" else ["rows.jsonl", "--target-backend", backend]
    ended = shell.run("train", *before, "-o", output, "--json", *words)
    assert ended.code == 0, ended.err
    return ended


def _weights(folder: str) -> dict[str, torch.Tensor]:
    """The newest checkpoint: weights and moments."""
    return load_file(max(Path(folder).glob("step-*.safetensors")))


def _same(*folders: str) -> bool:
    first, *others = (_weights(folder) for folder in folders)
    return all(
        first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)
        for other in others
    )


def _history(folder: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(folder, "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("vocab", "batch_size", "per_step"),
    [(("--vocab", MAP), "3", "2"), ((), "1", "1")],
    ids=["a map, batches of 3, 2 a step", "the whole vocabulary, rows"],
)
def test_stream_colocated_and_remote_give_the_same_weights_bit_for_bit(
    shell: Shell, url: str, vocab: tuple[str, ...], batch_size: str, per_step: str
) -> None:
    shell.common = (*shell.common, f"feed.batch_size={batch_size}", f"train.samples_per_step={per_step}")
    shell.run("feed", "rows.jsonl", *vocab)
    shell.run("produce", *vocab)
    _train(shell, "stream", "streamed")
    ended = _train(shell, "colocated", "colocated", *vocab)
    _train(shell, "remote", "remote", *vocab, "--remote-urls", url)
    assert _same("streamed", "colocated", "remote")
    items = -(-NUM_ROWS // int(batch_size))
    document = ended.document
    assert (document["delivered"], document["acked"], document["dead"]) == (items, items, 0)
    assert (document["accepted"], document["rejected"], document["drained"]) == (NUM_ROWS, 0, True)
    size = 130 if vocab else 259
    assert load_file(Path(document["draft"]) / "model.safetensors")["lm_head.weight"].shape == (size, 32)
    histories = [_history(folder) for folder in ("streamed", "colocated", "remote")]
    assert len({tuple(row) for history in histories for row in history}) == 1  # the columns
    losses = [[(row["step"], row["loss"], row["samples"]) for row in history] for history in histories]
    assert losses[0] == losses[1] == losses[2]


def test_a_trainer_whose_tokenizer_may_be_another_targets_is_warned(shell: Shell, target: Path) -> None:
    with _serving(target, "as the server calls it") as server:
        ended = _train(shell, "remote", "out", "--remote-urls", server.url)
    (line,) = [line for line in ended.err.splitlines() if "servers_name_another_target" in line]
    assert "as the server calls it" in line
    assert "--target" in line
    assert json.loads(Path("out/contract.json").read_text())["target"] == "as the server calls it"


def test_a_tokenizer_with_more_tokens_than_the_servers_target_is_refused(shell: Shell, target: Path) -> None:
    larger = tiny_target.tiny_tokenizer()
    larger.add_tokens(["<|more|>"])
    larger.save_pretrained("larger")
    with _serving(target, "small") as server:
        words = ("target.name=./larger", "--target-backend", "remote", "--remote-urls", server.url)
        ended = shell.run("train", "rows.jsonl", *words)
    assert ended.code == 2
    assert "wanted at most 259 tokens, got 260" in ended.err
    assert "pass with --target" in ended.err


@pytest.mark.parametrize(
    ("word", "got"), [("target.aux_layer_ids=0,1,2", "1,2,3"), ("target.dtype=bfloat16", "float32")]
)
def test_what_a_trainer_asks_of_its_target_and_the_servers_do_not_serve_is_refused(
    shell: Shell, url: str, word: str, got: str
) -> None:
    ended = shell.run("train", "rows.jsonl", "--target-backend", "remote", "--remote-urls", url, word)
    assert ended.code == 2
    assert f"wanted {word.partition('=')[2]}, got {got}" in ended.err


def test_what_a_trainer_does_not_ask_for_is_the_servers_choice(shell: Shell, url: str) -> None:
    shell.common = tuple(word for word in shell.common if not word.startswith("target.dtype"))
    _train(shell, "remote", "out", "--remote-urls", url)


def test_a_trainer_started_before_its_server_waits_for_it(
    shell: Shell, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ask, failed = RemoteEagle3TargetModel.model_info, list[TargetUnavailable]()

    def start_after_a_failure(self: RemoteEagle3TargetModel) -> dict[str, object]:
        try:
            return ask(self)
        except TargetUnavailable as error:
            if not failed:
                stack.enter_context(_serving(target, target.name, port))
            failed.append(error)
            raise

    monkeypatch.setattr(RemoteEagle3TargetModel, "model_info", start_after_a_failure)
    with ExitStack() as stack:
        ended = _train(shell, "remote", "out", "--remote-urls", f"http://127.0.0.1:{port}")
    assert failed
    assert ended.document["acked"] == NUM_ROWS


def test_a_server_that_does_not_come_is_waited_for_as_long_as_it_is_said(shell: Shell) -> None:
    words = ("rows.jsonl", "--target-backend", "remote", "--remote-urls", "http://127.0.0.1:9", "-o", "out")
    ended = shell.run("train", *words, "train.start_timeout_s=0.01")
    assert ended.code == 4, ended.err
    assert "the target server is out" in ended.err.splitlines()[-1]


def test_the_prefetch_depth_changes_nothing_but_the_wait(shell: Shell, url: str) -> None:
    for depth in ("0", "1", "4"):
        words = ("--vocab", MAP, "--remote-urls", url, "--target-prefetch-depth", depth)
        _train(shell, "remote", depth, *words)
    assert _same("0", "1", "4")


def test_two_servers_give_the_same_weights_as_one(shell: Shell, url: str, target: Path) -> None:
    second = TargetServer(_loaded(target), info_of(_loaded(target), "the second"))
    second.start()
    try:
        assert second.wait_ready(60)
        words = ("--vocab", MAP, "--target-prefetch-depth", "4")
        _train(shell, "remote", "one", *words, "--remote-urls", url)
        _train(shell, "remote", "two", *words, "--remote-urls", url, "--remote-urls", second.url)
        _train(shell, "remote", "commas", *words, "--remote-urls", f"{url},{second.url}")
    finally:
        assert second.stop(5).answered > 0
    assert _same("one", "two", "commas")


@pytest.mark.parametrize("backends", [("colocated", "remote"), ("remote", "colocated")], ids=" then ".join)
def test_a_run_goes_on_with_the_other_backend(shell: Shell, url: str, backends: tuple[str, str]) -> None:
    words = ("--vocab", MAP, f"train.remote_urls={url}")
    _train(shell, "colocated", "straight", *words)
    write_rows(Path("rows.jsonl"), [conversation(index) for index in range(6)])
    assert _train(shell, backends[0], "changed", *words).document["steps"] == 6
    write_rows(Path("rows.jsonl"), [conversation(index) for index in range(NUM_ROWS)])
    assert _train(shell, backends[1], "changed", *words).document["steps"] == 4
    assert _same("straight", "changed")


def test_a_finished_run_that_is_started_again_has_nothing_to_do(shell: Shell) -> None:
    first = _train(shell, "colocated", "out").document
    again = _train(shell, "colocated", "out").document
    assert (again["steps"], again["step"], again["draft"]) == (0, first["step"], first["draft"])


def test_nobody_else_trains_into_the_folder_while_the_draft_is_exported(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*args: Any, **kwargs: Any) -> Path:
        with pytest.raises(ConfigError, match="another trainer"), only_trainer_of(Path("out")):
            pass  # it would take the half of an export for what a killed trainer left, and remove it
        return export_draft(*args, **kwargs)

    monkeypatch.setattr(train_run, "export_draft", export)
    ended = _train(shell, "colocated", "out", "train.samples_per_step=5")
    assert Path(ended.document["draft"]).is_dir()


def test_other_conversations_than_the_checkpoint_s_are_refused(shell: Shell) -> None:
    _train(shell, "colocated", "out")
    write_rows(Path("rows.jsonl"), [conversation(index) for index in range(1, NUM_ROWS)])
    ended = shell.run("train", "rows.jsonl", *COLOCATED, "-o", "out")
    assert ended.code == 3
    assert "not the conversations that the checkpoint was trained on" in ended.err


def test_a_checkpoint_refuses_another_target_and_names_what_differs(shell: Shell, tmp_path: Path) -> None:
    _train(shell, "colocated", "out")
    tiny_target.tiny_model(seed=1).save_pretrained(tmp_path / "other")
    tiny_target.tiny_tokenizer().save_pretrained(tmp_path / "other")
    ended = shell.run("train", "rows.jsonl", *COLOCATED, "-o", "out", f"target.name={tmp_path / 'other'}")
    assert ended.code == 3
    assert "target_fingerprint=" in ended.err
    assert "hidden_size" not in ended.err
    ended = shell.run("train", "rows.jsonl", *COLOCATED, "-o", "out", "--vocab", MAP)
    assert ended.code == 3
    assert "supervision=logits" in ended.err
    assert "vocab_map_digest=" in ended.err


def test_a_contract_without_a_checkpoint_binds_nobody(shell: Shell) -> None:
    write_rows(Path("rows.jsonl"), [{"id": "x"}])
    assert shell.run("train", "rows.jsonl", *COLOCATED, "-o", "out", "--vocab", MAP).code == 3  # no row is of use
    write_rows(Path("rows.jsonl"), [conversation(0)])
    _train(shell, "colocated", "out")


def test_a_stream_s_checkpoint_is_no_start_for_a_target_and_the_reverse(shell: Shell) -> None:
    shell.run("feed", "rows.jsonl")
    shell.run("produce")
    _train(shell, "stream", "streamed")
    ended = shell.run("train", "rows.jsonl", *COLOCATED, "-o", "streamed")
    assert ended.code == 3
    assert "another kind of checkpoint" in ended.err
    _train(shell, "colocated", "colocated")
    ended = shell.run("train", "-o", "colocated")
    assert ended.code == 3
    assert "another kind of checkpoint" in ended.err


def test_rows_that_cannot_be_used_are_reported_with_their_reasons(shell: Shell) -> None:
    write_rows(Path("rows.jsonl"), ["not json", conversation(1), {"id": "empty", "messages": []}, conversation(1)])
    ended = shell.run("train", "rows.jsonl", *COLOCATED, "-o", "out")
    assert ended.code == 0, ended.err
    assert "rows.jsonl:1 (no id): rejected" in ended.out
    assert "rows.jsonl:3 (empty): rejected" in ended.out
    assert "1 accepted, 1 duplicates, 2 rejected" in ended.out
    assert "trained 1 steps on 1 samples" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rows.jsonl",), "a stream takes no conversations"),
        (COLOCATED, "eaglefeed train CONVERSATIONS --target-backend colocated"),
        (("--target-backend", "remote", "--remote-urls", "http://localhost:1"), "no conversations to train on"),
        (("rows.jsonl", "--target-backend", "remote"), "pass --remote-urls http://HOST:PORT"),
        (("rows.jsonl", "--target-backend", "remote", "--remote-urls", "localhost"), "localhost"),
        (("rows.jsonl", "--target-backend", "near"), "train.target_backend"),
        (("missing.jsonl", *COLOCATED), "missing.jsonl"),
        ((".", *COLOCATED), "no such file"),
        (("rows.jsonl", *COLOCATED, "--vocab", "missing.safetensors"), "no vocabulary map can be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistaken_call_says_what_to_pass(shell: Shell, words: tuple[str, ...], said: str) -> None:
    ended = shell.run("train", *words)
    assert ended.code == 2
    assert said in ended.err
    assert not Path("runs").exists()


def test_a_map_of_another_vocabulary_is_refused(shell: Shell) -> None:
    VocabMapping.from_ids(torch.arange(100), vocab_size=300).save(Path("other.safetensors"))
    ended = shell.run("train", "rows.jsonl", *COLOCATED, "--vocab", "other.safetensors")
    assert ended.code == 3
    assert "wanted 259 tokens, got 300" in ended.err


def test_a_settings_file_of_a_run_serves_the_other_backends_too(shell: Shell) -> None:
    Path("run.yaml").write_text(f"produce:\n  vocab: {MAP}\n")
    _train(shell, "colocated", "of the run", "--config", "run.yaml")
    _train(shell, "colocated", "of the trainer", "--vocab", MAP)
    assert _same("of the run", "of the trainer")
