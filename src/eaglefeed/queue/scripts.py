"""The Lua scripts: found as package data, each with the keys that its opening comment declares."""

import re
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

from eaglefeed.queue.base import QueueLimits

__all__ = ["Script", "load"]

_KEY = re.compile(r"^--   (?:(\w+)\.)?(\w+) +(?:HASH|LIST|ZSET) ", re.MULTILINE)
_OWN = "q"


@dataclass(frozen=True)
class Script:
    """A script's whole text, its digest as the server computes it, and its keys: (table, name) in order of KEYS."""

    text: str
    sha: str
    keys: tuple[tuple[str, str], ...]


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua` behind the lines all scripts share.

    The comment is the contract: `--   owner  HASH  …` makes KEYS[1] known as `q.owner`; a name of two parts such as
    `prompts.owner` goes into a table of that name.
    """
    body = _read(name)
    keys = tuple((table or _OWN, key) for table, key in _KEY.findall(body))
    text = "\n".join([_defaults(), *_tables(keys), _read("common"), body])
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest(), keys)


def _read(name: str) -> str:
    return (files("eaglefeed.queue") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _defaults() -> str:
    fields = ", ".join(f"{name} = {value}" for name, value in asdict(QueueLimits()).items())
    return f"local DEFAULTS = {{{fields}}}"


def _tables(keys: tuple[tuple[str, str], ...]) -> list[str]:
    fields: dict[str, list[str]] = {}
    for place, (table, name) in enumerate(keys, start=1):
        fields.setdefault(table, []).append(f"{name} = KEYS[{place}]")
    return [f"local {table} = {{{', '.join(entries)}}}" for table, entries in fields.items()]
