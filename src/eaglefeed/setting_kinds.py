"""Kinds of settings that take more than a line."""

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue
from pydantic_settings import NoDecode

__all__ = ["GroupName", "Groups", "RoleAliases", "TemplateValues", "as_words"]

_OF_A_CONVERSATION = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")


def _parsed(value: object) -> object:
    """Accept an object as JSON's text too."""
    return json.loads(value) if isinstance(value, str) else value


def _free(name: str) -> str:
    if name in _OF_A_CONVERSATION:
        raise ValueError(f"{name} is what a template gets of each conversation")
    return name


_Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$"), AfterValidator(_free)]
TemplateValues = Annotated[dict[_Name, JsonValue], NoDecode, BeforeValidator(_parsed)]


def _pairs(value: object) -> object:
    """Accept the mapping {a: b} and its spellings "a:b,c:d" and JSON."""
    if not isinstance(value, str):
        return value
    if value.startswith("{"):
        return json.loads(value)
    parts = (part.partition(":") for part in value.split(",") if part)
    return {name.strip(): known.strip() for name, _, known in parts}


RoleAliases = Annotated[dict[str, Literal["system", "user", "assistant", "tool"]], NoDecode, BeforeValidator(_pairs)]
"""A role's name in the rows → the role it is."""


def as_words(value: object) -> object:
    """Accept the list [a, b] and its spellings "a,b" and "[a, b]"."""
    parts = [part for part in value.strip("[] ").split(",") if part] if isinstance(value, str) else value
    return tuple(str(part).strip(" '\"") for part in parts) if isinstance(parts, list | tuple) else parts


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError("a name is listed twice")
    return names


GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Groups = Annotated[
    tuple[GroupName, ...], Field(min_length=1), NoDecode, BeforeValidator(as_words), AfterValidator(_distinct)
]
