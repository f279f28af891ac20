"""Workers that are killed again and again, and work that takes longer than a lease."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eaglefeed.errors import QueueUnavailable, StaleLease
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import Lease, LeaseQueue, NoLease, QueueLimits
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.renewal import LeaseRenewer
from faults.processes import in_thread
from faults.reply_proxy import Loss, reply_proxy
from queue_steps import LONG_S, counts, ids, items, lease, nothing, numbered

NUM_REFS, NUM_KILLS = 200, 20
LEASE_S, WORK_S = 0.5, 1.6

KILLED = """
import os, random, signal, sys, time
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import Lease
url, log, kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng, ready = random.Random(seed), os.pipe()

def work():
    queue = open_queue(connect(url), "run", "samples")
    with open(log, "a") as out:
        while isinstance(got := queue.lease(3, visibility_timeout_s=0.2, consumer="w", wait_s=5), Lease):
            os.write(ready[1], b"x")
            for item in got.items:
                time.sleep(0.003)
                for settled in queue.ack(got.token, [item.id]).ok:
                    out.write(settled + chr(10))
                    out.flush()

def forked():
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child

for _ in range(kills):
    child = forked()
    os.read(ready[0], 64)  # it has leased something, or the one before had once more
    time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked(), 0)[1]))
"""


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_of_200_refs_none_is_lost_and_none_is_settled_twice_whenever_20_workers_are_killed(
    server: EmbeddedServer, client: QueueClient, tmp_path: Path
) -> None:
    queue, names = open_queue(client, "run", "samples"), numbered(NUM_REFS)
    queue.configure(QueueLimits(max_deliveries=100))
    queue.put(items(*names))
    queue.close()
    log = tmp_path / "acked"
    words = [sys.executable, "-c", KILLED, server.url, str(log), str(NUM_KILLS), "7"]
    subprocess.run(words, check=True, timeout=50, capture_output=True)
    assert counts(queue) == (0, 0, 0, NUM_REFS, 0)
    acked = log.read_text().split()
    assert len(acked) == len(set(acked))
    assert len(set(names) - set(acked)) <= NUM_KILLS  # one a kill, between its ack and its line
    assert queue.stats().redelivered >= NUM_KILLS / 2


def test_a_ref_whose_leases_reply_was_lost_with_its_worker_is_leasable_again_and_counted_once(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue, tmp_path: Path
) -> None:
    nothing(open_queue(client, "another", "samples"))  # from here on the server knows the script
    with reply_proxy(tmp_path / "proxy.sock", server.folder / "server.sock") as proxy:
        cut = connect(proxy.url, max_wait_s=0.05)
        proxy.plan = lambda request: Loss.REPLY if request.name == "lease" else None
        with pytest.raises(QueueUnavailable):
            open_queue(cut, "run", "samples").lease(6, visibility_timeout_s=LEASE_S, consumer="cut")
        cut.close()
    got = queue.lease(6, visibility_timeout_s=LONG_S, consumer="next", wait_s=30)
    assert isinstance(got, Lease)
    assert len(got.items) == 1  # with a crash behind it, it goes alone
    done = [*queue.ack(got.token, ids(got)).ok]
    while isinstance(got := queue.lease(6, visibility_timeout_s=LONG_S, consumer="next"), Lease):
        done += queue.ack(got.token, ids(got)).ok
    assert sorted(done) == [f"i{k}" for k in range(6)]


def slow_work(queue: LeaseQueue, *, renews: bool) -> tuple[list[str], int, bool]:
    """A worker that takes three times as long as its lease; its acks, its renewals, and whether it lost the lease."""
    held, renewals, lost = lease(queue, 1, LEASE_S, "slow"), list[int](), list[int]()
    renewer = LeaseRenewer(
        queue, visibility_timeout_s=LEASE_S, on_lost=lost.append, on_renewed=lambda: renewals.append(1)
    )
    if renews:
        renewer.add(held.token)
        renewer.start()
    threading.Event().wait(WORK_S)
    renewer.forget(held.token)
    assert renewer.stop()
    return list(queue.ack(held.token, ids(held)).ok), len(renewals), bool(lost)


def idle(queue: LeaseQueue) -> list[Lease | NoLease]:
    """Another worker that waits for as long, and keeps what it gets."""
    got = list[Lease | NoLease]()
    got.append(queue.lease(1, visibility_timeout_s=LONG_S, consumer="idle", wait_s=WORK_S * 0.9))
    return got


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("renews", [True, False])
def test_work_longer_than_its_lease_is_delivered_once_with_renewal_and_else_is_the_next_ones(
    client: QueueClient, renews: bool
) -> None:
    queue = open_queue(client, "run", "samples")
    queue.put(items("a"))
    found = list[tuple[list[str], int, bool]]()
    slow = in_thread(lambda: found.append(slow_work(queue, renews=renews)))
    while queue.stats().leased == 0:
        pass
    (other,) = idle(queue)
    slow.join(30)
    ((acked, renewals, lost),) = found
    if renews:
        assert isinstance(other, NoLease)
        assert (acked, lost, queue.stats().redelivered) == (["a"], False, 0)
        assert renewals >= WORK_S / LEASE_S  # a third of the lease apart, were this machine never busy
    else:
        assert isinstance(other, Lease)
        assert [(item.id, item.delivery_count) for item in other.items] == [("a", 2)]
        assert acked == []
        assert queue.ack(other.token, ["a"]).ok == ("a",)
        assert counts(queue) == (0, 0, 0, 1, 0)


def test_what_a_dead_worker_held_comes_to_one_that_waits_already_with_nobody_restarted(queue: LeaseQueue) -> None:
    dead = lease(queue, 6, LEASE_S, "dead")
    got = queue.lease(6, visibility_timeout_s=LONG_S, consumer="waits", wait_s=30)
    assert isinstance(got, Lease)
    assert ids(got) == ids(dead)[:1]
    with pytest.raises(StaleLease):
        queue.renew(dead.token, visibility_timeout_s=LEASE_S)
