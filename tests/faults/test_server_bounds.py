"""What a server may hold, and for how long, whatever its clients do; and that it does not live on deaf."""

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch
from starlette.types import Message

from coded_target import CodedTarget
from eaglefeed.errors import ConfigError, PeerGone, SampleCorrupt, StorageError, TargetError, TargetUnavailable
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer, check_server
from eaglefeed.schema.protocol import FILE_BYTES_HEADER, PAIR_BODY, PAIR_HEADER, PairRequest
from eaglefeed.storage import pair_host, serving
from eaglefeed.storage.control import ControlClient, Refused
from eaglefeed.storage.exchange import TensorExchange
from eaglefeed.storage.pair_host import PairHost, PairReply
from eaglefeed.storage.pair_pool import Pair
from faults.processes import wait_until
from http_sides import (
    PATIENCE_S,
    App,
    client_of,
    connected,
    faking,
    hashed,
    raw_exchange,
    read_all,
    reply,
    replying,
    tensors,
)

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
UNREAD = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"


def test_the_bodies_of_all_requests_together_have_a_bound_and_give_it_back() -> None:
    app = App()
    server = serving.HttpServer(app, max_body_bytes=1500)  # 1000 is what each may have
    server.start("127.0.0.1", 0)
    with client_of(server.url) as client:

        def echoes(num_bytes: int) -> bool:
            return client.call("/echo", b"x" * num_bytes, timeout_s=PATIENCE_S).body == b"x" * num_bytes

        for _ in range(3):
            assert echoes(1000)
        with connected(server) as half:
            half.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + b"x" * 900)
            limit = server._app._app._app
            wait_until(lambda: limit._held_bytes == 900)
            assert echoes(600)
            with pytest.raises(Refused) as caught:
                echoes(601)
            assert (caught.value.status, type(caught.value.error)) == (503, TargetUnavailable)
        wait_until(lambda: limit._held_bytes == 0)
        assert echoes(1000)
    server.stop(0.0)


@pytest.mark.parametrize(("begun", "more"), [(HEALTH, b"\r\n"), (UNREAD, b"x")])
def test_what_follows_a_reply_and_is_no_request_does_not_hold_its_connection(
    begun: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_HEAD_S", 0.2)
    server = serving.HttpServer(App())
    server.start("127.0.0.1", 0)
    with connected(server) as connection:
        connection.sendall(begun)
        assert connection.recv(9) == b"HTTP/1.1 "
        connection.sendall(more)
        read_all(connection)  # until the server hangs up, or the test's patience ends
    server.stop(0.0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_said_as_one_in_use_is(port: int) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen.*another host or port"):
        check_server("127.0.0.1", "", port)


def test_an_unusable_token_is_found_before_a_target_is_loaded() -> None:
    with pytest.raises(ConfigError, match="unusable token"):
        check_server("127.0.0.1", "a token with spaces in it")


def test_a_server_whose_http_thread_ended_ends_with_an_error() -> None:
    torch.set_num_threads(1)
    target = CodedTarget()
    server = TargetServer(target, info_of(target, "test"))
    with pytest.raises(TargetError, match="a thread of the server's ended"):
        server.serve(threading.Event(), lambda: setattr(server._http._server, "should_exit", True), grace_s=1.0)


def pair_request(number: int = 0, epoch: int = 1) -> PairRequest:
    return PairRequest(backend="gloo", name=f"{number:032x}", epoch=epoch)


def test_nothing_answers_where_pairs_meet_before_a_client_wants_one() -> None:
    host = PairHost("127.0.0.1", 0, ("gloo",))
    with socket.create_connection(("127.0.0.1", host.port), PATIENCE_S):
        pass
    assert host._place is not None
    assert host._place._store is None
    host.grant(pair_request())
    wait_until(lambda: host._place._store is not None)
    host.close()
    wait_until(lambda: host._num_joining == 0)


def test_a_pair_that_is_asked_for_again_and_again_takes_no_more_threads_than_there_may_be_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_host, "_JOIN_S", 1.0)
    host = PairHost("127.0.0.1", 0, ("gloo",), max_pairs=3)
    for epoch in (1, 2, 3):
        host.grant(pair_request(epoch=epoch))
    with pytest.raises(StorageError, match="too many pair groups"):
        host.grant(pair_request(epoch=4))
    wait_until(lambda: host._num_joining == 0)
    host.grant(pair_request(epoch=4))
    host.close()
    wait_until(lambda: host._num_joining == 0)


def test_an_answer_waits_for_its_pair_no_longer_than_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_host, "_JOIN_S", 3600.0)
    host = PairHost("127.0.0.1", 0, ("gloo",))
    host._pairs["a" * 32] = pair_host._Hosted("gloo", "a" * 32, 1, 0.0)  # being joined, for ever
    with pytest.raises(PeerGone, match="not free"):
        host.send("a" * 32 + ":1", [torch.zeros(1, dtype=torch.uint8)], label=b"", timeout_s=0.05)
    host._pairs.clear()
    host.close()


def test_a_client_that_does_not_read_the_head_of_an_answer_over_a_pair_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_host, "_SPARE_S", 0.0)
    is_cut = asyncio.Event()

    async def never(_message: Message) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        await is_cut.wait()
        return {"type": "http.disconnect"}

    host: Any = None
    answer = PairReply(host, "a:1", hashed(tensors(), {}), {}, 0.05)
    scope = {"type": "http", serving.CUT: is_cut.set}
    asyncio.run(asyncio.wait_for(answer(scope, receive, never), PATIENCE_S))
    assert is_cut.is_set()


@pytest.mark.parametrize("size", ["9" * 5000, "-1", "1e3", "", "\u00b2"])
def test_a_size_that_is_none_is_a_damaged_answer(size: str) -> None:
    pair = Pair()
    header = hashed(tensors(), {}).header()
    head = f"content-type: {PAIR_BODY}\r\n{PAIR_HEADER}: {pair.name_epoch}\r\n{FILE_BYTES_HEADER}: {size}\r\n"
    said = reply(b"", head=head, length=len(header)).decode().encode("latin-1") + header
    with faking(replying(said)) as server:
        client = ControlClient(server.url)
        exchange = TensorExchange(client, _Lending(pair))  # type: ignore[arg-type]
        with pytest.raises(SampleCorrupt, match="not asked for"):
            exchange.fetch("/t", timeout_s=PATIENCE_S, subject="answer", max_bytes=10**6)
        client.close()


class _Lending:
    """A pool with one pair, which is not open."""

    device = torch.device("cpu")

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def borrow(self) -> "_Lending":
        return self

    def __enter__(self) -> Pair:
        return self._pair

    def __exit__(self, *_: object) -> None:
        return None


def test_a_body_of_no_end_is_read_no_further_than_its_reply() -> None:
    server = serving.HttpServer(App())
    server.start("127.0.0.1", 0)
    with client_of(server.url) as client:
        said = raw_exchange(server, UNREAD + b"x" * 500_000)
        assert said.startswith(b"HTTP/1.1 404 ")
        assert client.call("/echo", b"hi", timeout_s=PATIENCE_S).body == b"hi"
    server.stop(0.0)
