"""Items that kill whoever works on them, among others that do not; and workers that leave in good order."""

from pathlib import Path

import pytest

from eaglefeed.queue import EmbeddedServer
from eaglefeed.queue.base import LeaseQueue, QueueItem, QueueLimits
from faults.processes import spawned
from queue_steps import counts, ids, lease

MOST = 3
OUT_OF_MEMORY = 137

WORKER = """
import os, sys
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import DrainState, Lease
queue = open_queue(connect(sys.argv[1]), "run", "samples")
while True:
    got = queue.lease(int(sys.argv[2]), visibility_timeout_s=0.2, consumer="w", wait_s=5)
    if not isinstance(got, Lease):
        assert got.state is DrainState.DRAINED, got
        break
    for item in got.items:
        if item.payload == b"poison":
            os._exit(137)
        if item.payload == b"flaky" and item.delivery_count == 1:
            queue.nack(got.token, [item.id], reason="CUDA error: out of memory")
        else:
            queue.ack(got.token, [item.id])
"""


def supervised(server: EmbeddedServer, queue: LeaseQueue, batch: int) -> int:
    """Start a worker again each time that it dies; returns how often it did."""
    for deaths in range(20):
        with spawned((WORKER, server.url, str(batch))) as (worker,):
            code = worker.wait(30)
        if code == 0:
            return deaths
        assert code == OUT_OF_MEMORY
    pytest.fail(f"still {queue.stats()}")


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize(("batch", "deliveries"), [(1, MOST), (10, MOST + 1)])
def test_an_item_that_kills_its_worker_is_a_dead_letter_after_so_many_lone_deaths_and_the_others_are_done(
    server: EmbeddedServer, queue: LeaseQueue, batch: int, deliveries: int
) -> None:
    """Leased together with others first, which one of them is to blame is not known: that death counts for none."""
    assert ids(lease(queue, 6, 0.001)) == [f"i{k}" for k in range(6)]
    queue.purge()
    queue.configure(QueueLimits(max_deliveries=MOST))
    queue.put([QueueItem("bad", b"poison"), *(QueueItem(f"good{k}", b"fine") for k in range(9))])
    queue.close()
    assert supervised(server, queue, batch) == deliveries
    assert counts(queue) == (0, 0, 0, 9, 1)
    (letter,) = queue.dead_letters()
    assert (letter.id, letter.delivery_count, letter.payload) == ("bad", deliveries, b"poison")
    assert letter.reason == f"its lease ran out {MOST} times while it was leased alone"
    assert (queue.requeue(["bad"]), lease(queue, 1).items[0].delivery_count) == (1, 1)  # once what broke it is mended


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_failure_that_a_worker_lived_through_stands_beside_the_good_ones(
    server: EmbeddedServer, queue: LeaseQueue
) -> None:
    queue.purge()
    queue.configure(QueueLimits(max_deliveries=MOST, backoff_base_s=0.01))
    queue.put([QueueItem("flaky", b"flaky"), QueueItem("good", b"fine")])
    queue.close()
    assert supervised(server, queue, 2) == 0
    assert counts(queue) == (0, 0, 0, 2, 0)


@pytest.mark.parametrize("leaves", [5, 50])
def test_workers_that_leave_in_good_order_use_up_no_attempt(queue: LeaseQueue, leaves: int) -> None:
    queue.configure(QueueLimits(max_deliveries=MOST))
    for _ in range(leaves):
        got = lease(queue, 6)
        assert [item.delivery_count for item in got.items] == [1] * 6
        assert queue.nack(got.token, ids(got), reason="worker stopped", delay_s=0).ok == tuple(ids(got))
    assert counts(queue) == (6, 0, 0, 0, 0)


def test_a_run_under_way_can_be_cancelled_and_its_poison_goes_with_it(
    server: EmbeddedServer, queue: LeaseQueue, tmp_path: Path
) -> None:
    queue.put([QueueItem("bad", b"poison")])
    queue.close()
    held = lease(queue, 9, 0.001)
    queue.purge()
    assert queue.ack(held.token, ids(held)).ok == ()
    assert counts(queue) == (0, 0, 0, 0, 0)
    queue.close()
    assert supervised(server, queue, 9) == 0
