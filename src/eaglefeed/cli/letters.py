"""How the commands show a dead letter: its reason, what its payload says, and how it is made ready again."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eaglefeed.errors import SchemaError
from eaglefeed.queue import rules
from eaglefeed.queue.address import address_of
from eaglefeed.queue.base import MAIN_GROUP, DeadLetter
from eaglefeed.schema.prompt import Prompt, decode_prompt
from eaglefeed.schema.refs import decode_ref, ref_to_json

__all__ = ["describe", "describe_payload", "given_words", "one_line", "requeue_command", "show"]

_SHOWN_BYTES = 32
_DEEPEST = 4


def describe(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter for programs, without its payload."""
    return {"id": letter.id, "reason": letter.reason, "delivery_count": letter.delivery_count}


def describe_payload(queue: str, payload: bytes) -> dict[str, Any]:
    """What a payload of `queue` says: a prompt's sizes or a ref's fields, or why it cannot be read."""
    try:
        if rules.samples_of(queue) is not None:
            return _describe_prompt(decode_prompt(payload))
        return ref_to_json(decode_ref(payload))
    except (SchemaError, OverflowError) as error:
        return {"unreadable": str(error), "num_bytes": len(payload), "begins_with": payload[:_SHOWN_BYTES].hex()}


def _describe_prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "sample_id": prompt.sample_id,
        "num_tokens": prompt.num_tokens,
        "rows": [{"num_tokens": len(row.input_ids), "num_supervised": sum(row.loss_mask)} for row in prompt.rows],
        "max_length": prompt.max_length,
        "tokenizer_fingerprint": prompt.tokenizer_fingerprint,
        "template_fingerprint": prompt.template_fingerprint,
    }


def show(queue: str, letter: DeadLetter, payload: dict[str, Any], command: str) -> list[str]:
    """A dead letter for people."""
    lines = [f"{letter.id}: dead in {queue}, deliveries: {letter.delivery_count}", f"reason: {letter.reason}"]
    lines += ["payload:", *_indented(payload, "  "), f"once it is mended: {command}"]
    return [one_line(line) for line in lines]


def _indented(fields: dict[str, Any], margin: str) -> Iterator[str]:
    """A line a value; the parts of a part share one."""
    for name, value in fields.items():
        if isinstance(value, dict) and len(margin) < _DEEPEST:
            yield f"{margin}{name}:"
            yield from _indented(value, margin + "  ")
        else:
            yield f"{margin}{name}: {json.dumps(value)}"


def requeue_command(item_id: str, *, queue: str, group: str, run: str, given: Sequence[str] = ()) -> str:
    """The command that makes it ready again.

    Args:
        item_id: the letter's.
        queue: where it lies.
        group: which sees it dead.
        run: the queue's.
        given: how the run was reached, see `given_words`.
    """
    words = ["eaglefeed", "queue", "dead", "requeue", "--run", run, "--queue", queue]
    words += ["--group", group] if group != MAIN_GROUP else []
    return shlex.join([*words, *given, *(["--"] if item_id.startswith("-") else []), item_id])


def given_words(redis: str | None, config: Path | None, overrides: Sequence[str]) -> list[str]:
    """The words by which a command was told where the run is, without a password: that is the user's own to add.

    Args:
        redis: the option's, if it was given.
        config: the same.
        overrides: `section.field=value` words; none of those may hold a secret but the queue's address.
    """
    words = ["--redis", address_of(redis)] if redis is not None else []
    words += ["--config", str(config)] if config is not None else []
    for each in overrides:
        name, _, value = each.partition("=")
        words.append(f"{name}={address_of(value)}" if name == "redis_url" else each)
    return words


def one_line(text: str) -> str:
    """`text` with its control characters spelled out: ids and reasons come from data."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
