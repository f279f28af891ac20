"""What the scripts reply, as the interface's types."""

from typing import Any

from eaglefeed.errors import UnsafeServer
from eaglefeed.queue.base import Lease, LeasedItem, QueueStats

__all__ = ["read_lease", "read_stats"]


def read_lease(reply: list[Any]) -> Lease:
    """A lease, from token, deadline, ids, a line each, payloads, and deliveries that ended before, if there are any.

    Raises:
        UnsafeServer: a payload is gone.
    """
    token, deadline_ms, joined, payloads, ended = reply
    ids = joined.decode().split("\n")
    if None in payloads:
        lost = ids[payloads.index(None)]
        fix = "set maxmemory-policy noeviction, purge the queue and feed again"
        raise UnsafeServer("its payload is gone: the server evicted it, or somebody deleted it", subject=lost, fix=fix)
    counts = [int(before or 0) + 1 for before in ended] or [1] * len(ids)
    items = tuple(map(LeasedItem, ids, payloads, counts))
    return Lease(token=int(token), deadline_ms=int(deadline_ms), items=items)


def read_stats(reply: list[Any], name: str, group: str) -> QueueStats:
    """The counts of `stats`, in its order."""
    *counts, state, ctl, workers, oldest_ready_ms = reply
    ready, delayed, leased, tentative, held, parked, done, dead = counts
    redelivered, session, committed_step = (int(value or 0) for value in state)
    stored_bytes, closed, full, released = (int(value or 0) for value in ctl)
    roles = [worker.decode().partition(" ")[0] for worker in workers]
    return QueueStats(
        name=name,
        group=group,
        ready=ready,
        delayed=delayed,
        leased=leased,
        tentative=tentative,
        held=held,
        parked=parked,
        done=done,
        dead=dead,
        released=released,
        redelivered=redelivered,
        session=session,
        committed_step=committed_step,
        stored_bytes=stored_bytes,
        closed=bool(closed),
        full=bool(full),
        oldest_ready_s=int(oldest_ready_ms) / 1000,
        workers={role: roles.count(role) for role in sorted(set(roles))},
    )
