"""Chats to tokens: the target's own template over the whole conversation, and a loss mask on what the target writes.

A template without generation tags is asked for every assistant turn what it renders before and after it. The text in
between is the turn: its header lies before, its end-of-turn marker inside, white space behind the marker outside.
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.encoding import encode_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenizedChat", "render", "tokenize_chat"]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TokenizedChat(NamedTuple):
    """Token ids as apply_chat_template gives them, 1 where the loss is taken, and assistant turns left without loss."""

    input_ids: list[int]
    loss_mask: list[int]
    unsupervised_turns: int


def render(tokenizer: "PreTrainedTokenizerBase", chat: Chat, num_messages: int | None = None) -> str:
    """The template's text of a whole chat, or the prompt that a server would form of its first messages.

    Raises:
        RowFault: the template refuses it; carries the template's message.
    """
    messages = chat.messages if num_messages is None else chat.messages[:num_messages]
    return _render(tokenizer, messages, chat.tools, as_prompt=num_messages is not None)


def tokenize_chat(tokenizer: "PreTrainedTokenizerBase", chat: Chat, *, max_length: int | None = None) -> TokenizedChat:
    """Tokenize a chat once, as a whole, and mark the assistant's tokens.

    Special-token text inside content becomes special ids, as it does on a server. A template with generation tags
    gives its own mask. Elsewhere an earlier turn that the whole text does not hold as it was when the target wrote it
    (thinking that is taken out later) gets no loss; the last assistant turn must be there so.

    Args:
        tokenizer: the target's own.
        chat: the conversation.
        max_length: tokens that matter; of a text far longer than these, no more may come.

    Raises:
        RowFault: the template refuses the chat, drops its tool calls, or rewrites its last turn.
    """
    text = render(tokenizer, chat)
    _require_tool_calls(tokenizer, chat, text)
    if _GENERATION_TAG.search(tokenizer.get_chat_template(tools=chat.tools)):
        return _tagged(tokenizer, chat)
    spans = _assistant_spans(tokenizer, chat, text)
    encoded = encode_start(tokenizer, text, max_length)
    starts = [start for start, _ in encoded["offset_mapping"]]
    found = [span for span in spans if span is not None]
    return TokenizedChat(encoded["input_ids"], _mask(starts, found), len(spans) - len(found))


def _render(tokenizer: "PreTrainedTokenizerBase", messages: list[Any], tools: Any, *, as_prompt: bool = False) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=as_prompt)
    except _TEMPLATE_FAULTS as error:
        raise RowFault(f"the template refuses it: {str(error)[:300]}") from None
    return str(text)


def _require_tool_calls(tokenizer: "PreTrainedTokenizerBase", chat: Chat, text: str) -> None:
    bare = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in chat.messages]
    if bare != chat.messages and _render(tokenizer, bare, chat.tools) == text:
        raise RowFault("the template renders no tool_calls: their turn would be empty (content null)")


def _tagged(tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> TokenizedChat:
    encoded = tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return TokenizedChat(list(encoded["input_ids"]), list(encoded["assistant_masks"]), 0)


def _assistant_spans(tokenizer: "PreTrainedTokenizerBase", chat: Chat, text: str) -> list[tuple[int, int] | None]:
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not turns:
        raise RowFault("no assistant turn")
    spans = [_span(tokenizer, chat, text, index) for index in turns]
    last = spans[-1]
    if last is None:
        raise RowFault(f"the template rewrites earlier turns: turn {turns[-1]} is not rendered as the target writes it")
    if chat.cut_off:
        spans[-1] = _without_end_marker(text, last, chat.messages[turns[-1]]["content"])
    return spans


def _span(tokenizer: "PreTrainedTokenizerBase", chat: Chat, text: str, index: int) -> tuple[int, int] | None:
    """Where the turn stands in the text; None if what comes before it, or itself, is rendered otherwise there."""
    if index == 0:
        return None  # a server never answers an empty conversation
    prompt = render(tokenizer, chat, index)
    whole = _render(tokenizer, chat.messages[: index + 1], chat.tools).rstrip()
    if not (whole.startswith(prompt) and text.startswith(whole)):
        return None
    return len(prompt), len(whole)


def _without_end_marker(text: str, span: tuple[int, int], content: str) -> tuple[int, int]:
    start, end = span
    written = content.strip()
    found = text.rfind(written, start, end) if written else start
    return (start, found + len(written)) if found >= 0 else span


def _mask(starts: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """1 for tokens that begin inside a span: one that begins in the header is not the target's to write.

    The bytes of one character share its offsets, so all of them are in or out.
    """
    mask = [0] * len(starts)
    position = 0
    for begin, end in spans:
        while position < len(starts) and starts[position] < begin:
            position += 1
        while position < len(starts) and starts[position] < end:
            mask[position] = 1
            position += 1
    return mask
