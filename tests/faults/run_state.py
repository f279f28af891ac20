"""All that a server keeps of a run, so that two equal runs look equal: tokens and places by order, times not at all."""

import re
from typing import Any

from eaglefeed.errors import EaglefeedError
from eaglefeed.queue.connection import QueueClient
from faults.operation_base import Call, Run

_READ = {b"hash": ("HGETALL",), b"list": ("LRANGE", 0, -1), b"set": ("SMEMBERS",), b"zset": ("ZRANGE", 0, -1)}
_MILLISECONDS, _TOKEN = re.compile(r"(?<!\d)\d{13}(?!\d)"), re.compile(r"(?<!\d)\d{16}(?!\d)")
_AGE = re.compile(r"(oldest_ready_s=)[\d.]+")
_BY_PLACE = (b":seq", b":returning")


def attempt(call: Call, run: Run) -> object:
    """What the call returned or raised."""
    try:
        return call(run)
    except EaglefeedError as error:
        return error


def told(result: object, kept: dict[str, object]) -> str:
    """A call's result and what is kept after it, comparable between runs."""
    lines = [_AGE.sub(r"\1", _TOKEN.sub("token", repr(result)))]
    for key, value in sorted(kept.items()):
        ranks = {} if key.endswith(":state") else _ranks(key, kept)
        lines.append(f"{key}: {_TOKEN.sub(lambda found, ranks=ranks: ranks.get(found[0], 'token'), repr(value))}")
    return _MILLISECONDS.sub("ms", "\n".join(lines))


def _ranks(key: str, kept: dict[str, object]) -> dict[str, str]:
    """Tokens compare within one group; its session, and its last token once it holds none, stand for themselves."""
    place = key.rpartition(":")[0]
    text = repr([value for other, value in kept.items() if other.startswith(place) and not other.endswith(":state")])
    return {token: f"token{rank}" for rank, token in enumerate(sorted(set(_TOKEN.findall(text))))}


def kept_of(client: QueueClient, namespace: str) -> dict[str, object]:
    """Key → type and value, of all keys of a run but the replies that are kept for its clients."""
    names = [name for name in keys_of(client, namespace) if b":replay:" not in name]
    assert {client.call("PTTL", name) for name in names} <= {-1}
    return {name.decode().replace(namespace, "run"): _read(client, name) for name in names}


def keys_of(client: QueueClient, namespace: str) -> list[bytes]:
    return sorted(client.call("KEYS", f"eaglefeed:{{{namespace}}}:*"))


def _read(client: QueueClient, key: bytes) -> Any:
    kind = client.call("TYPE", key)
    command, *args = _READ[kind]
    scores = ["WITHSCORES"] if kind == b"zset" else []
    value = client.call(command, key, *args, *scores)
    if key.endswith(_BY_PLACE):  # a place is a time: only the order of places compares
        return value[::2]
    if kind == b"list":
        return value
    return sorted(value) if kind == b"set" else sorted(zip(value[::2], value[1::2], strict=True))
