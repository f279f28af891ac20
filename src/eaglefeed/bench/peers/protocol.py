"""What the peers' drivers share: one line of JSON in, lines of JSON out.

A driver runs in its peer's own environment. Its one argument is what it does: `about` says what is measured, `put` puts
messages once a line "go" comes, `consume` runs the peer's worker and tells when the last body runs. The first line on
stdin is the task: url, queue, messages, batch, payload_bytes, variant.
"""

import asyncio
import inspect
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

__all__ = ["Peer", "Task", "main"]


class Task(NamedTuple):
    """One run: `messages`, each of `payload_bytes` through `queue`, put `batch` at a time where the peer can."""

    url: str
    queue: str
    messages: int
    batch: int
    payload_bytes: int
    variant: str

    @property
    def payload(self) -> str:
        """The one argument of every message."""
        return "x" * self.payload_bytes

    @property
    def sizes(self) -> list[int]:
        """Messages of each put."""
        return [min(self.batch, self.messages - start) for start in range(0, self.messages, self.batch)]


class Peer(NamedTuple):
    """A peer: facts to print, and what puts and consumes; either may be a coroutine function.

    `put` gets the task and `go`, which waits for the start; `consume` gets it and `hit`, to be called by every body.
    """

    about: dict[str, Any]
    put: Callable[[Task, Callable[[], None]], Awaitable[None] | None]
    consume: Callable[[Task, Callable[[], None]], Awaitable[None] | None]


def say(**fields: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(peer: Peer) -> None:
    """Do what the command line says."""
    if sys.argv[1] == "about":
        say(**peer.about)
        return
    task = Task(**json.loads(sys.stdin.readline()))
    if sys.argv[1] == "put":
        _run(peer.put, task, _start)
        say(end=time.monotonic())
    else:
        say(ready=True)
        _run(peer.consume, task, _counter(task.messages))


def _run(work: Callable[..., Any], *arguments: object) -> None:
    if inspect.iscoroutinefunction(work):
        asyncio.run(work(*arguments))
    else:
        work(*arguments)


def _start() -> None:
    say(ready=True)
    sys.stdin.readline()
    say(start=time.monotonic())


def _counter(count: int) -> Callable[[], None]:
    lock, left = threading.Lock(), [count]

    def hit() -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                say(end=time.monotonic())

    return hit
