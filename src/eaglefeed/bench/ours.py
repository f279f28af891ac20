"""Our own processes, and the rates of whole queues: of cycles on a full one, and from put to ack."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

from eaglefeed.bench.bed import Bed
from eaglefeed.bench.cycles import Cycle, drain
from eaglefeed.bench.partners import Partner, race
from eaglefeed.bench.plan import Plan, Reading
from eaglefeed.bench.worker import Task
from eaglefeed.clock import SYSTEM_CLOCK

__all__ = ["measure_cycles", "measure_end_to_end", "partner"]

_BUSY, _CROWD = 2, 4
"""Processes that keep the server from sleeping between calls, and that crowd it."""


def partner(role: str, task: Task) -> Partner:
    """A process of ours in that role."""
    return Partner(f"bench worker {role}", [sys.executable, "-m", "eaglefeed.bench.worker", role], task._asdict())


def measure_cycles(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """Messages a second of one client and of four processes, and what one costs the server; puts are not counted."""
    for batch, count in plan.cycle_messages.items():
        for cycle in (Cycle.ACK, Cycle.COMMIT, Cycle.COMMIT_1000, Cycle.COMMIT_RELEASE):
            yield from _alone(bed, batch, count, cycle)
        yield from _together(bed, batch, count, Cycle.ACK, _BUSY)
        for cycle in (Cycle.ACK, Cycle.COMMIT):
            yield from _together(bed, batch, count, cycle, _CROWD)


def _alone(bed: Bed, batch: int, count: int, cycle: Cycle) -> Iterator[Reading]:
    queue, name = bed.queue(count), f"{cycle}.batch_{batch}"
    bed.calm()
    cpu_us, (_, script_us), start_s = bed.cpu_us(), bed.script_us(), SYSTEM_CLOCK.monotonic()
    messages, _ = drain(queue, batch, cycle)
    took_s, (_, script_end_us), cpu_end_us = SYSTEM_CLOCK.monotonic() - start_s, bed.script_us(), bed.cpu_us()
    yield Reading(f"rate.{name}", "messages/s", messages / took_s)
    yield Reading(f"server_cpu.{name}", "µs/message", (cpu_end_us - cpu_us) / messages)
    yield Reading(f"server_scripts.{name}", "µs/message", (script_end_us - script_us) / messages)
    bed.clear()


def _together(bed: Bed, batch: int, count: int, cycle: Cycle, processes: int) -> Iterator[Reading]:
    queue, name = bed.queue(count), f"{processes}_processes.{cycle}.batch_{batch}"
    bed.calm()
    task = Task(bed.url, queue.namespace, count, batch, cycle)
    with ExitStack() as stack:
        workers = [stack.enter_context(partner("cycle", task)) for _ in range(processes)]
        for worker in workers:
            worker.line()
        cpu_us = bed.cpu_us()
        for worker in workers:
            worker.go()
        told = [worker.line() for worker in workers]
        cpu_end_us = bed.cpu_us()
    took_s = max(each["end"] for each in told) - min(each["start"] for each in told)
    yield Reading(f"rate.{name}", "messages/s", count / took_s)
    yield Reading(f"server_cpu.{name}", "µs/message", (cpu_end_us - cpu_us) / count)
    bed.clear()


def measure_end_to_end(bed: Bed, plan: Plan) -> Iterator[Reading]:
    """Messages a second from the first put of one process to the last ack (and commit) of another."""
    for batch, count in plan.end_to_end_messages.items():
        for cycle in (Cycle.ACK, Cycle.COMMIT_RELEASE, *([Cycle.ACK_EACH] if batch == 1 else [])):
            task = Task(bed.url, bed.queue().namespace, count, batch, cycle)
            rate = race(partner("put", task), partner("consume", task), count)
            yield Reading(f"end_to_end.{cycle}.batch_{batch}", "messages/s", rate)
            bed.clear()
