"""What processes do with a queue that they were given; imports no torch, so that they start fast."""

from typing import Any

from eaglefeed.queue import connect
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from queue_steps import LONG_S, ids

NUM_PROCESSES, NUM_ROUNDS = 5, 100


def _payload(item_id: str) -> bytes:
    return f"payload of {item_id}".encode() * 3


def work(queue: LeaseQueue, name: str) -> list[str]:
    """Rounds of put, lease, look, and ack or nack; every reply must be that of its request."""
    settled = list[str]()
    for number in range(NUM_ROUNDS):
        own = f"{name}-{number}"
        assert queue.put([QueueItem(own, _payload(own), stored_bytes=1 + number)])[:2] == (1, 0)
        assert queue.find([own])[0].payload == _payload(own)
        got = queue.lease(2, visibility_timeout_s=LONG_S, consumer=name, wait_s=30)
        assert isinstance(got, Lease)
        assert all(item.payload == _payload(item.id) for item in got.items)
        assert queue.renew(got.token, visibility_timeout_s=LONG_S) >= got.deadline_ms
        first, *rest = ids(got)
        assert queue.ack(got.token, [first, "never"]) == ((first,), ("never",))
        assert queue.nack(got.token, rest, reason="back", delay_s=0).ok == tuple(rest)
        settled.append(first)
    return settled


def child(queue: LeaseQueue, name: str, told: Any) -> None:
    try:
        told.put((name, work(queue, name)))
    except BaseException as error:
        told.put((name, error))
        raise


def fail(url: str) -> None:
    connect(url, max_wait_s=0)
