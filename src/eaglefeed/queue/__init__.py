"""The lease queue: who works on what, and for how long.

`base` is the interface; `memory` its executable model; `redis` the queue on a server that `connect` reaches or an
`EmbeddedServer` starts; `renewal` keeps leases alive while their holder makes progress.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglefeed.queue.base import LeaseQueue
    from eaglefeed.queue.connection import QueueClient, connect
    from eaglefeed.queue.embedded import EmbeddedServer

__all__ = ["EmbeddedServer", "connect", "open_queue"]

_HOMES = {"EmbeddedServer": "embedded", "connect": "connection"}


def __getattr__(name: str) -> Any:
    """Import on first use: the interface alone needs no client library."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def open_queue(client: "QueueClient", namespace: str, name: str, group: str = "main") -> "LeaseQueue":
    """The queue `name` ("prompts", "samples", "samples.e1") of the run `namespace`, as its group `group` sees it.

    It comes to be with its first item.

    Raises:
        ConfigError: a name that cannot be part of a key.
    """
    from eaglefeed.queue.redis import RedisLeaseQueue

    return RedisLeaseQueue(client, namespace, name, group)
