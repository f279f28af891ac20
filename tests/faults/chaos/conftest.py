"""A run on each real server that is installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eaglefeed.queue.connection import QueueClient
from faults.chaos.interleaved import Run


@pytest.fixture(params=["redis", "valkey"])
def run(request: pytest.FixtureRequest, clients: dict[str, QueueClient], tmp_path: Path) -> Iterator[Run]:
    if request.param not in clients:
        pytest.skip(f"no {request.param}-server is installed")
    made = Run(clients[request.param], tmp_path)
    yield made
    made.store.close()
