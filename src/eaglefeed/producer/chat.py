"""Rows to chats: the two row forms people have, brought to one, or rejected with a reason. No tokens here."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from eaglefeed.producer.jsonl import parse_json
from eaglefeed.schema.refs import safe_sample_id

__all__ = ["Chat", "ChatIds", "RowFault", "parse_chat"]

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
_MAX_SLUG = 64
_MAX_DEPTH = 64
_UNREAD = {
    "functions": "call them tools",
    "documents": "write them into a turn",
    "chat_template_kwargs": "set target.chat_template_kwargs",
}
"""Keys of other programs' rows that would change the text, and what to do instead."""


class RowFault(Exception):
    """Why one row cannot be used; the run goes on."""


@dataclass(frozen=True)
class Chat:
    """One conversation.

    Args:
        sample_id: a safe sample id, made of the row's id or of its content.
        messages: {"role": …, "content": str, …} in OpenAI's roles, other keys of a turn kept. An assistant's turn of
            "weight" 0 is not trained on.
        tools: the row's `tools`, for the template.
        cut_off: the last answer was cut at a length ("finish": "length"), so the target did not end its turn there.
    """

    sample_id: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    cut_off: bool = False

    def digest(self, num_messages: int | None = None) -> int:
        """A digest of the content, or of its first messages."""
        return xxhash.xxh3_64_intdigest(_canonical([self.messages[:num_messages], self.tools]))


class ChatIds:
    """Ids seen so far, with line and digest of each: some 200 bytes a row."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def is_new(self, chat: Chat, line: int) -> bool:
        """Whether the chat is new; False for one with an id and content that came before.

        Raises:
            RowFault: its id came before, with another content; names both lines.
        """
        digest = chat.digest()
        first_line, first_digest = self._seen.setdefault(chat.sample_id, (line, digest))
        if first_digest != digest:
            raise RowFault(f"id used before with another content: lines {first_line} and {line}")
        return first_line == line


def parse_chat(row: dict[str, Any], role_aliases: Mapping[str, str] | None = None) -> Chat:
    """Bring a row to one form: OpenAI `messages`, or ShareGPT `conversations` (from/value or role/content).

    A key that is null is as good as absent, in the row and in its turns. The row's `system` or `system_prompt` becomes
    the first turn.

    The sample id is the row's `id` (a string or an integer) where it is a safe one, else its safe characters and a
    digest of it; without an id it is "row-" and a digest of the content, so it is the same in every run.

    Args:
        row: one JSON object.
        role_aliases: a role's name in the rows → one of the roles that are known.

    Raises:
        RowFault: neither or both keys, an unknown role, or content that no template could render.
    """
    keys = [key for key in ("messages", "conversations") if row.get(key) is not None]
    if len(keys) != 1:
        found = [key[:64] for key in sorted(row)[:10]]
        raise RowFault("both messages and conversations" if keys else f"no messages or conversations: keys {found}")
    turns = row[keys[0]]
    if not isinstance(turns, list) or not turns:
        raise RowFault(f"{keys[0]} is no list of turns")
    if unread := [key for key in _UNREAD if row.get(key)]:
        raise RowFault(f"{unread[0]} of a row reach no template: {_UNREAD[unread[0]]}")
    roles = _ROLES | {name: _ROLES[role] for name, role in (role_aliases or {}).items()}
    messages = _with_system(row, [_message(index, turn, roles) for index, turn in enumerate(turns)])
    tools = _tools(row.get("tools"))
    return Chat(_sample_id(row.get("id"), messages, tools), messages, tools, cut_off=row.get("finish") == "length")


def _tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str) and tools:  # as tables hold them, whose columns have one kind
        try:
            tools = parse_json(tools)
        except ValueError:
            raise RowFault("tools are not JSON") from None
    if tools and not isinstance(tools, list):
        raise RowFault("tools is no list")
    _check_values(tools, "tools")
    return list(tools) if isinstance(tools, list) and tools else None


def _with_system(row: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = row.get("system") or row.get("system_prompt")
    if not system:
        return messages
    if not isinstance(system, str):
        raise RowFault(f"system is no text: {type(system).__name__}")
    turn = {"role": "system", "content": system}
    _check_values(turn, "system")
    if any(message["role"] == "system" for message in messages):
        raise RowFault("both a system text and a system turn")
    return [turn, *messages]


def _message(index: int, turn: object, roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowFault(f"a turn is no object: turn {index}")
    given = {key: value for key, value in turn.items() if value is not None}
    role = _either(index, given, "role", "from")
    if role is None:
        raise RowFault(f"a turn without a role: turn {index}, keys {[key[:64] for key in sorted(turn)[:10]]}")
    if not isinstance(role, str) or role not in roles:
        raise RowFault(f"unknown role {str(role)[:64]!r}: turn {index}")
    content = _either(index, given, "content", "value")
    if given.get("weight", 1) not in (0, 1):
        raise RowFault(f"a weight that is neither 0 nor 1: turn {index}")
    if given.get("train", True) not in (True, False):  # another name for it
        raise RowFault(f"train that is neither true nor false: turn {index}")
    if not given.get("train", True):
        given["weight"] = 0
    if "function_call" in given:
        raise RowFault(f"function_call is an old form of tool_calls: turn {index}")
    calls = given.pop("tool_calls", None)
    if calls:
        given["tool_calls"] = _tool_calls(index, calls)
    text = _content(index, content, has_calls=bool(calls) and roles[role] == "assistant")
    message = {"role": roles[role], "content": text, **given}
    _check_values(message, f"turn {index}")
    return message


def _either(index: int, turn: dict[str, Any], name: str, other: str) -> object:
    """Take out what stands under one of two names."""
    if name in turn and other in turn:
        raise RowFault(f"both {name} and {other}: turn {index}")
    return turn.pop(name, None) if name in turn else turn.pop(other, None)


def _check_values(value: object, where: str, depth: int = 0) -> None:
    """Refuse what a template or a tokenizer would fail on, wherever it stands."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowFault(f"no valid Unicode (a lone surrogate): {where}") from None
    elif isinstance(value, dict | list):
        if depth == _MAX_DEPTH:
            raise RowFault(f"nested too deeply: {where}")
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_values(part, where, depth + 1)


def _content(index: int, content: object, *, has_calls: bool) -> str:
    if content is None and has_calls:
        return ""
    if content is None:
        raise RowFault(f"content is null: turn {index}")
    if isinstance(content, list):
        content = "".join(_part(index, part) for part in content)
    if not isinstance(content, str):
        raise RowFault(f"content is neither text nor a list of text parts: turn {index}")
    return content


def _part(index: int, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowFault(f"content part that is no text ({str(kind)[:64]}): turn {index}")


def _tool_calls(index: int, calls: object) -> list[Any]:
    """OpenAI's form holds the arguments as a JSON string; templates want the object, and would quote a string again."""
    if not isinstance(calls, list):
        raise RowFault(f"tool_calls is no list: turn {index}")
    return [_tool_call(index, call) for call in calls]


def _tool_call(index: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault(f"a tool call without a function's name: turn {index}")
    arguments = function.get("arguments")
    if arguments in (None, ""):  # as servers do
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            raise RowFault(f"tool call arguments are not JSON: turn {index}") from None
    if not isinstance(arguments, dict):
        raise RowFault(f"tool call arguments are no object ({type(arguments).__name__}): turn {index}")
    return {**call, "function": {**function, "arguments": arguments}}


def _sample_id(row_id: object, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    if row_id is None or row_id == "":
        return f"row-{xxhash.xxh3_64_hexdigest(_canonical([messages, tools]))}"
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise RowFault(f"id is neither text nor an integer: {type(row_id).__name__}")
    text = str(row_id)
    try:
        return safe_sample_id(text)
    except ValueError:
        slug = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:_MAX_SLUG].strip("-") or "id"
        return f"{slug}-{xxhash.xxh3_64_hexdigest(text.encode(errors='surrogatepass'))}"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
