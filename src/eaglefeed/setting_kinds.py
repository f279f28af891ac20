"""Kinds of settings that take more than a line."""

import json
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue
from pydantic_settings import NoDecode

__all__ = ["TemplateValues"]

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
