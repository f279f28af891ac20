"""Real servers and clients: tensors arrive whole, memory is used again on both sides, connections are kept."""

import gc
import multiprocessing
import resource
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from eaglefeed.errors import ConfigError, SampleCorrupt, TargetUnavailable
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.control import ControlClient, Fetched, Refused
from eaglefeed.storage.reading import tensors_of
from eaglefeed.storage.serving import HttpServer, TensorReply
from eaglefeed.storage.shard import TensorWriter
from http_sides import PATIENCE_S, App, client_of, connected, serving, tensors

MB = 2**20


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def server(app: App) -> Iterator[HttpServer]:
    with serving(app) as started:
        yield started


@pytest.fixture
def client(server: HttpServer) -> Iterator[ControlClient]:
    with client_of(server.url) as opened:
        yield opened


def fetch(
    client: ControlClient, body: bytes = b"q", ring: BufferRing | None = None, max_bytes: int = MB * 64
) -> Fetched:
    return client.fetch("/tensors", body, timeout_s=PATIENCE_S, ring=ring, subject="answer", max_bytes=max_bytes)


def test_tensors_arrive_with_their_values_names_and_metadata(client: ControlClient) -> None:
    fetched = fetch(client, b"hello")
    assert fetched.metadata == {"request": "hello"}
    assert fetched.headers["x-said"] == "hello"
    assert set(fetched.tensors) == set(tensors())
    for name, wanted in tensors().items():
        got = fetched.tensors[name]
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("rows", [0, 1, 262, 263, 1000])
def test_tensors_of_any_size_arrive(rows: int) -> None:
    sent = tensors(rows)
    with serving(App(sent)) as server, client_of(server.url) as client:
        got = fetch(client).tensors
        assert all(torch.equal(got[name], sent[name]) for name in sent)


def test_a_body_and_a_reply_of_bytes_go_through(client: ControlClient) -> None:
    assert client.call("/echo", bytearray(b"\x00\xffabc"), timeout_s=PATIENCE_S).body == b"\x00\xffabc"
    assert client.call("/echo", memoryview(b"abc")[1:], timeout_s=PATIENCE_S).body == b"bc"
    assert client.call("/echo", timeout_s=PATIENCE_S).body == b""


def test_calls_one_after_another_share_a_connection(client: ControlClient) -> None:
    ports = {client.call("/port", method="GET", timeout_s=PATIENCE_S).body for _ in range(5)}
    fetch(client)
    ports.add(client.call("/port", timeout_s=PATIENCE_S).body)
    assert len(ports) == 1


def test_a_refusal_leaves_the_connection_to_the_next_call(client: ControlClient) -> None:
    port = client.call("/port", timeout_s=PATIENCE_S).body
    with pytest.raises(Refused) as caught:
        client.call("/nowhere", timeout_s=PATIENCE_S)
    assert caught.value.status == 404
    assert client.call("/port", timeout_s=PATIENCE_S).body == port


def test_each_of_many_threads_gets_its_own_answer(client: ControlClient) -> None:
    ring = BufferRing(4)

    def one(number: int) -> bool:
        fetched = fetch(client, str(number).encode(), ring)
        return fetched.metadata == {"request": str(number)} and torch.equal(fetched.tensors["wide"], tensors()["wide"])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


def test_an_answer_lies_in_the_ring_until_it_is_dropped(client: ControlClient) -> None:
    ring = BufferRing(1, deadline_s=0.0)
    fetched = fetch(client, ring=ring)
    assert ring.held() == ["answer"]
    place = fetched.tensors["wide"].data_ptr()
    del fetched
    assert ring.held() == []
    assert fetch(client, ring=ring).tensors["wide"].data_ptr() == place


def test_a_caller_that_keeps_its_answers_gets_memory_of_its_own(client: ControlClient) -> None:
    ring = BufferRing(1, deadline_s=0.0)
    kept = [fetch(client, str(index).encode(), ring) for index in range(3)]
    assert len({fetched.tensors["wide"].data_ptr() for fetched in kept}) == 3
    assert all(torch.equal(fetched.tensors["wide"], tensors()["wide"]) for fetched in kept)


def test_an_answer_larger_than_wanted_is_not_read(client: ControlClient) -> None:
    ring = BufferRing(1, deadline_s=0.0)
    with pytest.raises(SampleCorrupt, match="wanted at most 1000 bytes"):
        fetch(client, ring=ring, max_bytes=1000)
    assert ring.held() == []


def test_the_server_lets_go_of_an_answer_when_it_is_sent(app: App, client: ControlClient) -> None:
    sent = torch.ones(4 * MB)
    gone = weakref.ref(sent.untyped_storage())
    app.sent = {"ones": sent}
    del sent
    fetched = fetch(client)
    app.sent = {}
    client.call("/port", timeout_s=PATIENCE_S)  # on the same connection: so the reply before is done with
    gc.collect()
    assert gone() is None
    assert fetched.tensors["ones"].sum() == 4 * MB


class Staged(TensorWriter):
    """Hands out its data through one small buffer, as tensors on a GPU are."""

    def chunks(self, *, hashed: bool = True) -> Iterator[memoryview]:
        staging = memoryview(bytearray(32 * 1024))
        for chunk in super().chunks(hashed=hashed):
            for begin in range(0, len(chunk), len(staging)):
                part = chunk[begin : begin + len(staging)]
                staging[: len(part)] = part
                yield staging[: len(part)]


def test_memory_that_is_used_again_for_the_next_piece_is_sent_as_it_was() -> None:
    sent = {"numbers": torch.arange(4 * MB, dtype=torch.float32)}

    async def staged(_request: Request) -> Response:
        writer = Staged(sent, {})
        for _ in writer.chunks():
            pass
        return TensorReply(writer, {}, PATIENCE_S)

    with serving(Router([Route("/staged", staged)])) as server, client_of(server.url) as client:
        with client.open("/staged", method="GET", timeout_s=PATIENCE_S) as incoming:
            threading.Event().wait(0.2)  # so that the kernel's buffers are full
            got = tensors_of(incoming, ring=None, subject="answer", max_bytes=17 * MB)[0]
        assert torch.equal(got["numbers"], sent["numbers"])


def _serve_and_tell_growth(port: "multiprocessing.Queue[int]", done: Event) -> None:
    """By how much serving makes a process grow: its peak, reset when the answer stands."""
    sent = {"ones": torch.ones(64, MB // 4)}
    with serving(App(sent)) as server:
        with client_of(server.url) as client:
            client.call("/tensors", b"warm", timeout_s=PATIENCE_S, max_bytes=65 * MB)
        sent["ones"] = torch.ones(64, MB)
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        port.put(server.port)
        done.wait(PATIENCE_S)
        port.put(_memory("VmHWM") - before)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def test_the_server_copies_nothing_of_what_it_sends() -> None:
    context = multiprocessing.get_context("spawn")
    numbers: multiprocessing.Queue[int] = context.Queue()
    done = context.Event()
    process = context.Process(target=_serve_and_tell_growth, args=(numbers, done))
    process.start()
    try:
        with client_of(f"http://127.0.0.1:{numbers.get(timeout=60)}") as client:
            for _ in range(3):
                assert fetch(client, max_bytes=257 * MB).tensors["ones"].shape == (64, MB)
        done.set()
        assert numbers.get(timeout=60) < 16 * MB  # of an answer of 256 MiB
    finally:
        process.terminate()
        process.join(PATIENCE_S)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_ipv6_is_served_and_reached(app: App) -> None:
    with serving(app, host="::1") as server, client_of(server.url) as client:
        assert server.url == f"http://[::1]:{server.port}"
        assert client.call("/echo", b"six", timeout_s=PATIENCE_S).body == b"six"


def test_a_server_on_every_address_tells_how_it_is_reached_from_here(app: App) -> None:
    with serving(app, host="0.0.0.0", token="t") as server, client_of(server.url, "t") as client:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert client.call("/echo", b"any", timeout_s=PATIENCE_S).body == b"any"


def test_a_port_in_use_is_said_with_what_to_do(server: HttpServer) -> None:
    with pytest.raises(
        ConfigError, match=rf"127.0.0.1 port {server.port}: cannot listen, got Address already in use.*; stop"
    ):
        HttpServer(App()).start("127.0.0.1", server.port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no-such-host.invalid", 0), ("a..b", 0)])
def test_an_address_that_is_not_ours_is_said(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        HttpServer(App(), token="t").start(host, port)


def test_a_server_beyond_this_machine_does_not_start_without_a_token() -> None:
    server = HttpServer(App())
    with pytest.raises(ConfigError, match="without a token"):
        server.start("0.0.0.0", 0)
    server.stop()


def test_a_stopped_server_gives_its_port_back_and_leaves_no_thread(app: App) -> None:
    before = set(threading.enumerate())
    with serving(app) as first:
        port = first.port
    second = HttpServer(app)
    second.start("127.0.0.1", port)
    second.stop()
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name == "http-server"]


def test_a_closed_client_keeps_no_connection(app: App, server: HttpServer) -> None:
    client = ControlClient(server.url)
    client.call("/echo", timeout_s=PATIENCE_S)
    client.close()
    client.call("/echo", timeout_s=PATIENCE_S)  # still to be used, as a goodbye is
    assert client._idle == []


def test_a_thousand_connections_are_held_and_served(server: HttpServer) -> None:
    ask = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"
    with ExitStack() as stack, client_of(server.url) as client:
        held = [stack.enter_context(connected(server)) for _ in range(1000)]
        for connection in held:
            connection.sendall(ask)
        assert client.call("/echo", b"one more", timeout_s=PATIENCE_S).body == b"one more"
        for connection in held:
            assert connection.recv(4096).endswith(b"hi")


def test_more_connections_than_wanted_are_told_to_come_again(app: App) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(app, max_connections=3))
        for _ in range(3):
            stack.enter_context(connected(server))
        client = stack.enter_context(client_of(server.url))
        with pytest.raises(Refused) as caught:
            client.call("/echo", timeout_s=PATIENCE_S)
        assert caught.value.status == 503
        assert isinstance(caught.value.error, TargetUnavailable)


def test_the_limit_on_open_files_is_raised_to_what_the_connections_need(app: App) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        with serving(app, max_connections=1000):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(1000, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
