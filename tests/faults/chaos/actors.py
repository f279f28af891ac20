"""Processes that a test drives step by step; forked off a server that has imported torch, so they start at once.

caller     carries out what it hears: JSON [call, arguments, options] in, its result or error out
producer   says "stored" after each shard, and goes on to the hand-off when it hears anything
free       the same producer, never waiting
victim     acks what it leases, and dies of b"poison"
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

import pipeline
from eaglefeed import logs
from eaglefeed.errors import EaglefeedError
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import AckResult, Lease, LeaseQueue, NoLease
from eaglefeed.storage.shared_dir import SharedDirStore

TIMEOUT_S = 0.4
"""Of every lease in these processes."""
_ANSWER_S = 30

_forks = multiprocessing.get_context("forkserver")


@cache
def _start_server() -> None:
    """It finds this module, and with it torch, only by the path that it starts with."""
    _forks.set_forkserver_preload(["faults.chaos.actors"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


class Actor:
    """The test's end of such a process; it does not outlive the `with`."""

    def __init__(self, role: str, url: str, namespace: str, folder: Path) -> None:
        _start_server()
        self._line, theirs = _forks.Pipe()
        self._process = _forks.Process(target=_act, args=(role, url, namespace, folder, theirs))
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Actor":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._line.close()

    def call(self, name: str, *args: object, **options: object) -> Any:
        """A call of the queue "samples"; its result as JSON has it, or the name of its error."""
        self.tell([name, args, options])
        return self.hear()

    def tell(self, what: object = "go on") -> None:
        self._line.send_bytes(json.dumps(what).encode())

    def hear(self) -> Any:
        assert self._line.poll(_ANSWER_S)
        return json.loads(self._line.recv_bytes())

    def send(self, number: int) -> None:
        """A signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> int | None:
        """Its exit code, once it has ended by itself."""
        self._process.join(_ANSWER_S)
        return self._process.exitcode

    def heard_before(self, other: "Actor") -> bool:
        """Whether this one speaks first."""
        return self._line in wait([self._line, other._line], _ANSWER_S)


class Stage:
    """The process' end: its queues, its store's folder, and the line to the test."""

    def __init__(self, open_: Callable[[str], LeaseQueue], folder: Path, line: Connection) -> None:
        self.queue, self.folder, self._line = open_, folder, line

    def say(self, what: object) -> None:
        self._line.send_bytes(json.dumps(what).encode())

    def hear(self) -> Any:
        return json.loads(self._line.recv_bytes())


def caller(stage: Stage) -> None:
    queue = stage.queue("samples")
    while True:
        name, args, options = stage.hear()
        try:
            stage.say(_plain(getattr(queue, name)(*args, **options)))
        except EaglefeedError as error:
            stage.say(type(error).__name__)


def _plain(result: Any) -> Any:
    if isinstance(result, Lease):
        return {"token": result.token, "ids": [item.id for item in result.items]}
    if isinstance(result, NoLease):
        return result.state.value
    if isinstance(result, AckResult):
        return {"ok": result.ok, "stale": result.stale}
    return result


def producer(stage: Stage, *, waits: bool = True) -> None:
    class Store(SharedDirStore):
        def put(self, ref: Any, tensors: Mapping[str, Any]) -> Any:
            stored = super().put(ref, tensors)
            if waits:
                stage.say("stored")
                stage.hear()
            return stored

    worker = ProducerWorker(
        prompts=stage.queue("prompts"),
        samples=stage.queue("samples"),
        store=Store(stage.folder),
        target=pipeline.EchoTarget(),
        contract=pipeline.contract(),
        assets=lambda: ({}, {}),
        run_id="run",
        name=f"producer-{os.getpid()}",
        lease_batch=1,
        visibility_timeout_s=TIMEOUT_S,
    )
    stats = worker.run(threading.Event())
    stage.say({"produced": stats.produced, "stale": stats.stale, "dead": stats.dead})


def free(stage: Stage) -> None:
    producer(stage, waits=False)


def victim(stage: Stage) -> None:
    queue = stage.queue("samples")
    while isinstance(lease := queue.lease(64, visibility_timeout_s=TIMEOUT_S, consumer="v", wait_s=20), Lease):
        if any(item.payload == b"poison" for item in lease.items):
            os.kill(os.getpid(), signal.SIGKILL)
        queue.ack(lease.token, [item.id for item in lease.items])


_ROLES: dict[str, Callable[[Stage], None]] = {
    "caller": caller,
    "producer": producer,
    "free": free,
    "victim": victim,
}


def _act(role: str, url: str, namespace: str, folder: Path, line: Connection) -> None:
    logs.configure("CRITICAL")
    client = connect(url)
    _ROLES[role](Stage(lambda name: open_queue(client, namespace, name), folder, line))
