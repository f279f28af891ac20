"""The file that answers go to: gone on with whatever order they came in, and never harmed if it is something else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglefeed.errors import ConfigError, InputError
from eaglefeed.producer.answer_file import appending
from eaglefeed.producer.answers import AnswerReport, answer_prompts
from tiny_target import tiny_model, tiny_tokenizer, turns

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_model()


def write_prompts(folder: Path, lengths: list[int]) -> Path:
    """Prompts p0, p1, …; those of like length are answered together, the shortest first."""
    path = folder / "prompts.jsonl"
    rows = [{"id": f"p{n}", "messages": turns(chr(97 + n) * length)} for n, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model: Any, prompts: Path, output: Path, **options: Any) -> AnswerReport:
    return answer_prompts(model, TOKENIZER, prompts, output, **{"max_new_tokens": 2, "batch_size": 4} | options)


def ids_in(output: Path) -> list[str]:
    return [json.loads(line)["id"] for line in output.read_text(encoding="utf-8").splitlines()]


class Killed(BaseException):
    pass


def test_a_run_that_ended_with_rows_done_out_of_order_goes_on_with_exactly_the_others(model: Any, tmp_path: Path):
    lengths = [3, 2, 10, 1, 11, 12, 13, 4, 14, 15]  # so rows 3, 1, 0, 7 are done first, and in this order
    prompts, output, answered = write_prompts(tmp_path, lengths), tmp_path / "out.jsonl", []

    def kill(_: AnswerReport) -> None:
        raise Killed

    with pytest.raises(Killed):
        run(model, prompts, output, on_batch=kill)
    assert ids_in(output) == ["p3", "p1", "p0", "p7"]
    before = output.read_bytes()

    real = model.generate

    def generate(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        answered.extend(TOKENIZER.decode(ids[:, -14].tolist()))  # of "a<|im_end|>\n<|im_start|>assistant\n" the "a"
        return real(ids, **options)

    model.generate = generate
    try:
        report = run(model, prompts, output)
    finally:
        del model.generate
    assert sorted(answered) == [chr(97 + n) for n in (2, 4, 5, 6, 8, 9)]
    assert (report.answered, report.kept) == (6, 4)
    assert output.read_bytes().startswith(before)
    assert sorted(ids_in(output)) == [f"p{n}" for n in range(10)]


@pytest.mark.parametrize(
    "content",
    ["precious", "precious\nwithout an end", '{"id": "p0", "messages": [{"role": "user", "content": "a"}]}', "[1, 2]"],
)
def test_what_is_no_file_of_answers_is_left_as_it_is_also_without_a_last_line_feed(
    model: Any, tmp_path: Path, content: str
):
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    with pytest.raises(InputError, match="holds other things than answers, got line 1"):
        run(model, write_prompts(tmp_path, [1, 2]), output)
    assert output.read_text() == content


def test_a_half_written_line_is_dropped_only_behind_nothing_but_answers(model: Any, tmp_path: Path):
    prompts, output = write_prompts(tmp_path, [1, 2]), tmp_path / "out.jsonl"
    foreign = 'a line of notes\n{"id": "p0", "mess'
    output.write_text(foreign)
    with pytest.raises(InputError, match="holds other things than answers, got line 1"):
        run(model, prompts, output)
    assert output.read_text() == foreign


@pytest.mark.parametrize("kept", [1, 7, 30])
def test_a_first_line_that_was_half_written_is_dropped(model: Any, tmp_path: Path, kept: int):
    prompts, output = write_prompts(tmp_path, [1, 2]), tmp_path / "out.jsonl"
    run(model, prompts, output)
    whole = output.read_bytes()
    output.write_bytes(whole[:kept])
    assert run(model, prompts, output).answered == 2
    assert output.read_bytes() == whole


def test_an_answer_that_lacks_its_line_feed_alone_is_kept(model: Any, tmp_path: Path):
    prompts, output = write_prompts(tmp_path, [1, 2, 3]), tmp_path / "out.jsonl"
    run(model, prompts, output)
    whole = output.read_bytes()
    second = whole.index(b"\n", whole.index(b"\n") + 1)
    output.write_bytes(whole[:second])
    report = run(model, prompts, output)
    assert (report.answered, report.kept) == (1, 2)
    assert output.read_bytes() == whole


def test_the_prompts_own_file_is_no_output(model: Any, tmp_path: Path):
    prompts = write_prompts(tmp_path, [1, 2])
    content = prompts.read_text().rstrip("\n")
    prompts.write_text(content)
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for output in (prompts, tmp_path / "link.jsonl"):
        with pytest.raises(ConfigError, match="the output is the prompts' own file"):
            run(model, prompts, output)
    assert prompts.read_text() == content


def test_two_processes_never_write_to_one_output(model: Any, tmp_path: Path):
    prompts, output = write_prompts(tmp_path, [1, 2]), tmp_path / "out.jsonl"
    with appending(output, prompts), pytest.raises(ConfigError, match="another process writes answers here"):
        run(model, prompts, output)
    assert run(model, prompts, output).answered == 2


def test_prompts_with_other_names_for_roles_are_answered_under_an_alias(model: Any, tmp_path: Path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"id": "a", "system": "S", "messages": [{"role": "asker", "content": "q"}]}\n')
    with pytest.raises(InputError, match="unknown role 'asker'"):
        run(model, prompts, output)
    for answered in (1, 0):
        assert run(model, prompts, output, role_aliases={"asker": "user"}).answered == answered
    assert [turn["role"] for turn in json.loads(output.read_text())["messages"]] == ["system", "user", "assistant"]


def test_more_rejected_prompts_than_may_be_are_an_error_and_the_others_answers_stay(model: Any, tmp_path: Path):
    prompts, output, report = write_prompts(tmp_path, [1, 2]), tmp_path / "out.jsonl", AnswerReport()
    with prompts.open("a") as file:
        file.write("{\n")
    with pytest.raises(InputError, match=r"at most 30\.00% of 3"):
        run(model, prompts, output, max_rejected_share=0.3, report=report)
    assert (report.answered, report.read.accepted, report.read.rejected) == (2, 2, 1)
    assert sorted(ids_in(output)) == ["p0", "p1"]
