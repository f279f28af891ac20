"""What a chat template is told holds for every command of a run, and what it leaves out is said."""

import json
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from chat_templates import LLAMA3, QWEN3, R1, family_tokenizer
from commands import Shell, write_rows
from doctors import found, only
from tiny_target import END, STRICT, tiny_model, turns

QUIET = 'target.chat_template_kwargs={"enable_thinking": false}'
THINKING = turns("a", "<think>t1</think>x", "b", "<think>t2</think>y")


def save_target(folder: Path, template: str) -> Path:
    model = tiny_model()
    model.resize_token_embeddings(300)
    model.save_pretrained(folder)
    family_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_target(tmp_path_factory.mktemp("thinker"), QWEN3)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, thinker: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    small = ["feed.max_length=256", "draft.vocab_size=300", "target.num_threads=1"]
    return Shell(capsys, f"target.name={thinker}", "target.dtype=float32", *small)


def greedy(folder: Path, messages: list[dict[str, Any]], **values: Any) -> str:
    """What the target answers behind the prompt that a server forms, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values)
    with torch.no_grad():
        new = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
    end = tokenizer.convert_tokens_to_ids(END)
    return tokenizer.decode(new[: new.index(end)] if end in new else new).rstrip("\ufffd")


def test_answers_are_given_to_the_prompt_that_a_server_forms_with_the_same_values(shell: Shell, thinker: Path) -> None:
    rows = write_rows(Path("prompts.jsonl"), [{"id": "p", "messages": turns("say something")}])
    answered = {}
    for name, options in (("plain", []), ("quiet", [QUIET])):
        ended = shell.run("answers", rows, "-o", f"{name}.jsonl", "--max-new-tokens", "6", *options)
        assert ended.code == 0, ended.err
        answered[name] = json.loads(Path(f"{name}.jsonl").read_text("utf-8"))["messages"][-1]["content"]
    assert answered["plain"] == greedy(thinker, turns("say something"))
    assert answered["quiet"] == greedy(thinker, turns("say something"), enable_thinking=False)
    assert answered["plain"] != answered["quiet"]


def test_feed_and_producers_must_be_told_the_same(shell: Shell) -> None:
    rows = write_rows(Path("rows.jsonl"), [{"id": "r", "messages": turns("a", "y")}])
    assert shell.run("feed", rows, QUIET).code == 0
    ended = shell.run("produce")
    assert ended.code != 0
    assert "template_fingerprint" in ended.err
    assert shell.run("produce", QUIET, "--json").document["produced"] == 1


def test_a_vocabulary_counts_what_is_trained_on_under_the_same_values(shell: Shell) -> None:
    rows = write_rows(Path("rows.jsonl"), [{"id": "r", "messages": turns("a", "yy")}])
    counted = [
        shell.run("vocab", rows, "-o", "vocab.safetensors", "--json", "draft.vocab_size=290", *options).document
        for options in ([], [QUIET])
    ]
    # the letters of <think> and </think>, a line feed, "y" and what ends it; then the last two alone
    assert [each["distinct"] for each in counted] == [len("<>/think\ny") + 1, 2]


def test_turns_that_are_not_trained_on_are_counted_and_said(shell: Shell) -> None:
    rows = write_rows(Path("rows.jsonl"), [{"id": f"r{n}", "messages": THINKING} for n in range(3)])
    ended = shell.run("feed", rows, "--json")
    assert (ended.document["accepted"], ended.document["unsupervised_turns"]) == (3, 3)
    told = shell.run("feed", rows, "run.id=again").out
    assert "3 assistant turns are not trained on: the text does not hold them as the target wrote them" in told


def test_turns_that_the_template_leaves_out_are_counted_and_said(shell: Shell, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "drops", R1)
    system = {"role": "system", "content": "Be brief"}
    rows = write_rows(Path("rows.jsonl"), [{"id": "r", "messages": [system, *THINKING]}])
    ended = shell.run("feed", rows, f"target.name={folder}")
    assert "the template leaves out 1 turns of role system" in ended.out


def test_a_row_that_a_strict_template_refuses_is_rejected_and_the_others_are_fed(shell: Shell, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "strict", STRICT)
    bad, good = [*turns("a"), *turns("b", "c")], turns("a", "b")
    rows = write_rows(Path("rows.jsonl"), [{"id": "bad", "messages": bad}, {"id": "good", "messages": good}])
    ended = shell.run("feed", rows, f"target.name={folder}", "--json")
    assert ended.code == 0
    assert (ended.document["rejected"], ended.document["queued"]) == (1, 1)
    assert ended.document["rejections"][0]["reason"] == "the template refuses it: roles must alternate"


def test_the_doctor_says_what_a_template_puts_before_an_answer(shell: Shell) -> None:
    finding = found(shell.run(*only("target")), "target.mask")
    assert finding["status"] == "warn"
    assert "the template itself puts '<think>" in finding["what"]
    assert "enable_thinking" in finding["fix"]
    quiet = found(shell.run(*only("target"), QUIET), "target.mask")
    assert "puts" not in quiet["what"]


def test_the_doctor_tries_a_target_that_always_thinks_with_thinking(shell: Shell, tmp_path: Path) -> None:
    finding = found(shell.run(*only("target"), f"target.name={save_target(tmp_path / 'r1', R1)}"), "target.mask")
    assert finding["status"] == "warn"
    assert "It is Madrid." in finding["what"]
    assert "without thinking cannot be used" in finding["what"]


def test_the_doctor_warns_of_a_template_that_writes_the_date_of_the_day(shell: Shell, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "dated", LLAMA3)
    words = [*only("target"), f"target.name={folder}"]
    assert "each day's date" in found(shell.run(*words), "target.template")["what"]
    fixed = found(shell.run(*words, "target.chat_template_date=2026-01-31"), "target.template")
    assert fixed["status"] == "ok"


class AnotherDay(datetime):
    """Tells a day that is not today."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2001, 2, 3, tzinfo=tz)


def test_rows_fed_again_on_another_day_are_the_same_with_a_date_and_told_without(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_target(tmp_path / "dated", LLAMA3)
    rows = write_rows(Path("rows.jsonl"), [{"id": "r", "messages": turns("a", "b")}])
    words = ["feed", rows, f"target.name={folder}", "--keep-open", "--json"]
    dated = [*words, "run.id=dated", "target.chat_template_date=2026-01-31"]
    assert [shell.run(*each).document["queued"] for each in (words, dated)] == [1, 1]
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", AnotherDay)
    assert shell.run(*words).document["conflicts"] == ["r"]
    again = shell.run(*dated).document
    assert (again["known"], again["conflicts"]) == (1, [])
