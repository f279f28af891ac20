"""How long calls take: with few and many ready refs, and from a put to the lease that waits for it."""

from collections.abc import Iterator
from statistics import median, quantiles

from eaglefeed.bench.bed import Bed
from eaglefeed.bench.cycles import Cycle
from eaglefeed.bench.items import make_items
from eaglefeed.bench.ours import partner
from eaglefeed.bench.plan import Plan, Reading
from eaglefeed.bench.worker import Task
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue.base import Lease
from eaglefeed.queue.redis import RedisLeaseQueue

__all__ = ["measure_depth", "measure_handover"]

_BATCH = 16
_GAP_S = 0.01


class _Lane:
    """A queue that keeps its depth: what was acked is put again under another id."""

    def __init__(self, bed: Bed, depth: int) -> None:
        self._queue, self._next = bed.queue(depth), depth
        self.times_us: list[float] = []

    def step(self) -> None:
        """Time one lease and its ack; the rest is not timed."""
        start_s = SYSTEM_CLOCK.monotonic()
        lease = _lease(self._queue)
        self._queue.ack(lease.token, [item.id for item in lease.items], step=1)
        self.times_us.append((SYSTEM_CLOCK.monotonic() - start_s) * 1e6)
        self._queue.commit(1)
        self._queue.forget([item.id for item in self._queue.released(_BATCH)])
        self._queue.put(make_items(_BATCH, start=self._next))
        self._next += _BATCH


def _lease(queue: RedisLeaseQueue) -> Lease:
    lease = queue.lease(_BATCH, visibility_timeout_s=60.0, consumer="bench")
    if not isinstance(lease, Lease):
        raise EaglefeedError("nothing to lease", subject=queue.namespace, got=lease.state)
    return lease


def measure_depth(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """Time lease and ack of 16 with few and with many ready refs, call by call in turn; a reading of each a round.

    The calls before the first round let the server finish what a fill leaves behind: a hash table that has just grown
    moves its entries a few with each call, once.
    """
    lanes = {"few": _Lane(bed, plan.few), "many": _Lane(bed, plan.many)}
    bed.calm()
    for _ in range(plan.latency_warm_up):
        for lane in lanes.values():
            lane.step()
    for _ in range(plan.rounds):
        for lane in lanes.values():
            lane.times_us.clear()
        for _ in range(plan.latency_calls):
            for lane in lanes.values():
                lane.step()
        for name, lane in lanes.items():
            yield Reading(f"lease_ack_p50.{name}_ready.batch_{_BATCH}", "µs", median(lane.times_us))
    bed.clear()


def measure_handover(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """From before the put of one item into an idle queue until a waiting lease call of another process returns it."""
    queue, put_s = bed.queue(), dict[str, float]()
    with partner("handover", Task(bed.url, queue.namespace, plan.handovers, 1, Cycle.ACK)) as consumer:
        consumer.line()
        for item in make_items(plan.handovers, stored=False):
            SYSTEM_CLOCK.sleep(_GAP_S)
            put_s[item.id] = SYSTEM_CLOCK.monotonic()
            queue.put([item])
        came_s = consumer.line()["came_s"]
    took_ms = [(came_s[item_id] - at_s) * 1e3 for item_id, at_s in put_s.items()]
    yield Reading("handover.p50", "ms", median(took_ms))
    yield Reading("handover.p99", "ms", quantiles(took_ms, n=100)[-1])
    bed.clear()
