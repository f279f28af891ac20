"""What loopback and gloo give without us: one arena sent from a process to another, `... remote_raw send | receive`.

Both memories are written before, nothing is hashed, and nothing else is said than a byte that asks for the arena: over
the same connection for TCP, and before a bare gloo send of the whole arena for gloo.
"""

import json
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from eaglefeed.bench.partners import say
from eaglefeed.clock import SYSTEM_CLOCK

__all__ = ["main"]

_HOST, _TIMEOUT_S = "127.0.0.1", 60.0
_TCP, _GLOO = b"t", b"g"


def _arena(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


def _group(store: TCPStore, rank: int) -> Any:
    return ProcessGroupGloo(store, rank, 2, timedelta(seconds=_TIMEOUT_S))


def _store(port: int, *, is_master: bool) -> TCPStore:
    return TCPStore(_HOST, port, is_master=is_master, wait_for_workers=False)


def _send(task: dict[str, Any]) -> None:
    arena, store = _arena(task["num_bytes"]), _store(0, is_master=True)
    with socket.create_server((_HOST, 0)) as listening:
        say(port=listening.getsockname()[1], store_port=store.port)
        connection, _ = listening.accept()
        group = _group(store, 0)
        with connection:
            while asked := connection.recv(1):
                if asked == _TCP:
                    connection.sendall(arena.numpy().data)
                else:
                    group.send([arena], 1, 0).wait()


def _receive(task: dict[str, Any]) -> None:
    arena = _arena(task["num_bytes"])
    with socket.create_connection((_HOST, task["port"])) as connection:
        group = _group(_store(task["store_port"], is_master=False), 1)

        def tcp() -> None:
            connection.sendall(_TCP)
            _fill(connection, arena.numpy().data)

        def gloo() -> None:
            connection.sendall(_GLOO)
            group.recv([arena], 0, 0).wait()

        ways: Mapping[str, Callable[[], None]] = {"tcp": tcp, "gloo": gloo}
        say(ready=True)
        for line in sys.stdin:
            words = json.loads(line)
            say(took_s=_timed(ways[words["way"]], words["count"]))


def _fill(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        received = connection.recv_into(memory)
        if not received:
            raise ConnectionError("the sender ended")
        memory = memory[received:]


def _timed(call: Callable[[], None], count: int) -> float:
    start_s = SYSTEM_CLOCK.monotonic()
    for _ in range(count):
        call()
    return SYSTEM_CLOCK.monotonic() - start_s


def main() -> None:
    """Do the task that stands on stdin."""
    {"send": _send, "receive": _receive}[sys.argv[1]](json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main()
