"""The queue's server is killed, paused, restarted, silent, or forgets: what was acknowledged stays, and calls go on."""

import os
import signal
import threading
from pathlib import Path

import pytest
import structlog

from eaglefeed.errors import QueueUnavailable
from eaglefeed.queue import EmbeddedServer, connect, connection, open_queue, server_process
from eaglefeed.queue.base import Lease, LeaseQueue, NoLease
from eaglefeed.queue.connection import QueueClient
from faults.processes import in_thread, is_up, kill, kill_at_once, pid, restarted, wait_until
from faults.reply_proxy import Loss, reply_proxy
from queue_steps import LONG_S, counts, ids, items, lease, numbered

# kill -9, by appendfsync


@pytest.mark.parametrize("mode", ["always", "no"])
def test_a_server_killed_at_any_moment_loses_nothing_acknowledged_nor_repeats_it(
    server: EmbeddedServer, client: QueueClient, mode: str
) -> None:
    """The file is written before a reply leaves; "no" leaves it to the kernel, which survives a process."""
    client.call("CONFIG", "SET", "appendfsync", mode)
    queue, names, settled = open_queue(client, "run", "samples"), numbered(150), list[str]()
    queue.put(items(*names))

    def settle_all() -> None:
        while isinstance(got := queue.lease(1, visibility_timeout_s=LONG_S, consumer="c"), Lease):
            settled.extend(queue.ack(got.token, ids(got)).ok)

    worker = in_thread(settle_all)
    wait_until(lambda: len(settled) > 20)
    kill_at_once(server)
    with restarted(server):
        worker.join(60)
        assert settled == names
        assert counts(queue) == (0, 0, 0, 150, 0)


def test_a_killed_server_that_syncs_every_second_loses_nothing_but_what_waits_for_a_sync(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    held = lease(queue, 3)
    queue.ack(held.token, ["i0"])
    queue.ack(held.token, ["i1"], step=4)
    session = queue.stats().session
    kill(server, client)  # once no write waits for a sync that is under way
    with restarted(server):
        stats = queue.stats()
        assert (stats.ready, stats.leased, stats.tentative, stats.done) == (3, 1, 1, 1)
        assert queue.ack(held.token, ["i0", "i1", "i2"]) == (("i2",), ("i0", "i1"))
        assert queue.commit(4, session=session) == 1
        assert lease(queue).token > held.token


def test_a_server_without_persistence_is_warned_of_and_loses_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server_process._OPTIONS, "appendonly", "no")
    with EmbeddedServer(tmp_path / "queue") as server:
        with structlog.testing.capture_logs() as logs:
            client = connect(server.url)
        (warned,) = [entry["what"] for entry in logs if "append-only" in entry["what"]]
        assert "a restart of the server loses the run" in warned
        queue = open_queue(client, "run", "samples")
        queue.put(items("a"))
        kill_at_once(server)
        with restarted(server):
            assert counts(queue) == (0, 0, 0, 0, 0)
            assert queue.put(items("a")).accepted == 1
        client.close()


# restarts


def test_a_server_that_loads_its_file_is_waited_for(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.call("EVAL", "for i = 1, 6000 do redis.call('SET', 'ballast', i) end", 0)
    kill(server, client)
    client.close()  # its connections are dead: the first call is to find the server loading
    monkeypatch.setitem(server_process._OPTIONS, "key-load-delay", "100")  # µs a command; it answers every 1,024
    again = EmbeddedServer(server.folder, binary=server._binary)
    starting = in_thread(again.start)
    socket = str(server.folder / "server.sock")
    wait_until(lambda: is_up(server) and (server.folder / "server.sock").exists() and loads(socket))
    with structlog.testing.capture_logs() as logs:
        assert len(lease(queue).items) == 6
    starting.join(30)
    again.close()
    assert logs[0]["reason"].startswith("BusyLoadingError")


def loads(socket: str) -> bool:
    try:
        return server_process._ask(socket, b"PING\r\n").startswith(b"-LOADING")
    except ConnectionRefusedError:
        return False


def test_a_waiting_lease_outlives_a_restart_and_returns_what_is_put_afterwards(
    server: EmbeddedServer, client: QueueClient
) -> None:
    got: list[Lease | NoLease] = []
    waiting = connect(server.url)
    samples = open_queue(waiting, "run", "samples")
    worker = in_thread(lambda: got.append(samples.lease(5, visibility_timeout_s=LONG_S, consumer="c", wait_s=60)))
    wait_until(lambda: b"blocked_clients:1\r" in client.call("INFO", "clients"))
    kill(server, client)
    with restarted(server):
        open_queue(client, "run", "samples").put(items("a"))
        worker.join(30)
        assert [ids(lease) for lease in got if isinstance(lease, Lease)] == [["a"]]
    waiting.close()


def test_a_waiting_lease_whose_connection_is_dead_but_open_returns_what_is_put_afterwards(
    server: EmbeddedServer, queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_ANSWER_S", 0.2)
    lease(queue, 6)
    with reply_proxy(tmp_path / "proxy.sock", server.folder / "server.sock") as proxy:
        behind = connect(proxy.url)
        proxy.plan = lambda request: Loss.SILENCE if request.name == "BLPOP" and request.nth == 1 else None
        proxy.after_loss = lambda _: queue.put(items("new"))
        got = open_queue(behind, "run", "samples").lease(5, visibility_timeout_s=LONG_S, consumer="c", wait_s=60)
        assert behind.num_repeats == 1  # which a metric counts
        behind.close()
    assert isinstance(got, Lease)
    assert ids(got) == ["new"]
    assert proxy.lost == ["BLPOP"]


def test_a_server_that_is_away_is_reported_in_bounded_time(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    kill(server, client)
    client.max_wait_s = 0.2
    for call in (queue.stats, lambda: lease(queue), lambda: queue.ack(1, ["i0"]), lambda: queue.wait_for_room(9)):
        with pytest.raises(QueueUnavailable, match="not reachable") as caught:
            call()
        assert caught.value.retryable
    with pytest.raises(QueueUnavailable):
        connect(server.url, max_wait_s=0.1)


def test_scripts_are_sent_again_to_a_server_that_forgot_them(client: QueueClient, queue: LeaseQueue) -> None:
    client.call("SCRIPT", "FLUSH")
    held = lease(queue)
    client.call("SCRIPT", "FLUSH")
    assert queue.ack(held.token, ["i0"]).ok == ("i0",)


# pauses


def test_a_call_outlives_a_pause_of_the_server_and_gets_its_own_reply(
    server: EmbeddedServer, queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_ANSWER_S", 0.1)
    impatient = connect(server.url, max_wait_s=60)
    mine = open_queue(impatient, "run", "samples")
    held = lease(mine, 2)
    os.kill(pid(server), signal.SIGSTOP)
    wake = threading.Timer(0.5, os.kill, (pid(server), signal.SIGCONT))
    wake.start()
    assert mine.ack(held.token, ["i0"]) == (("i0",), ())
    wake.join()
    assert counts(mine) == (4, 0, 1, 1, 0)
    impatient.close()


def test_a_paused_server_is_given_up_and_used_again_once_it_runs(
    server: EmbeddedServer, queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MIN_ANSWER_S", 0.1)
    impatient = connect(server.url, max_wait_s=0.2)
    mine = open_queue(impatient, "run", "samples")
    held = lease(mine, 2)
    os.kill(pid(server), signal.SIGSTOP)
    with pytest.raises(QueueUnavailable):
        mine.ack(held.token, ["i0"])
    os.kill(pid(server), signal.SIGCONT)
    impatient.max_wait_s = 30
    assert mine.ack(held.token, ["i0", "i1"]) in [(("i1",), ("i0",)), (("i0", "i1"), ())]
    assert queue.stats().done == 2
    impatient.close()
