"""dramatiq: a worker with threads that prefetch."""

import threading
from collections.abc import Callable
from importlib.metadata import version

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from protocol import Peer, Task, main

_THREADS = {"one_thread": 1, "default": 8}
ABOUT = {
    "version": version("dramatiq"),
    "client": version("redis"),
    "variants": {
        "one_thread": {"messages": 400, "settings": "1 worker thread, prefetch 2, default middleware, no results"},
        "default": {"messages": 1500, "settings": "8 worker threads, prefetch 16, default middleware, no results"},
    },
    "bulk_put": False,
    "does_more": [
        "runs six middlewares around every message (age and time limits, shutdown, callbacks, pipelines, retries)",
        "hands every message from a consumer thread to a worker thread",
    ],
}


def _actor(task: Task, body: Callable[[str], None]) -> dramatiq.Actor:
    broker = RedisBroker(url=task.url, namespace=task.queue)
    dramatiq.set_broker(broker)
    return dramatiq.actor(actor_name="work", queue_name="default", max_retries=3, broker=broker)(body)


def put(task: Task, go: Callable[[], None]) -> None:
    """Send the messages."""
    actor = _actor(task, lambda _payload: None)
    go()
    for _ in range(task.messages):
        actor.send(task.payload)


def consume(task: Task, hit: Callable[[], None]) -> None:
    """Run the worker until it is killed."""
    actor = _actor(task, lambda _payload: hit())
    dramatiq.Worker(actor.broker, worker_threads=_THREADS[task.variant]).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(Peer(ABOUT, put, consume))
