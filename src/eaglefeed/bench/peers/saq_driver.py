"""saq: an asyncio worker."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from protocol import Peer, Task, main
from redis import asyncio as redis
from saq import Worker
from saq.queue.redis import RedisQueue

_CONCURRENCY = {"one": 1, "default": 10}
ABOUT = {
    "version": version("saq"),
    "client": version("redis"),
    "variants": {
        "one": {"messages": 1000, "settings": "concurrency 1, retries=3, ttl=-1 (no result is kept)"},
        "default": {"messages": 1500, "settings": "concurrency 10, retries=3, ttl=-1 (no result is kept)"},
    },
    "bulk_put": False,
    "does_more": [
        "rewrites the whole job as it starts, and publishes every change of its state",
        "runs every body as a task with a timeout",
    ],
}


def _open(task: Task) -> RedisQueue:
    return RedisQueue(redis.from_url(task.url), name=task.queue)  # RedisQueue.from_url takes no unix://


async def put(task: Task, go: Callable[[], None]) -> None:
    """Enqueue the jobs."""
    queue = _open(task)
    await queue.connect()
    go()
    for _ in range(task.messages):
        await queue.enqueue("work", payload=task.payload, retries=3, ttl=-1)


async def consume(task: Task, hit: Callable[[], None]) -> None:
    """Run the worker until it is killed."""

    async def work(_context: Any, *, payload: str) -> None:  # noqa: ARG001 - saq passes it by name
        hit()

    queue = _open(task)
    await queue.connect()
    await Worker(queue, [("work", work)], concurrency=_CONCURRENCY[task.variant]).start()


if __name__ == "__main__":
    main(Peer(ABOUT, put, consume))
