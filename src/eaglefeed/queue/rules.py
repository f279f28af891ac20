"""What every queue keeps alike: names, ids, digests, chunks, backoff and the words of a dead letter."""

import re
from collections.abc import Iterator, Sequence

import xxhash

from eaglefeed.errors import ConfigError, InputError
from eaglefeed.queue.base import MAX_BATCH, QueueItem, QueueLimits

__all__ = [
    "PAGE",
    "WORKER_GRACE_S",
    "backoff_ms",
    "check_batch",
    "check_item",
    "check_name",
    "chunks",
    "crash_reason",
    "digest",
    "short_reason",
]

PAGE = 200
"""Items a step of a listing reads."""
WORKER_GRACE_S = 30.0
"""A worker whose last sign of life is older does not live."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ID = re.compile(r"[^\n]{1,256}")
_CHUNK_BYTES = 8 * 2**20
_MAX_REASON = 500
_MAX_DOUBLINGS = 30


def check_name(kind: str, value: str) -> str:
    """Return `value` if it can be part of a key.

    Raises:
        ConfigError: it cannot; `kind` says what it is the name of.
    """
    if not _NAME.fullmatch(value):
        wanted = "1 to 128 of A-Z a-z 0-9 . _ -, not starting with a mark"
        raise ConfigError(f"no {kind} can be called that", subject=repr(value[:200]), wanted=wanted)
    return value


def check_batch(n: int) -> None:
    """Refuse a batch that one script cannot serve.

    Raises:
        ConfigError: `n` is not in 1 to MAX_BATCH.
    """
    if not 1 <= n <= MAX_BATCH:
        raise ConfigError("batch size", wanted=f"1 to {MAX_BATCH}", got=n)


def check_item(item: QueueItem) -> None:
    """Refuse an item that the queue cannot keep.

    Raises:
        InputError: an id with a line break, empty or long; negative stored_bytes.
    """
    if not _ID.fullmatch(item.id):
        raise InputError("cannot be an item's id", subject=repr(item.id[:200]), wanted="1 to 256 characters, one line")
    if item.stored_bytes < 0:
        raise InputError("stored_bytes", subject=item.id, wanted="0 or more", got=item.stored_bytes)


def digest(payload: bytes) -> str:
    """What is remembered of a payload for good, to tell a repeated put from a conflict."""
    return xxhash.xxh3_64_hexdigest(payload)


def chunks(items: Sequence[QueueItem]) -> Iterator[list[QueueItem]]:
    """Split `items` into calls of at most MAX_BATCH items and about 8 MiB."""
    chunk: list[QueueItem] = []
    num_bytes = 0
    for item in items:
        check_item(item)
        if chunk and (len(chunk) == MAX_BATCH or num_bytes + len(item.payload) > _CHUNK_BYTES):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(item)
        num_bytes += len(item.payload)
    yield chunk


def backoff_ms(limits: QueueLimits, delivery_count: int, jitter: float) -> int:
    """Delay after a nack: the base doubled with each delivery, the upper half of it spread by `jitter` (0 to 1)."""
    doubled_s = limits.backoff_base_s * 2 ** min(delivery_count - 1, _MAX_DOUBLINGS)
    return int(min(limits.backoff_max_s, doubled_s) * (0.5 + 0.5 * jitter) * 1000)


def crash_reason(crashes: int, error: str) -> str:
    """Why an item is dead whose workers died; `error` is its last nack's reason, if it had one."""
    told = f"; last error: {error}" if error else ""
    return f"its lease ran out {crashes} times while it was leased alone{told}"


def short_reason(reason: str) -> str:
    """Bound a reason, so that a long exception text does not fill the server."""
    return reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 1] + "…"
