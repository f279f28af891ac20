"""What the queue does when its server, its network or a worker fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import queue_servers
from eaglefeed.errors import ConfigError, QueueError, QueueUnavailable, StaleLease, UnsafeServer
from eaglefeed.queue import EmbeddedServer, connect, connection, open_queue
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from eaglefeed.queue.connection import NotPermitted, QueueClient
from faults.fake_server import bulk, fake_server, info
from faults.processes import has_lines, kill, pid, resume, spawned, wait_until

SERVERS = queue_servers.real_servers()
pytestmark = pytest.mark.skipif(not SERVERS, reason="no server is installed")

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


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
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
    filled.put([QueueItem(f"i{k}", b"payload") for k in range(6)])
    return filled


def lease(queue: LeaseQueue, n: int = 2, timeout_s: float = 60.0) -> Lease:
    got = queue.lease(n, visibility_timeout_s=timeout_s, consumer="c")
    assert isinstance(got, Lease)
    return got


# the server dies


def test_a_killed_server_loses_nothing_that_was_acked_or_leased(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    held = lease(queue)
    queue.ack(held.token, ["i0"])
    kill(server, client)
    with EmbeddedServer(server.folder, binary=server._binary):
        stats = queue.stats()
        assert (stats.ready, stats.leased, stats.done) == (4, 1, 1)
        assert queue.ack(held.token, ["i0", "i1"]) == (("i1",), ("i0",))
        assert lease(queue).token > held.token


def test_calls_that_may_be_repeated_survive_a_restart_of_the_server(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    held = lease(queue)
    kill(server, client)
    restarted = EmbeddedServer(server.folder, binary=server._binary)
    late = threading.Timer(0.1, restarted.start)
    late.start()
    try:
        assert queue.renew(held.token, visibility_timeout_s=90) > held.deadline_ms
    finally:
        late.join()
        restarted.close()


def test_a_server_that_is_away_is_reported_in_bounded_time(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    url = server.url
    kill(server, client)
    for call in (queue.stats, lambda: lease(queue)):
        client.max_wait_s = 0.2
        with pytest.raises(QueueUnavailable):
            call()
    with pytest.raises(QueueUnavailable):
        connect(url, max_wait_s=0.1)


def test_scripts_are_sent_again_to_a_server_that_forgot_them(client: QueueClient, queue: LeaseQueue) -> None:
    client.call("SCRIPT", "FLUSH")
    held = lease(queue)
    client.call("SCRIPT", "FLUSH")
    assert queue.ack(held.token, ["i0"]).ok == ("i0",)


def test_a_hung_server_is_given_up_and_used_again_once_it_runs(
    server: EmbeddedServer, queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MIN_ANSWER_S", 0.1)
    impatient = connect(server.url, max_wait_s=0.2)
    mine = open_queue(impatient, "run", "samples")
    held = lease(mine)
    os.kill(pid(server), signal.SIGSTOP)
    with pytest.raises(QueueUnavailable, match="nobody knows"):
        mine.ack(held.token, ["i0"])
    os.kill(pid(server), signal.SIGCONT)
    again = mine.ack(held.token, ["i0", "i1"])
    assert again in [(("i1",), ("i0",)), (("i0", "i1"), ())]
    assert queue.stats().done == 2
    impatient.close()


# memory


def test_a_server_out_of_memory_refuses_puts_and_serves_all_that_frees(client: QueueClient, queue: LeaseQueue) -> None:
    prompts = open_queue(client, "run", "prompts")
    prompts.put([QueueItem("p", b"prompt"), QueueItem("q", b"prompt")])
    expired = lease(queue, 1, 0.01)
    held = lease(prompts)
    client.call("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(QueueUnavailable, match="out of memory"):
        queue.put([QueueItem("new", b"payload")])
    prompts.renew(held.token, visibility_timeout_s=60)
    prompts.handoff(held.token, "p", QueueItem("p", b"ref", 5), queue)
    prompts.nack(held.token, ["q"], reason="later")
    time.sleep(0.02)
    again = lease(queue)
    assert [item.id for item in again.items] == ["i0"]
    assert queue.ack(expired.token, ["i0"]).stale == ("i0",)
    assert queue.ack(again.token, ["i0"]).ok == ("i0",)
    rest = lease(queue, 5)
    queue.nack(rest.token, ["i1"], reason="bad", retryable=False)
    queue.nack(rest.token, ["i2"], reason="stop", delay_s=0)
    assert queue.requeue(["i1"]) == 1
    queue.close()
    stats = queue.stats()
    assert (stats.ready, stats.leased, stats.done, stats.dead) == (3, 3, 1, 0)


def test_a_lost_payload_is_told_and_not_handed_out(client: QueueClient, queue: LeaseQueue) -> None:
    client.call("UNLINK", queue.key("ref"))  # type: ignore[attr-defined]
    with pytest.raises(UnsafeServer, match="i0: its payload is gone"):
        lease(queue)


# servers that are refused


def test_a_server_that_may_evict_the_queue_is_refused(server: EmbeddedServer, client: QueueClient) -> None:
    client.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsafeServer, match="noeviction"):
        connect(server.url)


def test_a_replica_is_refused_and_a_demoted_primary_is_unavailable(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    client.call("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(UnsafeServer, match="replica"):
        connect(server.url)
    client.max_wait_s = 0.1
    with pytest.raises(QueueUnavailable):
        lease(queue)
    client.call("REPLICAOF", "NO", "ONE")
    assert lease(queue).items


def test_an_old_server_is_refused() -> None:
    with (
        fake_server(lambda _: info(redis_version="6.0.16")) as old,
        pytest.raises(UnsafeServer, match=r"Redis 6\.2.*got 6\.0\.16"),
    ):
        connect(old.url)


def test_a_server_that_hides_its_settings_is_used() -> None:
    with fake_server(lambda _: b"-NOPERM this user has no permissions to run the 'info' command\r\n") as server:
        connect(server.url).close()


def test_passwords_are_checked_and_never_shown(server: EmbeddedServer, client: QueueClient, tmp_path: Path) -> None:
    secret, file = "p@ss/w#rd", tmp_path / "password"
    file.write_text(secret + "\n")
    client.call("CONFIG", "SET", "requirepass", secret)
    for wrong in (None, "wrong-word"):
        with pytest.raises(ConfigError) as caught:
            connect(server.url, password=wrong)
        assert "wrong-word" not in str(caught.value)
    right = server.url.replace("unix://", "unix://:p%40ss%2Fw%23rd@")
    for opened in (
        connect(server.url, password=secret),
        connect(server.url, password_file=file),
        connect(right),
    ):
        assert secret not in repr(opened)
        assert "%40" not in repr(opened)
        opened.close()
    client.call("CONFIG", "SET", "requirepass", "")


def test_a_user_with_few_rights_suffices_and_one_with_fewer_is_told_what_to_grant(
    server: EmbeddedServer, client: QueueClient
) -> None:
    rights = NotPermitted.default_fix.removeprefix("grant it ").split()
    client.call("ACL", "SETUSER", "worker", "reset", "on", ">word", "resetchannels", "-@all", *rights)
    url = server.url.replace("unix://", "unix://worker:word@")
    worker = connect(url)
    prompts, samples = open_queue(worker, "run", "prompts"), open_queue(worker, "run", "samples")
    prompts.put([QueueItem("p", b"prompt"), QueueItem("q", b"prompt")])
    held = lease(prompts)
    prompts.handoff(held.token, "p", QueueItem("p", b"ref"), samples)
    prompts.nack(held.token, ["q"], reason="bad", retryable=False)
    assert [dead.id for dead in prompts.dead_letters()] == ["q"]
    prompts.beat("producer", "a")
    prompts.farewell("producer", "a")
    prompts.close()
    samples.lease(5, visibility_timeout_s=1, consumer="c", wait_s=0.01)
    samples.lease(5, visibility_timeout_s=1, consumer="c", wait_s=0.01)
    assert prompts.has_room()
    assert len(list(samples.payloads())) == samples.purge() == 1
    client.call("ACL", "SETUSER", "worker", "-@hash")
    with pytest.raises(ConfigError, match=r"grant it ~eaglefeed:\* \+@hash"):
        prompts.has_room()
    worker.close()


# replies that are lost or refuse


def test_a_server_that_loads_is_waited_for() -> None:
    replies = iter([b"-LOADING Redis is loading the dataset in memory\r\n"] * 3)
    with fake_server(lambda _: next(replies, info())) as server:
        connect(server.url).close()
        assert server.names() == ["INFO"] * 4


def test_a_server_without_free_connections_is_waited_for() -> None:
    replies = iter([b"-ERR max number of clients reached\r\n", None])
    with fake_server(lambda _: next(replies, info())) as server:
        connect(server.url).close()


@pytest.mark.parametrize("operation", ["lease", "ack", "nack", "requeue", "purge"])
def test_a_call_that_must_not_run_twice_is_sent_once(operation: str) -> None:
    calls = {
        "lease": lambda queue: queue.lease(1, visibility_timeout_s=1, consumer="c"),
        "ack": lambda queue: queue.ack(1, ["a"]),
        "nack": lambda queue: queue.nack(1, ["a"], reason="x"),
        "requeue": lambda queue: queue.requeue(["a"]),
        "purge": lambda queue: queue.purge(),
    }
    with fake_server(lambda command: info() if command[0] == b"INFO" else None) as server:
        client = connect(server.url)
        with pytest.raises(QueueUnavailable, match="nobody knows whether the call was carried out"):
            calls[operation](open_queue(client, "run", "samples"))
        assert server.names() == ["INFO", "EVALSHA"]
        client.close()


@pytest.mark.parametrize("operation", ["put", "handoff", "renew"])
def test_a_call_whose_reply_is_lost_is_repeated_where_that_is_safe(operation: str) -> None:
    replies = {
        "put": b"*3\r\n$2\r\nok\r\n:0\r\n:1\r\n",
        "handoff": bulk(b"ok"),
        "renew": b":5000\r\n",
    }
    calls = {
        "put": lambda queue: queue.put([QueueItem("a", b"x")]),
        "handoff": lambda queue: queue.handoff(1, "a", QueueItem("a", b"x"), queue),
        "renew": lambda queue: queue.renew(1, visibility_timeout_s=1),
    }
    hang_ups = iter([None, None])
    with fake_server(lambda command: info() if command[0] == b"INFO" else next(hang_ups, replies[operation])) as server:
        client = connect(server.url)
        calls[operation](open_queue(client, "run", "samples"))
        assert server.names() == ["INFO"] + ["EVALSHA"] * 3
        client.close()


def test_an_unknown_refusal_is_an_error_of_ours() -> None:
    with fake_server(lambda command: info() if command[0] == b"INFO" else b"-WRONGTYPE of key\r\n") as server:
        client = connect(server.url)
        with pytest.raises(QueueError, match="WRONGTYPE"):
            open_queue(client, "run", "samples").close()
        client.close()


# processes


def test_a_connection_used_after_fork_is_an_error(tmp_path: Path) -> None:
    code = """
import os, sys
from eaglefeed.errors import QueueError
from eaglefeed.queue import EmbeddedServer, connect
with EmbeddedServer(sys.argv[1]) as server:
    client = connect(server.url)
    child = os.fork()
    if child == 0:
        try:
            client.call("PING")
        except QueueError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(client.call("PING"))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    refused, answered = done.stdout.splitlines()
    assert "after fork" in refused
    assert "connect again in this process" in refused
    assert answered == "b'PONG'"


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


def test_a_zombie_of_a_purged_run_settles_nothing(queue: LeaseQueue) -> None:
    held = lease(queue)
    queue.purge()
    queue.put([QueueItem("i0", b"payload")])
    lease(queue)
    assert queue.ack(held.token, ["i0"]).stale == ("i0",)
    with pytest.raises(StaleLease):
        queue.renew(held.token, visibility_timeout_s=1)
