"""The doctor's look at a chat template: what of a probe is trained on, and what it writes by itself."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from eaglefeed.ops.doctor import Said, fail, ok, warn
from eaglefeed.producer.chat import Chat, RowFault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eaglefeed.producer.masking import TokenizedChat

__all__ = ["examine_mask", "usable_probe", "writes_a_date"]

_SHOWN_CHARS, _SHOWN_SPANS = 60, 4
_DAYS = date(2001, 2, 3), date(2012, 11, 10)
_TEMPLATE_FIX = "use an instruction-tuned target, or mend the chat template of its tokenizer"
_PLAIN = Chat(
    "doctor",
    [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "It is Paris."},
        {"role": "user", "content": "And that of Spain?"},
        {"role": "assistant", "content": "It is Madrid."},
    ],
)
_THOUGHT = "<think>\nA city is asked for.\n</think>\n\n"
_THINKING = replace(
    _PLAIN,
    messages=[
        turn | {"content": _THOUGHT * (turn["role"] == "assistant") + turn["content"]} for turn in _PLAIN.messages
    ],
)


class Probe(NamedTuple):
    """A conversation that the template takes, its tokens, and why it does not take a plain one ("" if it does)."""

    chat: Chat
    tokens: "TokenizedChat"
    refused: str


def usable_probe(tokenizer: "PreTrainedTokenizerBase") -> Probe:
    """A plain conversation, or one with thinking for a target that always thinks.

    Raises:
        RowFault: neither can be used; what is said of the plain one.
    """
    from eaglefeed.producer.masking import tokenize_chat

    try:
        return Probe(_PLAIN, tokenize_chat(tokenizer, _PLAIN), "")
    except RowFault as fault:
        try:
            return Probe(_THINKING, tokenize_chat(tokenizer, _THINKING), str(fault))
        except RowFault:
            raise fault from None


def examine_mask(tokenizer: "PreTrainedTokenizerBase") -> Iterator[Said]:
    """Look at what of a conversation of two turns is trained on."""
    try:
        probe = usable_probe(tokenizer)
    except RowFault as error:
        yield fail(f"a plain conversation of two turns cannot be used: {error}", _TEMPLATE_FIX)
        return
    ids, mask = probe.tokens.input_ids, probe.tokens.loss_mask
    runs = groupby(zip(ids, mask, strict=True), key=lambda token: token[1])
    spans = [tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]
    if not spans:
        yield fail(f"no token of {len(ids)} of a plain conversation is trained on: the mask is empty", _TEMPLATE_FIX)
        return
    what = f"trained on {sum(mask)} of {len(ids)} tokens of a probe: {', '.join(map(_quoted, spans[:_SHOWN_SPANS]))}"
    yield _judged(what, spans, probe)


def _judged(what: str, spans: list[str], probe: Probe) -> Said:
    answers = [turn["content"] for turn in probe.chat.messages[1::2]]
    if probe.refused:
        fix = "bring the target's own answers, as `eaglefeed answers` writes them"
        return warn(f"{what}; a conversation without thinking cannot be used: {probe.refused}", fix)
    put_in = spans[-1].partition(answers[-1])[0].strip()
    if put_in and answers[-1] in spans[-1]:
        fix = 'for a server that does not think, set target.chat_template_kwargs={"enable_thinking": false}'
        return warn(f"{what}; the template itself puts {_quoted(put_in)} before an answer", fix)
    missing = [answer for answer in answers if not any(answer in span for span in spans)]
    if missing:
        fix = "mend the chat template: it renders an earlier turn otherwise than the target wrote it"
        return warn(f"{what}; not on {', '.join(map(_quoted, missing))}", fix)
    return ok(what)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


def writes_a_date(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the text of a conversation is another each day."""
    from eaglefeed.producer.rendering import give_values, render

    texts = set()
    for day in _DAYS:
        dated = copy(tokenizer)
        give_values(dated, {}, day)
        try:
            texts.add(render(dated, _PLAIN))
        except RowFault:  # target.mask tells it
            return False
    return len(texts) > 1
