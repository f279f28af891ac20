"""rq: a sequential worker that runs jobs in its own process."""

from collections.abc import Callable
from importlib.metadata import version

import redis
import rq
from protocol import Peer, Task, main

ABOUT = {
    "version": version("rq"),
    "client": version("redis"),
    "variants": {
        "simple": {
            "messages": 500,
            "settings": "SimpleWorker (no process a job), retry=Retry(max=3), result_ttl=0 (no result is kept)",
        }
    },
    "bulk_put": True,
    "does_more": [
        "writes a job hash of about 15 fields and moves it through started and finished states",
        "keeps an execution record and registries that its web tools list",
        "sends a heartbeat and sets a timeout alarm around every job",
        "its body is called by name, with pickled arguments",
    ],
}
_hit: list[Callable[[], None]] = []


def work(payload: str) -> None:
    """The body of every job."""
    if payload:
        _hit[0]()


def put(task: Task, go: Callable[[], None]) -> None:
    """Enqueue the jobs."""
    queue = rq.Queue(task.queue, connection=redis.Redis.from_url(task.url))
    keep = {"retry": rq.Retry(max=3), "result_ttl": 0}
    go()
    for size in task.sizes:
        if task.batch == 1:
            queue.enqueue("rq_driver.work", task.payload, **keep)
        else:
            queue.enqueue_many([queue.prepare_data("rq_driver.work", (task.payload,), **keep) for _ in range(size)])


def consume(task: Task, hit: Callable[[], None]) -> None:
    """Run the worker until it is killed."""
    import rq_driver  # the module that the worker finds `work` in

    rq_driver._hit.append(hit)
    connection = redis.Redis.from_url(task.url)
    rq.SimpleWorker([rq.Queue(task.queue, connection=connection)], connection=connection).work(logging_level="ERROR")


if __name__ == "__main__":
    main(Peer(ABOUT, put, consume))
