"""Conversations to work items: tokenized, masked, cut, checked, and grouped by length. One pass, bounded memory."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from eaglefeed.producer.chat import ChatIds, RowFault, parse_chat
from eaglefeed.producer.jsonl import MAX_LINE_BYTES, ReadReport, Row, read_rows
from eaglefeed.producer.masking import tokenize_chat
from eaglefeed.schema.prompt import Prompt, PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Conversation", "batches", "read_conversations", "to_prompt"]

_WINDOW_BATCHES = 16
_MAX_FIRST_ID = 96


class Conversation(NamedTuple):
    """One tokenized conversation: its token ids, and 1 where the loss is taken (not shifted)."""

    sample_id: str
    line: int
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def read_conversations(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    report: ReadReport,
    *,
    max_length: int,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Conversation]:
    """Tokenize a JSONL file with the target's chat template, in the file's order.

    Args:
        path: rows with OpenAI `messages` or ShareGPT `conversations`.
        tokenizer: the target's own.
        report: counts every row; complete once the iterator is exhausted.
        max_length: tokens a row is cut to, before it is checked for tokens to learn from.
        max_line_bytes: longer lines are rejected unread.

    Raises:
        ConfigError: the file cannot be read.
        InputError: (at its end) not one row of it was accepted.
    """
    ids = ChatIds()
    for row in read_rows(path, report, max_line_bytes=max_line_bytes):
        try:
            conversation = _conversation(tokenizer, row, ids, report, max_length)
        except RowFault as fault:
            report.reject(row.line, row.id, str(fault))
        else:
            if conversation is not None:
                report.accepted += 1
                yield conversation
    report.require_accepted(path)


def _conversation(
    tokenizer: "PreTrainedTokenizerBase", row: Row, ids: ChatIds, report: ReadReport, max_length: int
) -> Conversation | None:
    chat = parse_chat(row.data)
    if not ids.is_new(chat, row.line):
        report.duplicates += 1
        return None
    tokens = tokenize_chat(tokenizer, chat)
    input_ids, loss_mask = tokens.input_ids[:max_length], tokens.loss_mask[:max_length]
    if not any(loss_mask):
        raise RowFault("no loss tokens after truncation" if any(tokens.loss_mask) else "no loss tokens")
    report.unsupervised_turns += tokens.unsupervised_turns
    return Conversation(chat.sample_id, row.line, tuple(input_ids), tuple(loss_mask))


def batches(conversations: Iterator[Conversation], batch_size: int) -> Iterator[list[Conversation]]:
    """Group conversations of like length; each window of 16 batches is sorted by length. The order is reproducible."""
    if batch_size == 1:
        yield from ([conversation] for conversation in conversations)
        return
    while window := list(islice(conversations, batch_size * _WINDOW_BATCHES)):
        window.sort(key=lambda conversation: len(conversation.input_ids))
        for start in range(0, len(window), batch_size):
            yield window[start : start + batch_size]


def to_prompt(
    rows: Sequence[Conversation], *, tokenizer_fingerprint: str, template_fingerprint: str, max_length: int
) -> Prompt:
    """The work item of one or more conversations.

    A single row keeps its id. Several get the first one's id, ".b", their number, "-" and a digest of all their ids.
    """
    sample_id = rows[0].sample_id
    if len(rows) > 1:
        digest = xxhash.xxh32_hexdigest(" ".join(row.sample_id for row in rows).encode())
        sample_id = f"{sample_id[:_MAX_FIRST_ID]}.b{len(rows)}-{digest}"
    return Prompt(
        sample_id=sample_id,
        rows=tuple(PromptRow(row.input_ids, row.loss_mask) for row in rows),
        tokenizer_fingerprint=tokenizer_fingerprint,
        template_fingerprint=template_fingerprint,
        max_length=max_length,
    )
