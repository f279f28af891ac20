"""A conversations file as work items: `feed` queues them, `train` on a target of its own goes over them."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from eaglefeed.cli.targets import target_tokenizer
from eaglefeed.config import Settings
from eaglefeed.producer.feed_record import FeedRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eaglefeed.config import FeedSection
    from eaglefeed.producer.jsonl import ReadReport
    from eaglefeed.schema.prompt import Prompt

__all__ = ["PromptReader", "RowRules", "row_rules"]


class RowRules(TypedDict):
    """What the settings say about a file's rows, for `read_conversations` and its like."""

    max_line_bytes: int
    role_aliases: "Mapping[str, str]"
    max_rejected_share: float


def row_rules(feed: "FeedSection") -> RowRules:
    """What the settings say about a file's rows."""
    return RowRules(
        max_line_bytes=feed.max_line_bytes,
        role_aliases=feed.role_aliases,
        max_rejected_share=feed.max_rejected_share,
    )


class PromptReader:
    """Tokenizes with the target's own tokenizer and template, as target and feed settings say.

    Args:
        settings: of the run.
        max_positions: tokens a row of the target may have; None if it does not say.
        vocab_size: V; rows with ids beyond it are rejected.
    """

    def __init__(self, settings: Settings, *, max_positions: int | None, vocab_size: int | None = None) -> None:
        from eaglefeed.producer.loading import template_fingerprint, tokenizer_fingerprint

        self._tokenizer, self._feed = target_tokenizer(settings), settings.feed
        self.num_tokens, self._vocab_size = len(self._tokenizer), vocab_size
        self.tokenizer_fingerprint = tokenizer_fingerprint(self._tokenizer)
        self.template_fingerprint = template_fingerprint(self._tokenizer)
        self.max_length = min(settings.feed.max_length, max_positions or settings.feed.max_length)

    @property
    def record(self) -> FeedRecord:
        """How it makes prompts, which a run agrees on."""
        return FeedRecord(
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            template_fingerprint=self.template_fingerprint,
            max_length=self.max_length,
            batch_size=self._feed.batch_size,
            packing=self._feed.packing,
        )

    def read(self, path: Path, report: "ReadReport", *, any_share: bool = False) -> "Iterator[Prompt]":
        """The file's work items, in an order that is always the same; `read_conversations` explains the rest.

        Args:
            path: of the file.
            report: counts every row.
            any_share: rows may be rejected without a bound, for who has used the others when this is known.
        """
        from eaglefeed.producer.conversations import (
            batches,
            packed_batches,
            read_conversations,
            to_packed_prompt,
            to_prompt,
        )

        said = {
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "template_fingerprint": self.template_fingerprint,
        }
        rules = row_rules(self._feed)
        if any_share:
            rules["max_rejected_share"] = 1.0
        size, length = self._feed.batch_size, self.max_length
        vocab_size = self._vocab_size
        rows = read_conversations(path, self._tokenizer, report, max_length=length, vocab_size=vocab_size, **rules)
        if self._feed.packing:
            for packed in packed_batches(rows, size, length):
                yield to_packed_prompt(packed, max_length=length, **said)
        else:
            for group in batches(rows, size):
                yield to_prompt(group, max_length=length, **said)
