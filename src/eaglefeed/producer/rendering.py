"""Chats to text, by the target's own template and the values that it is given for a whole run."""

import json
from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from eaglefeed.producer.chat import Chat, RowFault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SENTINEL", "give_values", "render", "render_turns", "squeezed", "unrendered_roles"]

SENTINEL = "\ue000"
"""A character for private use, to find a place in a rendered text."""
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_DIRECTIVES = "aAbBdHIjmMpSuUwWyY"


def render(tokenizer: "PreTrainedTokenizerBase", chat: Chat, num_messages: int | None = None) -> str:
    """The template's text of a whole chat, or the prompt that a server would form of its first messages.

    Raises:
        RowFault: the template refuses it; carries the template's message. Or the text is no Unicode.
    """
    messages = chat.messages if num_messages is None else chat.messages[:num_messages]
    text = render_turns(tokenizer, messages, chat.tools, as_prompt=num_messages is not None)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowFault("its text is no valid Unicode (a lone surrogate)") from None
    return text


def render_turns(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], tools: list[Any] | None, *, as_prompt: bool
) -> str:
    """The template's text of some turns, with the header of an answer behind them for a prompt.

    Raises:
        RowFault: the template refuses them.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=as_prompt)
    except _TEMPLATE_FAULTS as error:
        raise RowFault(f"the template refuses it: {str(error)[:300]}") from None
    return str(text)


def squeezed(text: str) -> str:
    """The text without white space, which templates trim and add as they like."""
    return "".join(text.split())


def unrendered_roles(tokenizer: "PreTrainedTokenizerBase", chat: Chat, text: str) -> tuple[str, ...]:
    """The role of each turn whose content the template leaves out of the text, but for the assistant's."""
    whole, position, missing = squeezed(text), 0, []
    is_rendered: dict[str, bool] = {}
    for index, message in enumerate(chat.messages):
        content, role = squeezed(message["content"]), message["role"]
        if not content or role == "assistant":
            continue
        found = whole.find(content, position)
        if found < 0 and content not in whole:
            if role not in is_rendered:
                is_rendered[role] = _is_rendered(tokenizer, chat, index)
            missing += [role] * (not is_rendered[role])
        position = max(position, found)
    return tuple(missing)


def _is_rendered(tokenizer: "PreTrainedTokenizerBase", chat: Chat, index: int) -> bool:
    """Whether the content reaches the text in some other form, such as JSON."""
    messages = list(chat.messages)
    messages[index] = messages[index] | {"content": SENTINEL}
    try:
        return SENTINEL in render_turns(tokenizer, messages, chat.tools, as_prompt=False)
    except RowFault:
        return True


def give_values(tokenizer: "PreTrainedTokenizerBase", values: Mapping[str, Any], today: date | None) -> None:
    """Set names, and the date that `strftime_now` tells, at the head of the tokenizer's templates.

    There they hold for whatever is rendered with it, and are part of the template's fingerprint.
    """
    lines = [f"{{% set {name} = {_literal(values[name])} %}}\n" for name in sorted(values)]
    if today is not None:
        told = "".join(f" | replace('%{each}', '{today.strftime('%' + each)}')" for each in _DIRECTIVES)
        lines.append(f"{{% macro strftime_now(format) %}}{{{{ format | replace('%-', '%'){told} }}}}{{% endmacro %}}\n")
    head, template = "".join(lines), tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: head + text for name, text in template.items()}
    elif template:
        tokenizer.chat_template = head + template


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
