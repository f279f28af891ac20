"""What clients and apps do to a server: each ends in time, and nobody else is held up by it."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from eaglefeed.errors import (
    ConfigError,
    EaglefeedError,
    SchemaError,
    TargetError,
    TargetUnavailable,
)
from eaglefeed.storage import serving as serving_module
from eaglefeed.storage.control import ControlClient, Refused
from http_sides import (
    MAX_REQUEST_BYTES,
    PATIENCE_S,
    App,
    client_of,
    connected,
    raw_exchange,
    read_all,
    serving,
)

MB = 2**20
ASK_FOR_TENSORS = b"POST /tensors HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


def call(client: ControlClient, path: str = "/echo", body: bytes = b"hi") -> bytes:
    return client.call(path, body, timeout_s=PATIENCE_S).body


@pytest.mark.parametrize("token", ["", "wrong", "tok", "token1"])
def test_a_client_without_the_right_token_is_refused_and_does_not_try_again(token: str) -> None:
    app = App()
    with serving(app, token="token") as server, client_of(server.url, token) as client:
        with pytest.raises(Refused) as caught:
            call(client)
        assert isinstance(caught.value.error, ConfigError)
        assert not caught.value.error.retryable
        assert (caught.value.status, app.num_echoed) == (401, 0)
        assert client.call("/health", method="GET", timeout_s=PATIENCE_S).body == b"alive"


def test_ten_gigabytes_are_refused_before_any_of_them_is_read() -> None:
    with serving(App()) as server:
        said = raw_exchange(server, b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b"SchemaError" in said


def test_a_chunked_body_is_cut_at_the_limit() -> None:
    chunk = b"200\r\n" + b"x" * 512 + b"\r\n"  # without an end
    app = App()
    with serving(app) as server:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        said = raw_exchange(server, head + chunk * (MAX_REQUEST_BYTES // 512 + 1))
    assert said.startswith(b"HTTP/1.1 413 ")
    assert app.num_echoed == 0


@pytest.mark.parametrize("token", ["", "token"])
def test_a_client_that_is_refused_while_it_sends_learns_why(token: str) -> None:
    with serving(App(), token=token) as server, client_of(server.url) as client:
        with pytest.raises(Refused) as caught:
            call(client, body=bytes(64 * MB))
        assert caught.value.status == (401 if token else 413)
        assert isinstance(caught.value.error, ConfigError if token else SchemaError)


def test_a_body_cut_short_reaches_nobody_and_the_server_goes_on() -> None:
    app = App()
    with serving(app) as server, capture_logs() as logs:
        with connected(server) as connection:
            connection.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
            assert app.arrived.wait(PATIENCE_S)
        with client_of(server.url) as client:
            assert call(client) == b"hi"
    assert app.num_echoed == 1
    assert logs == []


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / SPDY/9\r\n\r\n", bytes(range(256))],
)
def test_garbage_instead_of_a_request_ends_its_connection_alone(garbage: bytes) -> None:
    with serving(App()) as server, client_of(server.url) as client:
        said = raw_exchange(server, garbage + b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400 ")
        assert call(client) == b"hi"


def test_a_request_head_without_end_is_cut() -> None:
    with serving(App()) as server:
        with connected(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
            with pytest.raises(ConnectionError):
                connection.sendall(b"x" * 256 * MB)
        with client_of(server.url) as client:
            assert call(client) == b"hi"


@pytest.mark.parametrize("begun", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"])
def test_a_request_head_that_does_not_come_in_time_is_cut(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "_HEAD_S", 0.1)
    with serving(App()) as server:
        assert raw_exchange(server, begun).count(b"alive") == begun.count(b"\r\n\r\n")


def test_a_client_that_does_not_read_is_cut_and_holds_up_nobody() -> None:
    sent = {"ones": torch.ones(16, MB)}
    gone = weakref.ref(sent["ones"].untyped_storage())
    app = App(sent, timeout_s=0.5)
    with serving(app) as server, client_of(server.url) as client, connected(server) as slow:
        slow.sendall(ASK_FOR_TENSORS)
        begin = slow.recv(15)
        assert call(client) == b"hi"  # meanwhile
        app.sent = {}
        del sent
        wait_for_death(gone)
        got = begin + read_all(slow)
    assert got.startswith(b"HTTP/1.1 200 OK")
    assert len(got) < 64 * MB


def wait_for_death(gone: "weakref.ref[torch.UntypedStorage]") -> None:
    """Or the test's own deadline ends it."""
    while gone() is not None:
        gc.collect()
        threading.Event().wait(0.02)


def test_a_client_that_leaves_in_the_middle_of_an_answer_leaves_nothing_behind() -> None:
    app = App({"ones": torch.ones(16, MB)})
    with serving(app) as server, client_of(server.url) as client, capture_logs() as logs:
        for _ in range(5):
            with connected(server) as leaver:
                leaver.sendall(ASK_FOR_TENSORS)
                leaver.recv(100)
        assert call(client) == b"hi"
        gone = weakref.ref(app.sent.pop("ones").untyped_storage())
        wait_for_death(gone)
    assert logs == []


async def failing(_request: Request) -> Response:
    raise RuntimeError("inner secret")


async def refusing(_request: Request) -> Response:
    raise SchemaError("odd rows", wanted=2, got=3)


class Broken(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = str(65 * MB).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": bytes(64 * MB), "more_body": True})
        raise RuntimeError("in the middle")


async def breaking(_request: Request) -> Response:
    return Broken()


@pytest.fixture
def broken() -> Iterator[ControlClient]:
    app = Router([Route("/fail", failing), Route("/refuse", refusing), Route("/break", breaking)])
    with serving(app) as server, client_of(server.url) as client:
        yield client


def refused(client: ControlClient, path: str) -> tuple[int, EaglefeedError]:
    with pytest.raises(Refused) as caught:
        client.call(path, method="GET", timeout_s=PATIENCE_S)
    return caught.value.status, caught.value.error


def test_an_error_of_ours_is_told_to_the_client_as_it_is(broken: ControlClient) -> None:
    status, error = refused(broken, "/refuse")
    assert (status, type(error), error.what, error.wanted, error.got) == (422, SchemaError, "odd rows", "2", "3")


def test_an_error_of_others_is_logged_whole_and_told_without_its_text(broken: ControlClient) -> None:
    with capture_logs() as logs:
        status, error = refused(broken, "/fail")
    assert (status, type(error)) == (500, TargetError)
    assert "secret" not in str(error)
    assert [line["event"] for line in logs] == ["request_failed"]
    assert "inner secret" in logs[0]["exception"]


def test_an_error_in_the_middle_of_a_reply_cuts_it_at_once_and_is_logged(broken: ControlClient) -> None:
    asked, cut = broken.open("/break", method="GET", timeout_s=PATIENCE_S), r"cut short|reset"
    with capture_logs() as logs, asked as incoming, pytest.raises(TargetUnavailable, match=cut):
        incoming.readinto(bytearray(64 * MB))  # all that was begun: it is not sent to its end
    assert [line["event"] for line in logs] == ["request_failed", "reply_cut"]
    assert refused(broken, "/refuse")[0] == 422


def test_stopping_a_server_cuts_who_is_still_waiting() -> None:
    never = threading.Event()

    async def waiting(request: Request) -> Response:
        never.set()
        await request.receive()
        await request.receive()
        return Response()

    server = serving_module.HttpServer(Router([Route("/wait", waiting, methods=["POST"])]))
    server.start("127.0.0.1", 0)
    with client_of(server.url) as client, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.call, "/wait", timeout_s=PATIENCE_S)
        assert never.wait(PATIENCE_S)
        server.stop(0.1)
        with pytest.raises(TargetUnavailable):
            asked.result(PATIENCE_S)
