"""bullmq, its Python edition."""

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from bullmq import Queue, Worker
from protocol import Peer, Task, main

_CONCURRENCY = {"default": 1, "ten": 10}
_OPTIONS = {"attempts": 3, "removeOnComplete": True}
ABOUT = {
    "version": version("bullmq"),
    "client": version("redis"),
    "variants": {
        "default": {"messages": 1500, "settings": "concurrency 1, attempts=3, removeOnComplete (no result is kept)"},
        "ten": {"messages": 1500, "settings": "concurrency 10, attempts=3, removeOnComplete (no result is kept)"},
    },
    "bulk_put": True,
    "does_more": [
        "writes waiting, active and completed events into a stream",
        "keeps a lock a job, and a job hash of about 10 fields",
        "supports priorities, rate limits, parents and delays in the same scripts",
    ],
}


async def put(task: Task, go: Callable[[], None]) -> None:
    """Add the jobs."""
    queue = Queue(task.queue, {"connection": task.url})
    go()
    for size in task.sizes:
        if task.batch == 1:
            await queue.add("work", {"payload": task.payload}, _OPTIONS)
        else:
            job = {"name": "work", "data": {"payload": task.payload}, "opts": _OPTIONS}
            await queue.addBulk([dict(job) for _ in range(size)])
    await queue.close()


async def consume(task: Task, hit: Callable[[], None]) -> None:
    """Run the worker until it is killed."""

    async def work(_job: Any, _token: str) -> None:
        hit()

    worker = Worker(task.queue, work, {"connection": task.url, "concurrency": _CONCURRENCY[task.variant]})
    await asyncio.Event().wait()
    await worker.close()


if __name__ == "__main__":
    main(Peer(ABOUT, put, consume))
