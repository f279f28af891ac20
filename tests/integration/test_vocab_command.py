"""`eaglefeed vocab`, and what becomes of its map in the commands that take one."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import tiny_target
from commands import Shell, conversation, run_server, save_tiny_target, write_rows
from eaglefeed.producer.counts import count_loss_tokens
from eaglefeed.producer.jsonl import ReadReport
from eaglefeed.queue import open_queue
from eaglefeed.schema.vocab import VocabMapping

torch.set_num_threads(1)
V, RESERVED = 320, 259
"""The head has more rows than the tokenizer has tokens, which are single bytes and three special ones."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_target.tiny_model(hf.LlamaConfig(**tiny_target.tiny_sizes(vocab_size=V))).save_pretrained(folder)
    tiny_target.tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(3)])


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=64")


def ids(path: str = "map.safetensors") -> list[int]:
    return VocabMapping.load(Path(path)).selected_token_ids.tolist()


def test_fewer_tokens_than_asked_for_are_filled_up_and_every_sample_has_the_whole_width(
    shell: Shell, rows: Path, tmp_path: Path
) -> None:
    ended = shell.run("vocab", rows, "-o", "map.safetensors", "draft.vocab_size=262", "--json")
    assert ended.code == 0, ended.err
    # All 259 tokens, and of the rows without one as many as are missing, the lowest first.
    assert ids() == [*range(262)]
    assert (ended.document["size"], ended.document["coverage"]) == (262, 1.0)
    assert ended.document["distinct"] < 30
    with run_server(tmp_path / "runs" / "default"):
        assert shell.run("feed", rows, "--vocab", "map.safetensors").code == 0
        ended = shell.run("produce", "--vocab", "map.safetensors", "--json")
    assert (ended.code, ended.document["produced"]) == (0, 3)
    for shard in (tmp_path / "runs" / "default" / "shards").glob("c-*.safetensors"):
        assert load_file(shard)["target_probs"].shape[-1] == 262


def test_only_tokens_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "messages": tiny_target.turns("zzzz", "abb", "yy", "b")}])
    tokenizer = tiny_target.tiny_tokenizer()
    counts = count_loss_tokens(path, tokenizer, ReadReport(), max_length=200, vocab_size=V)
    wanted = {"a": 1, "b": 3, tiny_target.END: 2}  # and none of what the user says, or the template writes
    assert {tokenizer.convert_ids_to_tokens(i): int(counts[i]) for i in counts.nonzero().flatten().tolist()} == wanted
    assert counts.shape == (V,)


def test_the_share_of_tokens_that_the_draft_can_say_is_told(shell: Shell, rows: Path) -> None:
    ended = shell.run("vocab", rows, "-o", "map.safetensors", f"draft.vocab_size={RESERVED}")
    assert f"map.safetensors: {RESERVED} of {V} tokens, 100.00% of the tokens that are trained on" in ended.out


@pytest.mark.parametrize("size", [8, RESERVED - 1, V + 1])
def test_a_size_below_the_reserved_tokens_or_above_the_targets_is_refused_and_nothing_is_written(
    shell: Shell, rows: Path, tmp_path: Path, size: int
) -> None:
    ended = shell.run("vocab", rows, "-o", "map.safetensors", f"draft.vocab_size={size}")
    assert ended.code == 2
    assert f"impossible draft_vocab_size, wanted {RESERVED} (special and byte tokens) to {V}" in ended.err
    assert not list(tmp_path.glob("*map*"))


def test_the_tokens_that_the_targets_configuration_stops_at_are_in_the_map(
    shell: Shell, rows: Path, tmp_path: Path, target: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for file in target.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    words = ("vocab", rows, "-o", "map.safetensors", "draft.vocab_size=261", f"target.name={own}")
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 310]}))
    assert shell.run(*words).code == 0
    assert ids() == [*range(260), 310]
    (own / "generation_config.json").unlink()
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"eos_token_id": 319}))
    assert shell.run(*words).code == 0
    assert ids() == [*range(260), 319]


def test_a_target_as_wide_as_its_map_needs_none_and_gives_the_whole_vocabulary(
    shell: Shell, rows: Path, tmp_path: Path
) -> None:
    ended = shell.run("vocab", rows, "-o", "map.safetensors", f"draft.vocab_size={V}")
    assert ended.code == 0
    assert VocabMapping.load(Path("map.safetensors")).d2t.tolist() == [0] * V
    with run_server(tmp_path / "runs" / "default"):
        assert shell.run("feed", rows).code == 0
        ended = shell.run("produce", "produce.supervision=target_probs")
        assert (ended.code, "target_probs need a vocabulary map" in ended.err) == (2, True)
        assert shell.run("produce", "--json").document["produced"] == 3
    for shard in (tmp_path / "runs" / "default" / "shards").glob("c-*.safetensors"):
        assert load_file(shard)["logits"].shape[-1] == V


def test_rows_with_tokens_that_the_target_does_not_have_are_rejected_by_every_command_that_reads_them(
    shell: Shell, tmp_path: Path
) -> None:
    tokenizer, narrow = tiny_target.tiny_tokenizer(), tmp_path / "narrow"
    tokenizer.add_tokens(["<extra>"])  # 259, and so beyond a target of 259 tokens
    save_tiny_target(narrow)
    tokenizer.save_pretrained(narrow)
    shell.common = (f"target.name={narrow}", *shell.common[1:])
    odd = {"id": "odd", "messages": tiny_target.turns("say", "an <extra> word")}
    path = write_rows(tmp_path / "rows.jsonl", [conversation(0), odd, conversation(2)])
    rejected = "rejected, token beyond the target's vocabulary: id 259, its vocabulary has 259"
    with run_server(tmp_path / "runs" / "default"):
        for words in (
            ("vocab", path, "-o", "map.safetensors", "draft.vocab_size=259"),
            ("feed", path),
            ("train", path, "--target-backend", "colocated", "--output", "out"),
        ):
            ended = shell.run(*words)
            assert ended.code == 0, ended.err
            assert f"rows.jsonl:2 (odd): {rejected}" in ended.out
            assert "2 accepted, 0 duplicates, 1 rejected" in ended.out


def test_a_map_of_another_tokenizer_is_refused_before_anything_is_queued_or_made(
    shell: Shell, rows: Path, tmp_path: Path, target: Path
) -> None:
    """As many tokens, and one of them is another."""
    other = tmp_path / "other"
    other.mkdir()
    for file in target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    said = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(said.replace("<s>", "<t>"))
    settings = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(settings.replace("<s>", "<t>"))
    assert shell.run("vocab", rows, "-o", "theirs", "draft.vocab_size=260", f"target.name={other}").code == 0
    assert shell.run("vocab", rows, "-o", "ours", "draft.vocab_size=260").code == 0
    assert ids("theirs") == ids("ours")
    wrong = "the vocabulary map is another tokenizer's"
    with run_server(tmp_path / "runs" / "default"):
        ended = shell.run("feed", rows, "--vocab", "theirs")
        assert (ended.code, wrong in ended.err) == (3, True)
        assert shell.run("feed", rows, "--vocab", "ours").code == 0
        ended = shell.run("produce", "--vocab", "theirs")
        assert (ended.code, wrong in ended.err) == (3, True)
        assert not list((tmp_path / "runs" / "default" / "shards").glob("*.safetensors"))
        ended = shell.run("train", rows, "--target-backend", "colocated", "--vocab", "theirs")
        assert (ended.code, wrong in ended.err) == (3, True)
        assert shell.run("produce", "--vocab", "ours").code == 0


@pytest.mark.parametrize("width", [V - 1, RESERVED])
@pytest.mark.parametrize("supervision", ["target_probs", "last_hidden_states"])
def test_a_map_over_another_number_of_tokens_is_refused_before_anything_is_queued(
    shell: Shell, rows: Path, tmp_path: Path, width: int, supervision: str
) -> None:
    """One of the tokenizer's tokens alone, say, while the head is padded to a round size."""
    VocabMapping.from_ids(torch.arange(100), vocab_size=width).save(Path("narrow"))
    with run_server(tmp_path / "runs" / "default") as client:
        ended = shell.run("feed", rows, "--vocab", "narrow", f"produce.supervision={supervision}")
        told = f"narrow: the vocabulary map is another target's, wanted {V} tokens, got {width}"
        assert (ended.code, told in ended.err) == (3, True)
        assert open_queue(client, "default", "prompts").stats().ready == 0


def test_a_map_that_does_not_name_its_tokenizer_is_taken(shell: Shell, rows: Path, tmp_path: Path) -> None:
    mapping = VocabMapping.from_ids(torch.arange(300), vocab_size=V)
    save_file({"t2d": mapping.t2d, "d2t": mapping.d2t}, "theirs.safetensors")
    with run_server(tmp_path / "runs" / "default"):
        assert shell.run("feed", rows, "--vocab", "theirs.safetensors").code == 0


def test_training_on_last_hidden_states_refuses_another_tokenizers_map(
    shell: Shell, rows: Path, tmp_path: Path
) -> None:
    mapping = VocabMapping.from_ids(torch.arange(300), vocab_size=V)
    mapping.of_tokenizer("f" * 32).save(Path("theirs.safetensors"))
    with run_server(tmp_path / "runs" / "default"):
        assert shell.run("feed", rows).code == 0
        assert shell.run("produce", "produce.supervision=last_hidden_states").code == 0
        ended = shell.run("train", "--vocab", "theirs.safetensors")
        assert (ended.code, "the vocabulary map is another tokenizer's" in ended.err) == (3, True)


@pytest.mark.parametrize(
    ("word", "got"), [("target.dtype=bfloat16", "float32"), ("target.aux_layer_ids=0,1,2", "1,2,3")]
)
def test_what_a_trainer_asks_of_its_samples_and_they_are_not_is_refused_at_the_start(
    shell: Shell, rows: Path, tmp_path: Path, word: str, got: str
) -> None:
    with run_server(tmp_path / "runs" / "default"):
        assert shell.run("feed", rows).code == 0
        assert shell.run("produce").code == 0
        ended = shell.run("train", word)
        assert ended.code == 2
        wanted = word.partition("=")[2]
        assert f"the run's samples have another value, wanted {wanted}, got {got}; start a new run" in ended.err
        assert not (tmp_path / "runs" / "default" / "draft" / "history.jsonl").exists()
