"""Reading what others wrote into a run's journal: a value of the wrong kind is as good as none."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["mapping", "number", "sequence", "text", "tidied", "whole"]

_DEEPEST = 8


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A finite number; None for anything else."""
    value: Any = values.get(name)
    kind = type(value)
    return value if kind is int or (kind is float and math.isfinite(value)) else None


def whole(values: Mapping[str, Any], name: str) -> int:
    """A count; 0 for anything else."""
    value = number(values, name)
    return 0 if value is None else int(value)


def text(values: Mapping[str, Any], name: str) -> str:
    """A text; "" for anything else."""
    value = values.get(name)
    return value if isinstance(value, str) else ""


def mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Values by name; none for anything else."""
    value = values.get(name)
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}


def sequence(values: Mapping[str, Any], name: str) -> list[Any]:
    """A list; an empty one for anything else."""
    value = values.get(name)
    return list(value) if isinstance(value, list | tuple) else []


def tidied(value: Any, depth: int = 0) -> Any:
    """What JSON can say of a value: no bytes, no numbers that are not finite, nothing deeper than eight levels."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping) and depth < _DEEPEST:
        return {str(name): tidied(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        return [tidied(each, depth + 1) for each in value]
    return str(value)
