"""What a consumer does with a batch: lease, ack, commit, and deletion of what is released."""

from enum import StrEnum

from eaglefeed.queue.base import Lease, LeaseQueue

__all__ = ["Cycle", "drain"]

_COMMIT_EVERY = 1000
_AHEAD = 64
"""Messages that a consumer leases ahead when it acknowledges one by one, as the peers do."""


class Cycle(StrEnum):
    """Kinds of cycle. `ACK` is the one that the bounds are for: acknowledged and committed in one call."""

    ACK = "ack"
    ACK_EACH = "ack_each"
    COMMIT = "commit"
    COMMIT_1000 = "commit_1000"
    COMMIT_RELEASE = "commit_release"

    @property
    def words(self) -> str:
        """What is called for each batch."""
        return {
            Cycle.ACK: "lease, ack that commits at once",
            Cycle.ACK_EACH: f"lease of up to {_AHEAD}, and an ack that commits at once for each message",
            Cycle.COMMIT: "lease, ack(step), commit(step)",
            Cycle.COMMIT_1000: f"lease, ack(step), and a commit every {_COMMIT_EVERY} messages",
            Cycle.COMMIT_RELEASE: "lease, ack(step), commit(step), released, forget",
        }[self]


_COMMITTED = (Cycle.COMMIT, Cycle.COMMIT_1000, Cycle.COMMIT_RELEASE)


def drain(queue: LeaseQueue, batch: int, cycle: Cycle, *, wait_s: float = 0.0, stop_at: int = 0) -> tuple[int, int]:
    """Go through the queue until nothing is ready, or `stop_at` messages are done; returns messages and leases."""
    messages = step = open_messages = 0
    size = _AHEAD if cycle is Cycle.ACK_EACH else batch
    while not stop_at or messages < stop_at:
        lease = queue.lease(size, visibility_timeout_s=60.0, consumer="bench", wait_s=wait_s)
        if not isinstance(lease, Lease):
            if stop_at:
                continue
            break
        step += 1
        open_messages += len(lease.items)
        _ack(queue, lease, step, cycle)
        if cycle in _COMMITTED and (cycle is not Cycle.COMMIT_1000 or open_messages >= _COMMIT_EVERY):
            queue.commit(step)
            open_messages = 0
        if cycle is Cycle.COMMIT_RELEASE:
            queue.forget([item.id for item in queue.released(size)])
        messages += len(lease.items)
    if cycle is Cycle.COMMIT_1000 and open_messages:
        queue.commit(step)
    return messages, step


def _ack(queue: LeaseQueue, lease: Lease, step: int, cycle: Cycle) -> None:
    ids = [item.id for item in lease.items]
    if cycle is Cycle.ACK_EACH:
        for item_id in ids:
            queue.ack(lease.token, [item_id])
    else:
        queue.ack(lease.token, ids, step=step if cycle in _COMMITTED else None)
