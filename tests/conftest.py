"""Its presence lets tests import helpers that lie in this folder. Fixtures: one queue a kind; a server runs once."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

# Several processes share a test machine's cores: threads that spin for each other make everything slow. Set before
# torch is imported, here and in every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import structlog

import queue_servers
import s3_server
from eaglefeed import logs
from eaglefeed.consumer.cleaning import Cleaner
from eaglefeed.queue.connection import QueueClient

hypothesis.settings.register_profile("repeatable", derandomize=True)


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """What a command has set up in one test, such as the lowest level that is shown, is not there in the next."""
    yield
    structlog.reset_defaults()
    logs._bound.clear()


@pytest.fixture(scope="session")
def clients() -> Iterator[dict[str, QueueClient]]:
    """Kind → connection, for each real server that is installed."""
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(queue_servers.connected(binary))
            for kind, binary in queue_servers.real_servers().items()
        }


@pytest.fixture
def deletes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released shards are deleted by the thread that commits, and not beside it: so a test can stop it at any line."""
    monkeypatch.setattr(Cleaner, "ask", lambda cleaner: cleaner._delete())


@pytest.fixture(scope="session")
def s3() -> Iterator[s3_server.S3Server]:
    """A real S3 server, started when the first test wants it."""
    with s3_server.running() as server:
        yield server


@pytest.fixture(params=["memory", "fakeredis", "valkey", "redis"])
def bench(request: pytest.FixtureRequest) -> queue_servers.Bench:
    """Queues of one kind, in a run of the test's own."""
    if request.param == "memory":
        return queue_servers.memory_bench()
    if request.param == "fakeredis":
        return queue_servers.fakeredis_bench()
    clients = request.getfixturevalue("clients")
    if request.param not in clients:
        pytest.skip(f"no {request.param}-server is installed")
    return queue_servers.real_bench(request.param, clients[request.param])
