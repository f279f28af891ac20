"""taskiq on Redis streams: the one of its brokers that acknowledges."""

from collections.abc import Callable
from importlib.metadata import version

from protocol import Peer, Task, main
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

_TASKS = {"one": 1, "default": 100}
ABOUT = {
    "version": version("taskiq-redis"),
    "client": version("redis"),
    "variants": {
        "one": {
            "messages": 1500,
            "settings": "RedisStreamBroker, max_async_tasks 1, reads 100 entries at a time, no results",
        },
        "default": {
            "messages": 1500,
            "settings": "RedisStreamBroker, max_async_tasks 100, reads 100 entries at a time, no results",
        },
    },
    "bulk_put": False,
    "does_more": [
        "runs every body as a task, with its parameters parsed by their annotations",
        "takes a lock and looks for unacknowledged entries after every read",
        "does less: the stream is never trimmed, so an acknowledged message keeps its memory",
    ],
}


async def put(task: Task, go: Callable[[], None]) -> None:
    """Kick the tasks."""
    broker = RedisStreamBroker(task.url, queue_name=task.queue)

    @broker.task(task_name="work")
    async def work(payload: str) -> None:
        """The consumer's body runs instead."""

    await broker.startup()
    go()
    for _ in range(task.messages):
        await work.kiq(task.payload)
    await broker.shutdown()


async def consume(task: Task, hit: Callable[[], None]) -> None:
    """Run the receiver until it is killed."""
    broker = RedisStreamBroker(task.url, queue_name=task.queue, consumer_id="0")

    @broker.task(task_name="work")
    async def work(payload: str) -> None:  # noqa: ARG001 - taskiq passes it
        hit()

    broker.is_worker_process = True
    await broker.startup()
    await run_receiver_task(broker, max_async_tasks=_TASKS[task.variant])


if __name__ == "__main__":
    main(Peer(ABOUT, put, consume))
