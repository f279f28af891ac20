"""A server of a test's own that it may kill, pause and restart, a connection to it, and a queue with six items."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import queue_servers
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.connection import QueueClient
from faults.processes import resume
from queue_steps import items

SERVERS = queue_servers.real_servers()


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    if request.param not in SERVERS:
        pytest.skip(f"no {request.param}-server is installed")
    with EmbeddedServer(tmp_path / "queue", binary=SERVERS[request.param]) as started:
        yield started
        resume(started)


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[QueueClient]:
    opened = connect(server.url, max_wait_s=10.0)
    yield opened
    opened.close()


@pytest.fixture
def queue(client: QueueClient) -> LeaseQueue:
    filled = open_queue(client, "run", "samples")
    filled.put(items(*(f"i{k}" for k in range(6))))
    return filled
