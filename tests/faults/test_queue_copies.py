"""A queue that other processes are given: a spawned one works with connections of its own, a forked one is refused."""

import multiprocessing
from collections.abc import Iterator
from queue import Empty

import pytest
from torch.utils.data import DataLoader, IterableDataset

from eaglefeed.errors import QueueError
from eaglefeed.queue import EmbeddedServer, open_queue
from eaglefeed.queue.base import Lease, LeaseQueue
from eaglefeed.queue.connection import QueueClient
from faults.queue_sharer import NUM_PROCESSES, NUM_ROUNDS, child, fail, work
from queue_steps import LONG_S, counts, ids, lease


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_processes_that_are_spawned_with_a_queue_get_their_own_replies(client: QueueClient) -> None:
    """500 rounds of 5 to 6 calls in 5 processes, the parent among them, on one queue."""
    queue = open_queue(client, "run", "samples")
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    children = [context.Process(target=child, args=(queue, f"c{k}", told)) for k in range(NUM_PROCESSES - 1)]
    for each in children:
        each.start()
    try:
        found = dict([("parent", work(queue, "parent")), *(told.get(timeout=60) for _ in children)])
    except Empty:
        pytest.fail(f"a child ended without a word: {[each.exitcode for each in children]}")
    finally:
        for each in children:
            each.join(30)
            each.kill()
    assert not [each for each in found.values() if isinstance(each, BaseException)], found
    settled = [item_id for each in found.values() for item_id in each]
    assert sorted(settled) == sorted(f"{name}-{k}" for name in found for k in range(NUM_ROUNDS))
    assert counts(queue) == (0, 0, 0, NUM_PROCESSES * NUM_ROUNDS, 0)


class Leasing(IterableDataset[str]):
    """Leases in whatever process it is iterated in."""

    def __init__(self, queue: LeaseQueue) -> None:
        self.queue = queue

    def __iter__(self) -> Iterator[str]:
        got = self.queue.lease(1, visibility_timeout_s=LONG_S, consumer="worker")
        assert isinstance(got, Lease)
        yield from ids(got)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more of them than this machine has cores
def test_a_loaders_forked_workers_are_refused_and_their_parent_goes_on(queue: LeaseQueue) -> None:
    held = lease(queue, 1)
    loader = DataLoader(Leasing(queue), batch_size=None, num_workers=4, multiprocessing_context="fork")
    with pytest.raises(QueueError, match=r"cannot be used after fork; connect again in this process.*hand refs"):
        list(loader)
    assert queue.ack(held.token, ids(held)).ok == ("i0",)
    assert ids(lease(queue, 9)) == ["i1", "i2", "i3", "i4", "i5"]


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_an_error_of_a_pools_worker_reaches_its_parent_whole(server: EmbeddedServer) -> None:
    """One that could not be taken apart and put together again would leave the pool waiting for ever."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sent = pool.apply_async(fail, (f"unix://{server.folder}/nobody.sock",))
        with pytest.raises(QueueError, match=r"nobody\.sock: not reachable"):
            sent.get(timeout=30)
