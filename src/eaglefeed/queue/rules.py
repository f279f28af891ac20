"""What every queue keeps alike: names, ids, digests, chunks, backoff and the words of a dead letter."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import xxhash

from eaglefeed.errors import ConfigError, InputError, QueueError
from eaglefeed.queue.base import MAX_BATCH, LeaseQueue, QueueItem, QueueLimits

__all__ = [
    "FORMER",
    "INSTANCE",
    "LAST_ERROR",
    "PAGE",
    "WORKER_GRACE_S",
    "backoff_ms",
    "check_batch",
    "check_group",
    "check_holder",
    "check_ids",
    "check_item",
    "check_name",
    "check_pair",
    "chunks",
    "crash_reason",
    "digest",
    "epoch_of",
    "epoch_queue",
    "groups_are_fixed",
    "last_error",
    "last_words",
    "prompts_of",
    "samples_of",
    "short_reason",
    "step_is_released",
]

PAGE = 200
"""Items a step of a listing reads."""
WORKER_GRACE_S = 30.0
"""A worker whose last sign of life is older does not live."""
INSTANCE, FORMER = "instance", "former:"
"""In the run's record: a random id of its queues; and, with such an id behind it, one that a purge made it forget."""
LAST_ERROR = "last_error:"
"""In the run's record, with a role behind it: who of them ended with an error last, and with which."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ID = re.compile("[^\n\ud800-\udfff]{1,256}")  # half a surrogate pair has no bytes
_CHUNK_BYTES = 8 * 2**20
_MAX_REASON = 500
_MAX_DOUBLINGS = 30

Q = TypeVar("Q", bound=LeaseQueue)


def check_name(kind: str, value: str) -> str:
    """Return `value` if it can be part of a key.

    Raises:
        ConfigError: it cannot; `kind` says what it is the name of.
    """
    if not _NAME.fullmatch(value):
        wanted = "1 to 128 of A-Z a-z 0-9 . _ -, not starting with a mark"
        raise ConfigError(f"no {kind} can be called that", subject=repr(value[:200]), wanted=wanted)
    return value


def samples_of(name: str) -> str | None:
    """The queue that gets the samples of this prompts queue; None if it is no prompts queue."""
    return f"samples{name[7:]}" if re.fullmatch(r"prompts(\..+)?", name) else None


def prompts_of(name: str) -> str | None:
    """The queue of the prompts that this queue's samples are made of; None if it is no samples queue."""
    return f"prompts{name[7:]}" if re.fullmatch(r"samples(\..+)?", name) else None


def epoch_queue(epoch: int) -> str:
    """The queue of an epoch's samples, from 0: its own, since a queue knows an id for good."""
    return f"samples.e{epoch}" if epoch else "samples"


def epoch_of(name: str) -> int | None:
    """The epoch whose samples a queue holds; None if its name is none of `epoch_queue`'s."""
    found = re.fullmatch(r"samples(?:\.e([1-9]\d*))?", name)
    return int(found[1] or 0) if found else None


def check_group(queue: str, group: str, declared: Iterable[str]) -> None:
    """Refuse a group that the queue does not have.

    Raises:
        ConfigError: it is not among those declared.
    """
    names = sorted(declared)
    if group not in names:
        fix = "use one of them; groups are declared when the run is created (queue.groups)"
        raise ConfigError(f"{queue} has no such group", subject=group, wanted=" or ".join(names), fix=fix)


def groups_are_fixed(queue: str, declared: Iterable[str], wanted: Iterable[str]) -> ConfigError:
    """Other groups than those that a queue was created with."""
    fix = "use the groups that the run was created with, or start a new run"
    names = [", ".join(sorted(set(groups))) for groups in (declared, wanted)]
    return ConfigError("its groups are fixed", subject=queue, wanted=names[0], got=names[1], fix=fix)


def step_is_released(queue: str, step: int, committed: int) -> QueueError:
    """A restore of a step whose later samples may be gone."""
    fix = "restore that step or a later one; commit only the oldest checkpoint that you keep"
    what = "a later step is committed, its samples are released"
    return QueueError(what, subject=queue, wanted=f"step {committed} or later", got=step, fix=fix)


def check_pair(prompts: LeaseQueue, samples: LeaseQueue, kind: type[Q]) -> Q:
    """The queue that gets the samples of these prompts, as the `kind` that both must be.

    Raises:
        ConfigError: it is another queue, another run's or of another kind.
    """
    wanted = samples_of(prompts.name)
    if not isinstance(samples, kind) or (samples.namespace, samples.name) != (prompts.namespace, wanted):
        raise ConfigError("not the samples of these prompts", subject=samples.name, wanted=wanted)
    return samples


def check_holder(prompt_id: str, item: QueueItem, holder: str) -> None:
    """Refuse to hold a prompt under another id than its sample's.

    Raises:
        ConfigError: they differ.
    """
    if holder and item.id != prompt_id:
        raise ConfigError("a held prompt's sample has its id", subject=item.id, wanted=prompt_id)


def check_batch(n: int) -> None:
    """Refuse a batch that one script cannot serve.

    Raises:
        ConfigError: `n` is not in 1 to MAX_BATCH.
    """
    if not 1 <= n <= MAX_BATCH:
        raise ConfigError("batch size", wanted=f"1 to {MAX_BATCH}", got=n)


def check_ids(ids: Iterable[str]) -> None:
    """Refuse what cannot be an item's id.

    Raises:
        InputError: an id with a line break, empty or long.
    """
    for item_id in ids:
        if not _ID.fullmatch(item_id):
            raise InputError(
                "cannot be an item's id", subject=ascii(item_id[:200]), wanted="1 to 256 characters of text, one line"
            )


def check_item(item: QueueItem) -> None:
    """Refuse an item that the queue cannot keep.

    Raises:
        InputError: an id with a line break, empty or long; negative stored_bytes.
    """
    check_ids([item.id])
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
    text = reason.encode(errors="backslashreplace").decode()  # it may quote data that is no text
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def last_error(record: Mapping[str, bytes], role: str) -> str:
    """What a run's record says of the last error that ended a worker of `role`; "" for none."""
    return record.get(LAST_ERROR + role, b"").decode(errors="replace")


def last_words(worker: str, error: str) -> str:
    """What the run's record keeps of an error that ended a worker."""
    return short_reason(f"{worker}: {error}")
