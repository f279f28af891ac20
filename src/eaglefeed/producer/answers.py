"""Let the target answer prompts, greedily: a draft must learn what its target says."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import torch

from eaglefeed.producer.answer_file import OTHER_FILE, answers_before, appending
from eaglefeed.producer.chat import Chat, ChatIds, RowFault, parse_chat
from eaglefeed.producer.encoding import encode_start
from eaglefeed.producer.jsonl import MAX_LINE_BYTES, ReadReport, Row, read_rows
from eaglefeed.producer.loading import eos_token_ids
from eaglefeed.producer.rendering import render

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["AnswerReport", "answer_prompts"]

_WINDOW_BATCHES = 8


@dataclass
class AnswerReport:
    """What an answering run did.

    Args:
        answered: prompts that were answered now.
        kept: prompts whose answers stood in the output before.
        cut_off: answers that reached the token limit before their end.
        num_tokens: tokens of the answers, end markers counted.
        read: the prompts' own report.
    """

    answered: int = 0
    kept: int = 0
    cut_off: int = 0
    num_tokens: int = 0
    read: ReadReport = field(default_factory=ReadReport)

    def count(self, num_tokens: int, finish: str) -> None:
        """Count one answer."""
        self.answered += 1
        self.num_tokens += num_tokens
        self.cut_off += finish == "length"


class _Question(NamedTuple):
    chat: Chat
    input_ids: list[int]


class _Answer(NamedTuple):
    content: str
    num_tokens: int
    finish: str


def answer_prompts(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Path,
    output: Path,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    on_batch: Callable[[AnswerReport], None] = lambda _: None,
    report: AnswerReport | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    role_aliases: Mapping[str, str] | None = None,
    max_rejected_share: float = 1.0,
) -> AnswerReport:
    """Answer every prompt of a JSONL file and append the conversations to another, in the order they are done.

    Each line is {"id", "messages", "finish"}: the prompt's messages and the answer, and "stop", or "length" for an
    answer that was cut at `max_new_tokens`. A run that is started again goes on where it stopped: answered prompts are
    passed over, a half-written last line is dropped.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        prompts: rows that end in a user's or a tool's turn.
        output: the conversations; created if it is not there.
        max_new_tokens: tokens an answer may take.
        batch_size: prompts a forward; prompts of like length are put together.
        on_batch: called with the report after each batch.
        report: filled in, also where this fails; a new one by default.
        max_line_bytes: longer lines of the prompts are rejected unread.
        role_aliases: names of roles in the prompts → the roles they are.
        max_rejected_share: of the prompts, 0 to 1; more is an error at the end.

    Raises:
        ConfigError: the prompts cannot be read, or the output is theirs or another process's.
        InputError: none of them can be used, or too few, or the output holds something else or cannot be written (what
            was written stays good).
    """
    report = report or AnswerReport()
    with appending(output, prompts) as file:
        done = answers_before(output)
        rows = read_rows(prompts, report.read, max_line_bytes=max_line_bytes)
        new = _unanswered(rows, done, report, role_aliases)
        questions = _questions(tokenizer, new, report.read, _longest(model) - max_new_tokens)
        for batch in _batches(questions, batch_size):
            answers = _generate(model, tokenizer, [question.input_ids for question in batch], max_new_tokens)
            for question, answer in zip(batch, answers, strict=True):
                _write(file, question.chat, answer)
                report.count(answer.num_tokens, answer.finish)
            on_batch(report)
    report.read.require_accepted(prompts, max_rejected_share=max_rejected_share)
    return report


def _unanswered(
    rows: Iterator[Row], done: dict[str, int], report: AnswerReport, role_aliases: Mapping[str, str] | None
) -> Iterator[tuple[Row, Chat]]:
    ids = ChatIds()
    for row in rows:
        try:
            chat = parse_chat(row.data, role_aliases)
            if not ids.is_new(chat, row.line):
                report.read.duplicates += 1
            elif _is_answered(chat, done):
                report.kept += 1
                report.read.accepted += 1
            else:
                yield row, chat
        except RowFault as fault:
            report.read.reject(row.line, row.id, str(fault))


def _is_answered(chat: Chat, done: dict[str, int]) -> bool:
    digest = done.get(chat.sample_id)
    if digest is not None and digest != chat.digest():
        raise RowFault("answered before with another prompt: " + OTHER_FILE)
    return digest is not None


def _questions(
    tokenizer: "PreTrainedTokenizerBase", chats: Iterator[tuple[Row, Chat]], read: ReadReport, room: int
) -> Iterator[_Question]:
    for row, chat in chats:
        try:
            question = _question(tokenizer, chat, room)
        except RowFault as fault:
            read.reject(row.line, row.id, str(fault))
        else:
            read.accepted += 1
            yield question


def _question(tokenizer: "PreTrainedTokenizerBase", chat: Chat, room: int) -> _Question:
    if chat.messages[-1]["role"] not in ("user", "tool"):
        raise RowFault(f"nothing to answer: it ends in a turn of {chat.messages[-1]['role']}")
    text = render(tokenizer, chat, len(chat.messages))
    input_ids = encode_start(tokenizer, text, max(room, 0))["input_ids"]
    if len(input_ids) > room:
        raise RowFault(f"too long for the target: more than {room} tokens")
    return _Question(chat, input_ids)


def _batches(questions: Iterator[_Question], batch_size: int) -> Iterator[list[_Question]]:
    while window := list(islice(questions, batch_size * _WINDOW_BATCHES)):
        window.sort(key=lambda question: len(question.input_ids))
        for start in range(0, len(window), batch_size):
            yield window[start : start + batch_size]


def _generate(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[int]], max_new_tokens: int
) -> list[_Answer]:
    eos = eos_token_ids(model, tokenizer)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    with torch.inference_mode():
        # A checkpoint's own defaults (sampling, penalties) would make it another policy than the one that is served.
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos[0] if eos else 0,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
    return [_answer(tokenizer, row, eos) for row in output[:, longest:].tolist()]


def _answer(tokenizer: "PreTrainedTokenizerBase", new_ids: list[int], eos: list[int]) -> _Answer:
    end = next((index for index, token in enumerate(new_ids) if token in eos), None)
    text = tokenizer.decode(new_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if end is None:
        return _Answer(text.rstrip("\ufffd"), len(new_ids), "length")  # the cut may fall into a character
    return _Answer(text, end + 1, "stop")


def _write(file: IO[str], chat: Chat, answer: _Answer) -> None:
    turn = {"role": "assistant", "content": answer.content}
    row = {"id": chat.sample_id, "messages": [*chat.messages, turn], "finish": answer.finish}
    if chat.tools is not None:
        row["tools"] = chat.tools
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _longest(model: "PreTrainedModel") -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)
