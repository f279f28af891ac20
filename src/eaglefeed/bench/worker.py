"""Our side of a measurement in a process of its own: `python -m eaglefeed.bench.worker ROLE`, with a task on stdin.

The roles: `put` and `consume` (end to end), `cycle` (one of several that empty a queue), `handover` (waits for items
that come one by one).
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from eaglefeed import logs
from eaglefeed.bench.cycles import Cycle, drain
from eaglefeed.bench.items import make_items
from eaglefeed.bench.partners import say
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import Lease, LeaseQueue

__all__ = ["Task", "main"]

_WAIT_S = 1.0


class Task(NamedTuple):
    """What to do: `messages` through the queue `samples` of `namespace`, `batch` at a time, as `cycle` says."""

    url: str
    namespace: str
    messages: int
    batch: int
    cycle: str


def _wait_for_go() -> None:
    say(ready=True)
    sys.stdin.readline()


def _put(queue: LeaseQueue, task: Task) -> None:
    stored = Cycle(task.cycle) is Cycle.COMMIT_RELEASE
    items = make_items(task.messages, stored=stored)
    _wait_for_go()
    say(start=SYSTEM_CLOCK.monotonic())
    for start in range(0, task.messages, task.batch):
        queue.put(items[start : start + task.batch])
    say(end=SYSTEM_CLOCK.monotonic())


def _consume(queue: LeaseQueue, task: Task) -> None:
    say(ready=True)
    messages, leases = drain(queue, task.batch, Cycle(task.cycle), wait_s=_WAIT_S, stop_at=task.messages)
    say(end=SYSTEM_CLOCK.monotonic(), messages=messages, leases=leases)


def _cycle(queue: LeaseQueue, task: Task) -> None:
    _wait_for_go()
    start_s = SYSTEM_CLOCK.monotonic()
    messages, _ = drain(queue, task.batch, Cycle(task.cycle))
    say(start=start_s, end=SYSTEM_CLOCK.monotonic(), messages=messages)


def _handover(queue: LeaseQueue, task: Task) -> None:
    say(ready=True)
    came_s: dict[str, float] = {}
    while len(came_s) < task.messages:
        lease = queue.lease(1, visibility_timeout_s=60.0, consumer="bench", wait_s=_WAIT_S)
        now_s = SYSTEM_CLOCK.monotonic()
        if isinstance(lease, Lease):
            came_s[lease.items[0].id] = now_s
            queue.ack(lease.token, [lease.items[0].id])
    say(came_s=came_s)


_ROLES: Mapping[str, Callable[[LeaseQueue, Task], None]] = {
    "put": _put,
    "consume": _consume,
    "cycle": _cycle,
    "handover": _handover,
}


def main() -> None:
    """Do the task that stands on stdin."""
    logs.configure("ERROR")  # on stderr: stdout is for what we say
    task = Task(**json.loads(sys.stdin.readline()))
    client = connect(task.url)
    _ROLES[sys.argv[1]](open_queue(client, task.namespace, "samples"), task)
    client.close()


if __name__ == "__main__":
    main()
