"""Workers that fork, die in the middle of a call, hang, or wake up too late."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eaglefeed.clock import ManualClock
from eaglefeed.errors import StaleLease
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.redis import RedisLeaseQueue
from eaglefeed.queue.renewal import LeaseRenewer
from faults.processes import has_lines, spawned, wait_until
from faults.reply_proxy import Loss, reply_proxy
from faults.run_state import kept_of
from queue_steps import LONG_S, ids, items, lease

SHORT_S = 0.2

# forks

FORK = """
import os, sys
from eaglefeed.errors import QueueError
from eaglefeed.queue import EmbeddedServer, connect, open_queue
with EmbeddedServer(sys.argv[1]) as server:
    client = connect(server.url)
    queue = open_queue(client, "run", "samples")
    used = client._pool.get_connection()
    child = os.fork()
    if child == 0:
        try:
            queue.stats()
        except QueueError as error:
            print(error, flush=True)
        client.close()
        del used, queue, client
        sys.exit(0)
    os.waitpid(child, 0)
    used.send_command("PING")
    print(used.read_response(), client.call("PING"))
"""


def test_a_forked_child_may_not_use_the_queue_and_shuts_neither_its_parents_socket_nor_its_server(
    tmp_path: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, check=True)
    refused, answered = done.stdout.splitlines()
    assert "after fork" in refused
    assert "connect again in this process" in refused
    assert answered == "b'PONG' b'PONG'"


# workers that die

WORKER = """
import sys
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import Lease
with EmbeddedServer(sys.argv[1]) as server, open(sys.argv[2], "w") as log:
    queue = open_queue(connect(server.url), "run", "samples")
    while isinstance(got := queue.lease(16, visibility_timeout_s=1.0, consumer="w", wait_s=20), Lease):
        ok = queue.ack(got.token, [item.id for item in got.items]).ok
        log.writelines(f"{i}\\n" for i in ok)
        log.flush()
"""


def test_a_worker_killed_in_the_middle_loses_and_repeats_nothing(tmp_path: Path) -> None:
    names = {f"i{k}" for k in range(2000)}
    with EmbeddedServer(tmp_path / "queue") as server:
        client = connect(server.url)
        queue = open_queue(client, "run", "samples")
        queue.put([QueueItem(name, b"payload") for name in sorted(names)])
        logs = [tmp_path / f"log{k}" for k in range(3)]
        with spawned(*((WORKER, tmp_path / "queue", log) for log in logs)) as workers:
            wait_until(lambda: any(map(has_lines, logs)))
            victim = next(k for k in range(3) if has_lines(logs[k]))
            workers[victim].kill()
            queue.close()
            for worker in workers:
                worker.communicate(timeout=60)
        stats = queue.stats()
        client.close()
    acked = [line for log in logs for line in log.read_text().split()]
    assert (stats.done, stats.unsettled, stats.dead) == (2000, 0, 0)
    assert len(acked) == len(set(acked))
    # the killed one may have died between an ack and its note of it
    assert len(names - set(acked)) <= 16
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL if k == victim else 0 for k in range(3)]


LEASE_ONCE = """
import sys
from eaglefeed.queue import connect, open_queue
queue = open_queue(connect(sys.argv[1]), "run", "samples")
print("ready", flush=True)
got = queue.lease(2, visibility_timeout_s=float(sys.argv[2]), consumer="other", wait_s=60)
print("leased", got.token, flush=True)
"""


def test_a_worker_killed_inside_a_lease_call_leaves_no_lock_behind(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue, tmp_path: Path
) -> None:
    assert isinstance(queue, RedisLeaseQueue)
    queue.renew(lease(queue, 1).token, visibility_timeout_s=0)  # so that the call has something to reclaim
    with reply_proxy(tmp_path / "proxy.sock", server.folder / "server.sock") as proxy:
        proxy.plan = lambda request: Loss.REPLY if request.name == "lease" else None
        with spawned((LEASE_ONCE, proxy.url, "60")) as (worker,):
            proxy.after_loss = lambda _: worker.kill()
            worker.wait(30)
    assert proxy.lost == ["lease"]
    (orphan,) = client.call("ZRANGE", queue.key("leases"), 0, -1)
    others = lease(queue)
    assert ids(others) == ["i1", "i2", "i3", "i4", "i5"]
    queue.renew(int(orphan), visibility_timeout_s=0)
    assert ids(lease(queue)) == ["i0"]
    undisturbed = open_queue(client, "plain", "samples")
    undisturbed.put(items(*(f"i{k}" for k in range(6))))
    undisturbed.renew(lease(undisturbed, 1).token, visibility_timeout_s=0)
    lease(undisturbed, 1)
    lease(undisturbed)
    assert kept_of(client, "run").keys() == kept_of(client, "plain").keys()


# workers that wake up too late


def test_a_zombie_of_a_purged_run_settles_nothing(queue: LeaseQueue) -> None:
    held = lease(queue)
    queue.purge()
    queue.put(items("i0"))
    lease(queue)
    assert queue.ack(held.token, ["i0"]).stale == ("i0",)
    with pytest.raises(StaleLease):
        queue.renew(held.token, visibility_timeout_s=1)


RUN_OUT = """
import sys, time
from eaglefeed.queue import connect
client = connect(sys.argv[1])
print("ready", flush=True)
left_ms = 1
while left_ms > 0:
    time.sleep(0.01)
    (seconds, micros), lease = client.call("TIME"), client.call("ZRANGE", sys.argv[2], 0, 0, "WITHSCORES")
    left_ms = int(lease[1]) - int(seconds) * 1000 - int(micros) // 1000
print("ran out", flush=True)
"""


def hold_the_interpreter(until: "subprocess.Popen[str]") -> None:
    """A call into C that lets no other thread of this process run, until the other process has written a line."""
    assert until.stdout is not None
    ctypes.PyDLL(None).read(until.stdout.fileno(), ctypes.create_string_buffer(1), 1)


@contextmanager
def renewed(queue: LeaseQueue, token: int) -> Iterator[list[int]]:
    """A thread renews the lease; yields the tokens that it lost."""
    lost: list[int] = []
    renewer = LeaseRenewer(queue, visibility_timeout_s=SHORT_S, on_lost=lost.append)
    renewer.add(token)
    renewer.start()
    yield lost
    renewer.forget(token)
    assert renewer.stop()


@contextmanager
def ready(*call: str) -> Iterator["subprocess.Popen[str]"]:
    with spawned(call) as (process,):
        assert process.stdout is not None
        assert "ready\n" in iter(process.stdout.readline, "")
        yield process


def test_a_lease_that_ran_out_while_a_c_call_starved_the_renewal_thread_is_renewed_late(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    assert isinstance(queue, RedisLeaseQueue)
    leases = queue.key("leases")
    held = lease(queue, 2, SHORT_S)
    with renewed(queue, held.token) as lost, ready(RUN_OUT, server.url, leases) as watcher:
        hold_the_interpreter(watcher)
        starved = client.call("ZSCORE", leases, held.token)
        wait_until(lambda: client.call("ZSCORE", leases, held.token) > starved)
        assert queue.ack(held.token, ids(held)).ok == ("i0", "i1")
    assert lost == []


def test_a_lease_that_somebody_took_while_a_c_call_starved_the_renewal_thread_is_stale_and_told(
    server: EmbeddedServer, queue: LeaseQueue
) -> None:
    held = lease(queue, 6, SHORT_S)
    with renewed(queue, held.token) as lost, ready(LEASE_ONCE, server.url, "60") as other:
        hold_the_interpreter(other)
        assert queue.ack(held.token, ids(held)).ok == ()
        with pytest.raises(StaleLease):
            queue.renew(held.token, visibility_timeout_s=SHORT_S)
        wait_until(lambda: lost == [held.token])


def test_renewal_does_not_keep_the_lease_of_a_worker_that_hangs_alive(queue: LeaseQueue) -> None:
    clock, lost = ManualClock(), list[int]()
    held = lease(queue, 6, SHORT_S)
    renewer = LeaseRenewer(queue, visibility_timeout_s=SHORT_S, stall_timeout_s=600, on_lost=lost.append, clock=clock)
    renewer.add(held.token)
    clock.advance(601)
    renewer.tick()
    got = queue.lease(1, visibility_timeout_s=LONG_S, consumer="other", wait_s=30)
    assert isinstance(got, Lease)
    renewer.progress()
    renewer.tick()
    assert lost == [held.token]
