"""A replica is promoted and the primary demoted: tokens and sessions grow on, and what only the old one knew goes."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import queue_servers
from eaglefeed.errors import QueueUnavailable, StaleLease, UnsafeServer
from eaglefeed.queue import EmbeddedServer, connect, open_queue, server_process
from eaglefeed.queue.base import Lease, LeaseQueue
from eaglefeed.queue.connection import QueueClient
from faults.processes import in_thread, kill_at_once, wait_until
from faults.reply_proxy import reply_proxy
from queue_steps import LONG_S, ids, items, learn, lease
from queue_steps import counts as counts_of

SERVERS = queue_servers.real_servers()


class Node(NamedTuple):
    """A server, its port for replicas, and a connection to it."""

    server: EmbeddedServer
    port: int
    client: QueueClient

    def samples(self) -> LeaseQueue:
        return open_queue(self.client, "run", "samples")

    def follow(self, other: "Node") -> None:
        self.client.call("REPLICAOF", "127.0.0.1", other.port)

    def lead(self) -> None:
        self.client.call("REPLICAOF", "NO", "ONE")


class Pair(NamedTuple):
    old: Node
    new: Node

    def replicate(self) -> None:
        """Let all that the old primary holds reach its replica."""
        assert self.old.client.call("WAIT", 1, 20_000) == 1

    def fail_over(self) -> None:
        self.new.lead()
        self.old.follow(self.new)


@pytest.fixture(params=["valkey", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param not in SERVERS:
        pytest.skip(f"no {request.param}-server is installed")
    monkeypatch.setitem(server_process._OPTIONS, "bind", "127.0.0.1")
    monkeypatch.setitem(server_process._OPTIONS, "repl-diskless-sync-delay", "0")
    with ExitStack() as stack:
        pair = Pair(*(started(stack, tmp_path / name, request.param, monkeypatch) for name in ("old", "new")))
        pair.new.follow(pair.old)
        wait_until(lambda: b"master_link_status:up" in pair.new.client.call("INFO", "replication"))
        yield pair
        for node in pair:
            kill_at_once(node.server)  # one that has just become a replica may refuse to shut down


def started(stack: ExitStack, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Node:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setitem(server_process._OPTIONS, "port", str(port))
    server = stack.enter_context(EmbeddedServer(folder, binary=SERVERS[kind]))
    client = connect(server.url, max_wait_s=10.0)
    stack.callback(client.close)
    return Node(server, port, client)


def test_after_a_failover_tokens_and_sessions_grow_on_and_a_zombies_token_is_refused(pair: Pair) -> None:
    old, new = pair.old.samples(), pair.new.samples()
    old.put(items(*"abcdefgh"))
    first_session = old.restore(0)
    kept = lease(old, 2, session=first_session)
    learn(old, 1, 5, first_session)
    pair.replicate()
    pair.new.lead()
    zombie = lease(old, 3, session=first_session)  # the replica never hears of it
    assert ids(zombie) == ["d", "e", "f"]
    pair.old.follow(pair.new)
    time.sleep(0.002)  # a token is of its millisecond: two primaries at once could give the same one
    owner = lease(new, 3, session=first_session)
    assert ids(owner) == ids(zombie)
    assert owner.token > zombie.token > kept.token
    assert new.ack(zombie.token, ids(zombie), session=first_session).ok == ()
    with pytest.raises(StaleLease):
        new.renew(zombie.token, visibility_timeout_s=LONG_S)
    assert new.ack(kept.token, ids(kept), session=first_session).ok == ("a", "b")
    assert new.ack(owner.token, ids(owner), session=first_session).ok == ("d", "e", "f")
    second_session = new.restore(0)
    assert second_session > first_session
    with pytest.raises(StaleLease):
        new.commit(5, session=first_session)
    assert ids(lease(new, session=second_session)) == ["c", "g", "h"]


def test_a_demoted_primary_takes_no_call_and_no_new_client(pair: Pair) -> None:
    pair.old.samples().put(items("a"))
    pair.replicate()
    pair.fail_over()
    pair.old.client.max_wait_s = 0.1
    with pytest.raises(QueueUnavailable, match="ReadOnlyError") as caught:
        lease(pair.old.samples())
    assert caught.value.retryable
    with pytest.raises(UnsafeServer, match="use the address of its primary"):
        connect(pair.old.server.url)
    assert counts_of(pair.new.samples()) == (1, 0, 0, 0, 0)


def test_a_waiting_lease_follows_an_address_that_moves_to_the_new_primary(pair: Pair, tmp_path: Path) -> None:
    pair.old.samples().put(items("a"))
    held = lease(pair.old.samples())
    pair.replicate()
    with reply_proxy(tmp_path / "address.sock", pair.old.server.folder / "server.sock") as address:
        behind = connect(address.url)
        queue = open_queue(behind, "run", "samples")

        def fail_over_while_it_waits() -> None:
            wait_until(lambda: b"blocked_clients:1\r" in pair.old.client.call("INFO", "clients"))
            pair.fail_over()
            address.upstream = pair.new.server.folder / "server.sock"
            pair.new.samples().put(items("b"))

        thread = in_thread(fail_over_while_it_waits)
        got = queue.lease(5, visibility_timeout_s=LONG_S, consumer="c", wait_s=60)
        thread.join(30)
        assert isinstance(got, Lease)
        assert ids(got) == ["b"]
        assert queue.ack(held.token, ["a"]).ok == ("a",)
        behind.close()
