"""Servers that refuse for a while are waited for; those that would lose work are refused; large keys block nobody."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from eaglefeed.cli.common import RunQueues
from eaglefeed.errors import ConfigError, EaglefeedError, QueueError, QueueUnavailable, UnsafeServer
from eaglefeed.ops.bottleneck import bottleneck
from eaglefeed.ops.facts import read_run
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.journal import RunJournal
from eaglefeed.queue.redis import RedisLeaseQueue
from faults.fake_server import Answer, fake_server, info
from faults.operation_base import Run
from queue_steps import counts, ids, items, lease

NUM_LARGE = 200_000

# connections


def test_a_server_without_free_connections_is_waited_for(server: EmbeddedServer, client: QueueClient) -> None:
    client.call("CONFIG", "SET", "maxclients", "1")
    with pytest.raises(QueueUnavailable, match="not reachable") as caught:
        connect(server.url, max_wait_s=0.2)
    assert caught.value.retryable
    room = threading.Timer(0.3, client.call, ("CONFIG", "SET", "maxclients", "100"))
    room.start()
    patient = connect(server.url, max_wait_s=60)
    room.join()
    assert open_queue(patient, "run", "samples").put(items("a")).accepted == 1
    patient.close()


def test_a_run_goes_on_when_a_lost_connection_cannot_be_made_again_at_once(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    worker = connect(server.url, max_wait_s=60)
    mine = open_queue(worker, "run", "samples")
    held = lease(mine, 2)
    client.call("CONFIG", "SET", "maxclients", "1")
    client.call("CLIENT", "KILL", "SKIPME", "yes")
    room = threading.Timer(0.3, client.call, ("CONFIG", "SET", "maxclients", "100"))
    room.start()
    assert mine.ack(held.token, ids(held)).ok == ("i0", "i1")
    room.join()
    worker.close()


# refusals that pass


def then(*refusals: bytes | None) -> Answer:
    """Answers in turn, then as a healthy server."""
    replies = iter(refusals)
    return lambda _: next(replies, info())


@pytest.mark.parametrize(
    "refusal",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
        b"-MISCONF Errors writing to the AOF file: No space left on device\r\n",
        b"-BUSY Redis is busy running a script.\r\n",
        b"-ERR max number of clients reached\r\n",
        b"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)\r\n",
        None,
    ],
)
def test_a_refusal_that_passes_with_time_is_waited_out(refusal: bytes | None) -> None:
    with fake_server(then(refusal, refusal)) as server:
        connect(server.url).close()
        assert server.names() == ["INFO"] * 3


@pytest.mark.parametrize(
    ("refusal", "fix"),
    [
        (b"-MISCONF Errors writing to the AOF file: No space left on device\r\n", "free its disk"),
        (b"-BUSY Redis is busy running a script.\r\n", "SCRIPT KILL"),
        (b"-NOREPLICAS Not enough good replicas to write.\r\n", "start its replicas"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "raise its maxmemory"),
    ],
)
def test_a_server_that_answers_is_not_told_to_be_out_of_reach(refusal: bytes, fix: str) -> None:
    with fake_server(lambda _: refusal) as server, pytest.raises(QueueUnavailable, match=fix) as caught:
        connect(server.url, max_wait_s=0)
    assert "reachable" not in str(caught.value)


def test_a_primary_that_lacks_its_replicas_is_waited_for(client: QueueClient, queue: LeaseQueue) -> None:
    client.call("CONFIG", "SET", "min-replicas-to-write", "1")
    replica = threading.Timer(0.2, client.call, ("CONFIG", "SET", "min-replicas-to-write", "0"))
    replica.start()
    assert len(lease(queue).items) == 6
    replica.join()


def test_a_refusal_that_does_not_pass_is_an_error_at_once() -> None:
    def answer(command: list[bytes]) -> bytes:
        return info() if command[0] == b"INFO" else b"-WRONGTYPE Operation against a key of another kind\r\n"

    with fake_server(answer) as server:
        client = connect(server.url)
        with pytest.raises(QueueError, match="WRONGTYPE") as caught:
            open_queue(client, "run", "samples").has_room()
        assert not caught.value.retryable
        assert server.names() == ["INFO", "HGET"]
        client.close()


@pytest.mark.parametrize(
    ("refusal", "kind", "told"),
    [
        (b"-MOVED 1234 10.0.0.1:7001\r\n", ConfigError, r"cluster .* got MovedError: 1234 10\.0\.0\.1:7001"),
        (b"-ASK 1234 10.0.0.1:7001\r\n", ConfigError, "use a server outside of a cluster"),
        (b"-CROSSSLOT Keys in request don't hash to the same slot\r\n", ConfigError, "outside of a cluster"),
        (b"-DENIED Redis is running in protected mode because ...\r\n", ConfigError, "give it a password"),
        (b"-ERR DB index is out of range\r\n", ConfigError, "no such database"),
        (b"-NOAUTH Authentication required.\r\n", ConfigError, "refuses the log-in"),
        (b"-WRONGPASS invalid username-password pair or user is disabled.\r\n", ConfigError, "user and password"),
        (b"-NOPERM User x has no permissions to run the 'info' command\r\n", ConfigError, r"users\.acl\.template"),
        (b"-ERR unknown command 'EVALSHA', with args beginning with: \r\n", QueueError, "rename no command"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ConfigError, "no Redis or Valkey server.*check host and port"),
        (b"\x15\x03\x01\x00\x02\x02", ConfigError, "rediss:// where it speaks TLS"),
    ],
)
def test_a_refusal_that_a_user_can_mend_says_how_at_once(refusal: bytes, kind: type[EaglefeedError], told: str) -> None:
    with fake_server(lambda command: info() if command[0] == b"INFO" else refusal) as server:
        client = connect(server.url, max_wait_s=20)
        with pytest.raises(kind, match=told):
            open_queue(client, "run", "samples").has_room()
        assert server.names() == ["INFO", "HGET"]
        client.close()


def test_a_server_without_info_config_or_memory_of_scripts_is_used() -> None:
    def answer(command: list[bytes]) -> bytes:
        return (
            b"$1\r\n1\r\n" if command[0] == b"HGET" else b"-ERR unknown command 'INFO', with args beginning with: \r\n"
        )

    with fake_server(answer) as server, structlog.testing.capture_logs() as logs:
        client = connect(server.url)
        assert not open_queue(client, "run", "samples").has_room()
        client.close()
    assert [entry["what"] for entry in logs] == ["cannot verify role, maxmemory_policy, aof_enabled, redis_version"]


def test_a_server_that_starts_later_is_waited_for_at_the_start(tmp_path: Path) -> None:
    started = list[EmbeddedServer]()
    later = threading.Timer(0.5, lambda: started.append(EmbeddedServer(tmp_path / "queue").__enter__()))
    later.start()
    client = connect(f"unix://{tmp_path}/queue/server.sock", max_wait_s=60)
    later.join()
    try:
        assert open_queue(client, "run", "samples").put(items("a")).accepted == 1
        assert client.num_repeats > 0
    finally:
        client.close()
        started[0].close()


def test_a_name_that_nobody_knows_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = socket.getaddrinfo, list[str]()

    def unknown_at_first(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", unknown_at_first)
    with fake_server(then()) as server:
        connect(server.url.replace("127.0.0.1", "queue.example"), max_wait_s=30).close()
    assert asked == ["queue.example"] * 3


# servers that would lose work


def test_a_sentinel_is_no_server_and_a_clusters_node_is_warned_of() -> None:
    with fake_server(lambda _: info(redis_mode="sentinel")) as server, pytest.raises(UnsafeServer, match="a Sentinel"):
        connect(server.url)
    with fake_server(lambda _: info(cluster_enabled="1")) as server, structlog.testing.capture_logs() as logs:
        connect(server.url).close()
    assert ["a node of a cluster" in entry["what"] for entry in logs] == [True]


def test_a_server_that_may_evict_the_queue_is_refused(server: EmbeddedServer, client: QueueClient) -> None:
    client.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsafeServer, match="set maxmemory-policy noeviction"):
        connect(server.url)


def test_an_id_whose_payload_was_evicted_is_told_and_not_handed_out(client: QueueClient, queue: LeaseQueue) -> None:
    assert isinstance(queue, RedisLeaseQueue)
    client.call("UNLINK", queue.key("ref"))
    with pytest.raises(UnsafeServer, match=r"i0: its payload is gone: the server evicted it.*noeviction"):
        lease(queue)


def test_an_old_server_is_refused() -> None:
    with (
        fake_server(lambda _: info(redis_version="6.0.16")) as old,
        pytest.raises(UnsafeServer, match=r"Redis 6\.2.*got 6\.0\.16"),
    ):
        connect(old.url)


def test_a_server_that_hides_its_settings_is_used() -> None:
    with fake_server(lambda _: b"-NOPERM this user has no permissions to run the 'info' command\r\n") as server:
        connect(server.url).close()


# large keys


def test_a_server_out_of_memory_can_be_looked_at_and_is_what_holds_the_run_up(
    client: QueueClient, queue: LeaseQueue
) -> None:
    run = RunQueues(client, "run", queue, queue)
    assert read_run(run).refuses_writes == ""
    client.call("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(QueueUnavailable, match="out of memory"):
        RunJournal(client.impatient(), run.run).post("producer", "p", {})
    found = bottleneck(read_run(run))
    assert (found.kind, "raise its maxmemory" in found.sentence) == ("server_refuses", True)


def test_the_purge_of_a_large_queue_costs_no_more_commands_than_that_of_a_small_one(client: QueueClient) -> None:
    """Large keys go by UNLINK, a constant number of times; their memory is freed by a thread of the server."""
    small, large = Run(client, "small").samples, Run(client, "large").samples
    for queue in (small, large):
        queue.put(items("a"))
    keys = [large.key(name) for name in ("ready", "ref", "digest", "seq")]
    client.call("EVAL", FILL, len(keys), *keys, NUM_LARGE)
    assert [counts(queue)[0] for queue in (small, large)] == [1, NUM_LARGE + 1]
    Run(client, "first").samples.purge()  # from here on the server knows the script, and none is sent whole
    small_calls, _ = calls_of(client, small.purge)
    large_calls, purged = calls_of(client, large.purge)
    assert purged == NUM_LARGE + 1
    assert "cmdstat_del" not in large_calls
    assert large_calls["cmdstat_unlink"] >= 4
    assert large_calls == small_calls
    assert client.call("KEYS", "eaglefeed:{large}:*ref") == []


FILL = """
for i = 1, ARGV[1] do
  local id = 'x' .. i
  redis.call('RPUSH', KEYS[1], id)
  redis.call('HSET', KEYS[2], id, 'payload')
  redis.call('HSET', KEYS[3], id, '0')
  redis.call('ZADD', KEYS[4], i + 1, id)
end
"""


def calls_of(client: QueueClient, work: Callable[[], int]) -> tuple[dict[str, int], int]:
    """How often the server ran each command during `work`, and what that returned."""
    client.call("CONFIG", "RESETSTAT")
    result = work()
    lines = client.call("INFO", "commandstats").decode().splitlines()
    pairs = (line.split(":calls=") for line in lines if line.startswith("cmdstat"))
    ours = {name: int(rest.split(",")[0]) for name, rest in pairs if "config" not in name and "eval" not in name}
    return ours, result
