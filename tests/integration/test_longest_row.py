"""A row longer than the target takes: cut where it is fed, refused everywhere else, and never in a forward."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import pipeline
from commands import Shell, write_rows
from eaglefeed.cli.prompts import PromptReader
from eaglefeed.config import Settings
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.errors import SchemaError
from eaglefeed.producer.jsonl import ReadReport
from eaglefeed.producer.sizes import target_sizes
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow
from remote_models import closing
from target_servers import serving
from tiny_target import tiny_model, tiny_sizes, tiny_tokenizer, turns

torch.set_num_threads(1)

LIMIT = 32


class Watched(HFEagle3TargetModel):
    """Knows the longest row that has come to its model."""

    longest = 0

    def _forward(self, rows: Any, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        self.longest = max(self.longest, rows.input_ids.shape[1])
        return super()._forward(rows, position_ids)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(hf.LlamaConfig(**tiny_sizes(vocab_size=259, max_position_embeddings=LIMIT)))


@pytest.fixture
def target(model: Any) -> Watched:
    return Watched(model)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("short")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def prompt(name: str, length: int, *, packed: bool = False, max_length: int = 64) -> Prompt:
    """Fed for a target that takes more."""
    documents = (length - 2, 2) if packed else ()
    row = PromptRow(tuple(range(length)), (1,) * length, documents)
    return Prompt(
        sample_id=name, rows=(row,), tokenizer_fingerprint="t", template_fingerprint="p", max_length=max_length
    )


# fed


@pytest.mark.parametrize("words", [[], ["feed.max_length=64"]])
def test_rows_are_cut_to_the_targets_positions_and_the_contract_says_so(
    words: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys, f"target.name={folder}", "target.dtype=float32", *words)
    # By hand: start user nl 1+5, "hi", end nl 1+1; start assistant nl 1+10 = 20 tokens before the answer.
    rows = [{"id": name, "messages": turns("hi", "x" * length)} for name, length in (("fits", 10), ("longer", 11))]
    write_rows(tmp_path / "rows.jsonl", rows)
    fed = shell.run("feed", "rows.jsonl", "--json")
    assert fed.code == 0, fed.err
    assert fed.document["tokens"] == 2 * LIMIT  # 20 + 10 + end nl, and the other cut
    produced = shell.run("produce", "--json").document
    assert (produced["produced"], produced["dead"], produced["num_tokens"]) == (2, 0, 2 * LIMIT)
    (written,) = tmp_path.rglob("contract.json")
    assert json.loads(written.read_bytes())["max_length"] == LIMIT


@pytest.mark.parametrize(
    ("engine", "max_length", "wanted"), [("hf", 64, 32), ("vllm", 2048, 32), ("sglang", 64, 24), ("sglang", 20, 20)]
)
def test_the_limit_is_the_least_of_setting_positions_and_what_the_engine_leaves(
    engine: str, max_length: int, wanted: int, folder: Path, tmp_path: Path
) -> None:
    positions = target_sizes(str(folder), engine=engine).max_positions
    settings = Settings(target={"name": str(folder)}, feed={"max_length": max_length})
    reader = PromptReader(settings, max_positions=positions)
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "messages": turns("", "x" * 50)}])
    (made,) = reader.read(rows, ReadReport())
    assert (made.max_length, len(made.rows[0].input_ids)) == (wanted, wanted)


# asked


@pytest.mark.parametrize("packed", [False, True])
def test_a_longer_row_is_a_dead_letter_that_says_why_and_the_others_are_made(target: Watched, packed: bool) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.target = target
    run.feed(prompt("a", 33, packed=packed), prompt("b", 32, packed=packed))
    stats = run.produce(own=pipeline.contract(hidden_size=32, vocab_size=259))
    assert (stats.produced, stats.dead, target.longest) == (1, 1, LIMIT)
    (letter,) = run.prompts.dead_letters()
    assert letter.id == "a"
    assert "row longer than the target's positions, wanted at most 32, got 33" in letter.reason
    assert "feed with a lower feed.max_length" in letter.reason


def test_beside_a_longer_row_none_of_the_batch_is_run(target: Watched) -> None:
    rows = tuple(PromptRow((1,) * length, (1,) * length) for length in (4, 33))
    both = Prompt(sample_id="a", rows=rows, tokenizer_fingerprint="t", template_fingerprint="p", max_length=64)
    with pytest.raises(SchemaError, match="at most 32, got 33"):
        target.generate_batch(**pad_prompt(both))
    assert target.longest == 0


def test_in_place_a_longer_row_is_passed_over_and_counted(target: Watched) -> None:
    with BackendStream(target, [prompt("a", 33), prompt("b", 32)], vocab_size=259) as stream:
        batches = stream.take(2)
    assert [batch.sample_ids for batch in batches] == [("b",)]
    assert (stream.stats.dead, target.longest) == (1, LIMIT)


@pytest.fixture
def answers(target: Watched) -> Iterator[Any]:
    with serving(target) as server, closing(server.url) as model:
        yield model


def test_a_server_refuses_a_longer_row_and_goes_on(answers: Any, target: Watched) -> None:
    with pytest.raises(SchemaError, match="row longer than the target's positions, wanted at most 32, got 33"):
        answers.generate_batch(**pad_prompt(prompt("a", 33)))
    assert answers.generate_batch(**pad_prompt(prompt("b", 32))).input_ids.shape == (1, LIMIT)
    assert target.longest == LIMIT
    assert answers.model_info()["max_positions"] == LIMIT
