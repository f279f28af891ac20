"""The target answers prompts: greedily, each once, and again from where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglefeed.errors import InputError
from eaglefeed.producer.answers import AnswerReport, answer_prompts
from eaglefeed.producer.chat import parse_chat
from tiny_target import END, tiny_model, tiny_tokenizer, turns

TOKENIZER = tiny_tokenizer()
END_ID = TOKENIZER.convert_tokens_to_ids(END)
MAX_NEW = 6


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    model = tiny_model()
    # A random model hardly ever ends by itself: lift the end marker's score so that some answers do.
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(259))
    model.lm_head.bias.data[END_ID] = 1.0
    # Defaults of a checkpoint that must not change what is greedy.
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = END_ID
    return model


def write_prompts(folder: Path, count: int = 9) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"id": f"p{n}", "messages": turns("x" * (n * 5 % 7) + chr(97 + n))} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(model: Any, prompts: Path, output: Path, **options: Any) -> AnswerReport:
    return answer_prompts(model, TOKENIZER, prompts, output, **{"max_new_tokens": MAX_NEW, "batch_size": 4} | options)


def greedy(model: Any, messages: list[dict[str, Any]]) -> tuple[list[int], bool]:
    """One token at a time, without cache or padding."""
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    new: list[int] = []
    while len(new) < MAX_NEW:
        with torch.no_grad():
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
        if new[-1] == END_ID:
            return new[:-1], True
    return new, False


def test_answers_are_the_targets_greedy_ones(model: Any, tmp_path: Path):
    report = run(model, write_prompts(tmp_path), tmp_path / "out.jsonl")
    rows = rows_of(tmp_path / "out.jsonl")
    assert sorted(row["id"] for row in rows) == [f"p{n}" for n in range(9)]
    finishes = set()
    for row in rows:
        new, ended = greedy(model, row["messages"][:-1])
        text = TOKENIZER.decode(new)
        assert row["messages"][-1] == {"role": "assistant", "content": text if ended else text.rstrip("\ufffd")}
        assert row["finish"] == ("stop" if ended else "length")
        finishes.add(row["finish"])
    assert finishes == {"stop", "length"}, "the fixture should show both"
    assert (report.answered, report.kept, report.read.rejected) == (9, 0, 0)
    assert report.cut_off == sum(row["finish"] == "length" for row in rows)


def test_a_cut_off_answer_is_read_back_as_one(model: Any, tmp_path: Path):
    run(model, write_prompts(tmp_path), tmp_path / "out.jsonl")
    assert all(parse_chat(row).cut_off == (row["finish"] == "length") for row in rows_of(tmp_path / "out.jsonl"))


def test_a_second_run_goes_on_where_the_first_stopped(model: Any, tmp_path: Path):
    prompts, whole, stopped = write_prompts(tmp_path), tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    run(model, prompts, whole)
    lines = whole.read_text().splitlines(keepends=True)
    stopped.write_text("".join(lines[:5]) + lines[5][:17])
    report = run(model, prompts, stopped)
    assert (report.answered, report.kept) == (4, 5)
    assert stopped.read_text().startswith("".join(lines[:5]))
    assert sorted(rows_of(stopped), key=str) == sorted(rows_of(whole), key=str)


def test_a_finished_run_again_changes_nothing(model: Any, tmp_path: Path):
    prompts, output = write_prompts(tmp_path), tmp_path / "out.jsonl"
    run(model, prompts, output)
    before = output.read_bytes()
    assert run(model, prompts, output).answered == 0
    assert output.read_bytes() == before


def test_rows_that_cannot_be_answered_are_reported(model: Any, tmp_path: Path):
    prompts = write_prompts(tmp_path, 2)
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "done", "messages": turns("a", "b")}) + "\n")
        file.write(json.dumps({"id": "long", "messages": turns("x" * 300)}) + "\n")
        file.write("{\n")
    report = run(model, prompts, tmp_path / "out.jsonl")
    assert [(found.line, found.reason.split(":")[0]) for found in report.read.rejections] == [
        (3, "nothing to answer"),
        (4, "too long for the target"),
        (5, "not JSON"),
    ]
    assert report.answered == 2


def test_an_output_that_holds_something_else_is_left_alone(model: Any, tmp_path: Path):
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    with pytest.raises(InputError, match=r"holds other things than answers, got line 1: not JSON"):
        run(model, write_prompts(tmp_path), output)
    assert output.read_text() == "precious\n"


def test_prompts_that_changed_under_their_id_are_reported(model: Any, tmp_path: Path):
    prompts, output = write_prompts(tmp_path, 2), tmp_path / "out.jsonl"
    run(model, prompts, output)
    prompts.write_text(json.dumps({"id": "p0", "messages": turns("another")}) + "\n")
    with pytest.raises(InputError, match="answered before with another prompt"):
        run(model, prompts, output)


def test_an_output_that_cannot_be_written_is_one_clear_error(model: Any, tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written, got No such file"):
        run(model, write_prompts(tmp_path), tmp_path / "none" / "out.jsonl")
