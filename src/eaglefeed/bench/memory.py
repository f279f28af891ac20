"""What a ref takes in the server's memory: ready, leased, tentative and done."""

from collections.abc import Iterator

from eaglefeed.bench.bed import Bed
from eaglefeed.bench.cycles import Cycle, drain
from eaglefeed.bench.items import PAYLOAD_BYTES
from eaglefeed.bench.plan import Plan, Reading
from eaglefeed.queue.base import Lease, LeaseQueue

__all__ = ["measure_memory"]

_BATCH = 64
_LONG_S = 3600.0


def measure_memory(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """Bytes an item. Leases are of 64; done items are committed, released and forgotten."""
    count = plan.memory_items
    drain(bed.queue(_BATCH), _BATCH, Cycle.COMMIT_RELEASE)
    before = bed.data_bytes()
    queue = bed.queue(count)
    taken = {"ready_over_payload": bed.data_bytes()}
    leases = list(_lease_all(queue))
    taken["leased_over_payload"] = bed.data_bytes()
    for step, lease in enumerate(leases, start=1):
        queue.ack(lease.token, [item.id for item in lease.items], step=step)
    taken["tentative_over_payload"] = bed.data_bytes()
    queue.commit(len(leases))
    while gone := queue.released():
        queue.forget([item.id for item in gone])
    yield Reading("memory.done", "bytes", (bed.data_bytes() - before) / count)
    for name, num_bytes in taken.items():
        yield Reading(f"memory.{name}", "bytes", (num_bytes - before) / count - PAYLOAD_BYTES)
    bed.clear()


def _lease_all(queue: LeaseQueue) -> Iterator[Lease]:
    while isinstance(lease := queue.lease(_BATCH, visibility_timeout_s=_LONG_S, consumer="bench"), Lease):
        yield lease
