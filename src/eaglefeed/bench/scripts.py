"""Server time of single scripts: the longest of each operation at the largest batch, renewals, and idle lease calls."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from eaglefeed.bench.bed import Bed
from eaglefeed.bench.items import make_items
from eaglefeed.bench.plan import Plan, Reading
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue.base import MAX_BATCH, Lease
from eaglefeed.queue.redis import RedisLeaseQueue

__all__ = ["measure_idle_lease", "measure_renewals", "measure_scripts"]

_LONG_S, _SHORT_S = 600.0, 0.05
_LOG_ALL = {"slowlog-log-slower-than": "0", "slowlog-max-len": "4096"}
_SCRIPTS = (b"EVALSHA", b"EVAL")
_BLOCKS = 5


class _Watch:
    """Notes the longest script of each operation, by the server's own log of slow commands."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self.longest_us: dict[str, int] = defaultdict(int)

    @contextmanager
    def on(self, operation: str) -> Iterator[None]:
        """The block runs that operation."""
        self._bed.client.call("SLOWLOG", "RESET")
        yield
        entries = self._bed.client.call("SLOWLOG", "GET", "-1")
        took_us = [entry[2] for entry in entries if entry[3][0].upper() in _SCRIPTS]
        self.longest_us[operation] = max(self.longest_us[operation], *took_us)


def measure_scripts(bed: Bed, _plan: Plan) -> Iterator[Reading]:
    """The longest script of each operation on MAX_BATCH items: server time by SLOWLOG."""
    watch = _Watch(bed)
    with bed.tuned(_LOG_ALL):
        for walk in (_put_to_forget, _give_back, _dead, _run_out, _go_back, _hand_off):
            walk(watch, bed.queue(2 * MAX_BATCH))
            bed.clear()
    for operation, took_us in watch.longest_us.items():
        yield Reading(f"script.{operation}.batch_{MAX_BATCH}", "ms", took_us / 1000)


def _lease(queue: RedisLeaseQueue, n: int = MAX_BATCH, *, timeout_s: float = _LONG_S) -> tuple[int, list[str]]:
    lease = queue.lease(n, visibility_timeout_s=timeout_s, consumer="bench")
    if not isinstance(lease, Lease):
        raise EaglefeedError("nothing to lease", subject=queue.namespace, got=lease.state)
    return lease.token, [item.id for item in lease.items]


def _put_to_forget(watch: _Watch, queue: RedisLeaseQueue) -> None:
    with watch.on("put"):
        queue.put(make_items(MAX_BATCH, start=2 * MAX_BATCH))
    with watch.on("lease"):
        token, ids = _lease(queue)
    with watch.on("renew"):
        queue.renew(token, visibility_timeout_s=_LONG_S)
    with watch.on("ack"):
        queue.ack(token, ids)
    token, ids = _lease(queue)
    with watch.on("ack_step"):
        queue.ack(token, ids, step=1)
    with watch.on("commit"):
        queue.commit(1)
    with watch.on("released"):
        gone = queue.released(MAX_BATCH)
    with watch.on("forget"):
        queue.forget([item.id for item in gone])
    with watch.on("stats"):
        queue.stats()


def _give_back(watch: _Watch, queue: RedisLeaseQueue) -> None:
    token, ids = _lease(queue)
    with watch.on("nack_to_head"):
        queue.nack(token, ids, reason="bench", delay_s=0)
    for _ in range(2):
        token, ids = _lease(queue)
        with watch.on("nack_with_backoff"):
            queue.nack(token, ids, reason="bench", delay_s=_SHORT_S)
    SYSTEM_CLOCK.sleep(2 * _SHORT_S)
    with watch.on("lease_that_promotes"):
        _lease(queue)


def _dead(watch: _Watch, queue: RedisLeaseQueue) -> None:
    token, ids = _lease(queue)
    with watch.on("nack_to_dead"):
        queue.nack(token, ids, reason="bench", retryable=False)
    with watch.on("requeue"):
        queue.requeue(ids)


def _run_out(watch: _Watch, queue: RedisLeaseQueue) -> None:
    _lease(queue, timeout_s=_SHORT_S)
    SYSTEM_CLOCK.sleep(2 * _SHORT_S)
    with watch.on("lease_that_reclaims"):
        _lease(queue)


def _go_back(watch: _Watch, queue: RedisLeaseQueue) -> None:
    token, ids = _lease(queue)
    queue.ack(token, ids, step=2)
    _, seen = _lease(queue)
    with watch.on("restore"):
        queue.restore(1, seen=seen[: MAX_BATCH // 2])


def _hand_off(watch: _Watch, samples: RedisLeaseQueue) -> None:
    prompts = type(samples)(samples._client, samples.namespace, "prompts")
    prompts.put(make_items(MAX_BATCH, start=10**6, stored=False))
    token, ids = _lease(prompts)
    (sample,) = make_items(1, start=10**7)
    with watch.on("handoff_of_one"):
        prompts.handoff(token, ids[0], sample, samples)


def measure_renewals(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """Server time of renewing a lease of one item and one of MAX_BATCH, in turn."""
    queue = bed.queue(2 * MAX_BATCH)
    tokens = {size: _lease(queue, size)[0] for size in (1, MAX_BATCH)}
    took_us: dict[int, list[float]] = {size: [] for size in tokens}
    for _ in range(_BLOCKS):
        for size, token in tokens.items():
            with _averaged(bed, took_us[size]):
                for _ in range(plan.server_calls // _BLOCKS):
                    queue.renew(token, visibility_timeout_s=_LONG_S)
    for size, found in took_us.items():
        yield Reading(f"renew.items_{size}", "µs", median(found))
    bed.clear()


def measure_idle_lease(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """Server time of a lease call that finds nothing: leases are open, none ran out, and nothing is ready."""
    queue = bed.queue(plan.idle_leases)
    for _ in range(plan.idle_leases):
        _lease(queue, 1)
    took_us: list[float] = []
    with _averaged(bed, took_us):
        for _ in range(plan.server_calls):
            queue.lease(1, visibility_timeout_s=_LONG_S, consumer="bench")
    yield Reading("nothing_expired_check", "ms", took_us[0] / 1000)
    bed.clear()


@contextmanager
def _averaged(bed: Bed, into: list[float]) -> Iterator[None]:
    """Adds the mean server time of the scripts that the block runs, in µs."""
    calls, took_us = bed.script_us()
    yield
    calls_end, took_end_us = bed.script_us()
    into.append((took_end_us - took_us) / (calls_end - calls))
