"""The Lua scripts: found as package data, each with the keys that its opening comment declares."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

from hiredis import pack_command

from eaglefeed.queue.base import QueueLimits

__all__ = ["SHARED", "Keys", "Script", "load"]

SHARED = ("common", "items")
"""Files of definitions that scripts share."""

_KEY = re.compile(r"^--   (?:(\w+)\.)?(\w+) +(?:HASH|LIST|ZSET|SET) ", re.MULTILINE)
_OWN, _EACH = "q", "each"


@dataclass(frozen=True)
class Script:
    """A script's whole text, its digest as the server computes it, and its keys, as (table, name) in order of KEYS.

    `each` are the keys that follow, once for every group of the queue. A script that `replays` returns the stored reply
    of a call that is repeated; its last arguments are the call's sequence number and name, and 1 for a repetition.
    """

    text: str
    sha: str
    keys: tuple[tuple[str, str], ...]
    each: tuple[str, ...]
    replays: bool


class Keys:
    """The keys of a call, packed once as the protocol wants them: most of a call's words, and the same each time."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._num_words = 3 + len(names)
        self._packed = _words_of(_pack(len(names), *names))

    def pack(self, script: Script, args: Sequence[str | bytes | float]) -> bytes:
        """The packed EVALSHA of `script` with these keys."""
        head = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % (self._num_words + len(args), script.sha.encode())
        return b"".join((head, self._packed, _words_of(_pack(*args))))


def _pack(*words: str | bytes | float) -> bytes:
    packed: bytes = pack_command(words)  # type: ignore[arg-type]  # its stubs are too narrow
    return packed


def _words_of(packed: bytes) -> bytes:
    """A packed command without the number of its words."""
    return packed[packed.index(b"\n") + 1 :]


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua` behind what it needs of the `SHARED` ones.

    The comment is the contract: `--   owner  HASH  …` makes KEYS[1] known as `q.owner`; a name of two parts such as
    `prompts.owner` goes into a table of that name, and `each.ready` into a table for each group, in the list `groups`.
    """
    body = _read(name)
    found = _KEY.findall(body)
    keys = tuple((table or _OWN, key) for table, key in found if table != _EACH)
    each = tuple(key for table, key in found if table == _EACH)
    replays = ("run", "replay") in keys
    call = [f"local {name} = table.remove(ARGV)" for name in ("AGAIN", "CALL", "SEQUENCE") if replays]
    text = "\n".join([*call, *_tables(keys), *_groups(len(keys), each), *_shared(body), body])
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest(), keys, each, replays)


def _read(name: str) -> str:
    return (files("eaglefeed.queue") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _defaults() -> str:
    fields = ", ".join(f"{name} = {value}" for name, value in asdict(QueueLimits()).items())
    return f"local DEFAULTS = {{{fields}}}"


def _shared(body: str) -> list[str]:
    """The definitions that a script needs: each block of a shared file defines one name, out of those before it."""
    needed, chosen = _words(body), list[str]()
    for block in reversed([_defaults(), *(block for name in SHARED for block in _read(name).split("\n\n"))]):
        name = re.search(r"^local (?:function )?(\w+)", block, re.MULTILINE)
        if name and name[1] in needed:
            needed |= _words(block)
            chosen.insert(0, block)
    return chosen


def _words(code: str) -> set[str]:
    return set(re.findall(r"\w+", re.sub("--.*", "", code)))


def _tables(keys: tuple[tuple[str, str], ...]) -> list[str]:
    fields: dict[str, list[str]] = {}
    for place, (table, name) in enumerate(keys, start=1):
        fields.setdefault(table, []).append(f"{name} = KEYS[{place}]")
    return [f"local {table} = {{{', '.join(entries)}}}" for table, entries in fields.items()]


def _groups(num_keys: int, each: tuple[str, ...]) -> list[str]:
    if not each:
        return []
    fields = ", ".join(f"{name} = KEYS[at + {place}]" for place, name in enumerate(each, start=1))
    loop = f"for at = {num_keys}, #KEYS - {len(each)}, {len(each)} do groups[#groups + 1] = {{{fields}}} end"
    return ["local groups = {}", loop]
