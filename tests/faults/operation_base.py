"""A run's queues, and how to bring them into the situations that the operations are tried in."""

from collections.abc import Callable

from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.redis import RedisLeaseQueue
from queue_steps import items, lease


class Run:
    """A run's queues over one client."""

    def __init__(self, client: QueueClient, namespace: str) -> None:
        self._client, self.namespace = client, namespace

    def queue(self, name: str, group: str = "main") -> RedisLeaseQueue:
        return RedisLeaseQueue(self._client, self.namespace, name, group, jitter=lambda: 0.5)

    @property
    def prompts(self) -> RedisLeaseQueue:
        return self.queue("prompts")

    @property
    def samples(self) -> RedisLeaseQueue:
        return self.queue("samples")

    def in_group(self, group: str) -> RedisLeaseQueue:
        """The samples, declared to be of the groups a and b."""
        queue = self.queue("samples", group)
        queue.configure(QueueLimits(), groups=["a", "b"])
        return queue


Call = Callable[[Run], object]
Prepare = Callable[[Run], Call]


class Operations(dict[str, Prepare]):
    """Functions by name. Each prepares a run and returns a call, made on the same run over whatever connection."""

    def __call__(self, prepare: Prepare) -> Prepare:
        self[prepare.__name__] = prepare
        return prepare


def held(queue: LeaseQueue, *names: str, stored_bytes: int = 0) -> Lease:
    """Put items and one more, and lease all but that."""
    queue.put(items(*names, "later", stored_bytes=stored_bytes))
    return lease(queue, len(names))


def hand_off(run: Run, *names: str, holder: str = "") -> None:
    token = held(run.prompts, *names).token
    for name in names:
        ref = QueueItem(name, f"ref of {name}".encode(), 6)
        run.prompts.handoff(token, name, ref, run.samples, holder=holder)


def hand_off_held(run: Run, *names: str) -> None:
    hand_off(run, *names, holder="dead producer")
