"""Conversations to work items: tokenized, masked, cut, checked, and grouped or packed. One pass, bounded memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from eaglefeed.producer.chat import Chat, ChatIds, RowFault, parse_chat
from eaglefeed.producer.jsonl import MAX_LINE_BYTES, ReadReport, read_rows
from eaglefeed.producer.masking import tokenize_chat
from eaglefeed.schema.prompt import Prompt, PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Conversation", "batches", "packed_batches", "read_conversations", "to_packed_prompt", "to_prompt"]

_WINDOW_BATCHES = 16
_OPEN_ROWS = 32
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
    vocab_size: int | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    role_aliases: Mapping[str, str] | None = None,
    max_rejected_share: float = 1.0,
) -> Iterator[Conversation]:
    """Tokenize a JSONL file with the target's chat template, in the file's order.

    Args:
        path: rows with OpenAI `messages` or ShareGPT `conversations`.
        tokenizer: the target's own.
        report: counts every row; complete once the iterator is exhausted.
        max_length: tokens a row is cut to, before it is checked for tokens to learn from.
        vocab_size: V; a row with a token that the target has no row for is rejected.
        max_line_bytes: longer lines are rejected unread.
        role_aliases: names of roles in the file → the roles they are.
        max_rejected_share: of the file's rows, 0 to 1.

    Raises:
        ConfigError: the file cannot be read.
        InputError: it is no JSONL; or (at its end) not one row of it was accepted, or too many were rejected.
    """
    ids = ChatIds()
    for row in read_rows(path, report, max_line_bytes=max_line_bytes):
        try:
            chat = parse_chat(row.data, role_aliases)
            conversation = _conversation(tokenizer, chat, row.line, ids, report, max_length)
            _check_ids(conversation, vocab_size)
        except RowFault as fault:
            report.reject(row.line, row.id, str(fault))
        else:
            if conversation is not None:
                report.accepted += 1
                yield conversation
    report.require_accepted(path, max_rejected_share=max_rejected_share)


def _conversation(
    tokenizer: "PreTrainedTokenizerBase", chat: Chat, line: int, ids: ChatIds, report: ReadReport, max_length: int
) -> Conversation | None:
    if not ids.is_new(chat, line):
        report.duplicates += 1
        return None
    tokens = tokenize_chat(tokenizer, chat, max_length=max_length)
    input_ids, loss_mask = tokens.input_ids[:max_length], tokens.loss_mask[:max_length]
    if not any(loss_mask[1:]):  # a first token has nothing before it to be predicted from
        raise RowFault("no loss tokens after truncation" if len(tokens.input_ids) > max_length else "no loss tokens")
    report.unsupervised_turns += tokens.unsupervised_turns
    report.unrendered.update(tokens.unrendered)
    return Conversation(chat.sample_id, line, tuple(input_ids), tuple(loss_mask))


def _check_ids(conversation: Conversation | None, vocab_size: int | None) -> None:
    """Some tokenizers have tokens that were added to them alone."""
    highest = max(conversation.input_ids) if conversation else -1
    if vocab_size is not None and highest >= vocab_size:
        raise RowFault(f"token beyond the target's vocabulary: id {highest}, its vocabulary has {vocab_size}")


def batches(conversations: Iterator[Conversation], batch_size: int) -> Iterator[list[Conversation]]:
    """Group conversations of like length; each window of 16 batches is sorted by length. The order is reproducible."""
    if batch_size == 1:
        yield from ([conversation] for conversation in conversations)
        return
    while window := list(islice(conversations, batch_size * _WINDOW_BATCHES)):
        window.sort(key=lambda conversation: len(conversation.input_ids))
        for start in range(0, len(window), batch_size):
            yield window[start : start + batch_size]


def packed_batches(
    conversations: Iterable[Conversation], batch_size: int, max_length: int
) -> Iterator[list[list[Conversation]]]:
    """Groups of rows of several conversations each, which together have at most `max_length` tokens.

    A conversation goes into the first of 32 open rows that has room for it. Where none has, the fullest is done. So
    what is in memory is bounded, and the order reproducible.
    """
    rows = _packed(conversations, max_length)
    while group := list(islice(rows, batch_size)):
        yield group


def _packed(conversations: Iterable[Conversation], max_length: int) -> Iterator[list[Conversation]]:
    rows: list[list[Conversation]] = []
    for conversation in conversations:
        room = max_length - len(conversation.input_ids)
        row = next((row for row in rows if _num_tokens(row) <= room), None)
        if row is not None:
            row.append(conversation)
            continue
        if len(rows) == _OPEN_ROWS:
            yield rows.pop(max(range(len(rows)), key=lambda index: _num_tokens(rows[index])))
        rows.append([conversation])
    yield from rows


def _num_tokens(row: list[Conversation]) -> int:
    return sum(len(conversation.input_ids) for conversation in row)


def to_prompt(
    rows: Sequence[Conversation], *, tokenizer_fingerprint: str, template_fingerprint: str, max_length: int
) -> Prompt:
    """The work item of one or more conversations, each a row of its own.

    A single one keeps its id. Several get the first one's id, ".b", their number, "-" and a digest of all their ids.
    """
    return Prompt(
        sample_id=_joint_id("b", rows),
        rows=tuple(PromptRow(row.input_ids, row.loss_mask) for row in rows),
        tokenizer_fingerprint=tokenizer_fingerprint,
        template_fingerprint=template_fingerprint,
        max_length=max_length,
    )


def to_packed_prompt(
    rows: Sequence[Sequence[Conversation]], *, tokenizer_fingerprint: str, template_fingerprint: str, max_length: int
) -> Prompt:
    """The work item of packed rows; its id is as `to_prompt`'s, over the conversations of all rows, with ".p"."""
    return Prompt(
        sample_id=_joint_id("p", [conversation for row in rows for conversation in row]),
        rows=tuple(_packed_row(row) for row in rows),
        tokenizer_fingerprint=tokenizer_fingerprint,
        template_fingerprint=template_fingerprint,
        max_length=max_length,
    )


def _packed_row(row: Sequence[Conversation]) -> PromptRow:
    input_ids = tuple(token for conversation in row for token in conversation.input_ids)
    loss_mask = tuple(value for conversation in row for value in conversation.loss_mask)
    return PromptRow(input_ids, loss_mask, tuple(len(conversation.input_ids) for conversation in row))


def _joint_id(kind: str, conversations: Sequence[Conversation]) -> str:
    first = conversations[0].sample_id
    if len(conversations) == 1:
        return first
    digest = xxhash.xxh32_hexdigest(" ".join(each.sample_id for each in conversations).encode())
    return f"{first[:_MAX_FIRST_ID]}.{kind}{len(conversations)}-{digest}"
