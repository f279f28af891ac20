"""Addresses, tokens, bounds and deadlines of the HTTP plane, without a socket."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from eaglefeed.access import bearer, check_listen
from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError, EaglefeedError, SchemaError, StorageError, TargetError, TargetUnavailable
from eaglefeed.storage.control import ControlClient
from eaglefeed.storage.serving import TokenGuard, read_body, refusal_reply
from eaglefeed.storage.wire import Deadline

Message = dict[str, Any]


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://host:8001/", "http://host:8001"),
        ("https://Host.example:443", "https://host.example:443"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_names_scheme_host_and_port(url: str, kept: str) -> None:
    assert ControlClient(url).url == kept


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8001",
        "127.0.0.1:8001",
        "http://host",
        "http://:8001",
        "http://host:0x50",
        "http://host:99999",
        "http://host:0",
        "http://host:80\n",
        " http://host:80",
        "ftp://host:21",
        "http://host:8001/path",
        "http://host:8001?a=b",
        "http://user:secret@host:8001",
        "http://[::1:8001",
        f"http://{'a' * 70}:8001",
        "http://a..b:8001",
    ],
)
def test_another_address_is_refused_with_what_is_wanted(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port") as caught:
        ControlClient(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "in_the_way"),
    [
        ("http://user:secret@host:8001", "a user or a password"),
        ("https://secret@host:8001/", "a user or a password"),
        ("http://user:secret@host:8001/v1", "a user or a password"),
        ("http://host:8001/v1", "a path or a query"),
        ("http://host:8001?key=secret", "a path or a query"),
        ("http://host:8001/?key=secret", "a path or a query"),
    ],
)
def test_what_is_in_the_way_in_an_address_is_named_and_no_secret_repeated(url: str, in_the_way: str) -> None:
    with pytest.raises(ConfigError, match=f"got {in_the_way}") as caught:
        ControlClient(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel", "tab\t", "\r\nx: y"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControlClient("http://host:1", token=token)
    assert token not in str(caught.value)


def test_a_token_becomes_a_bearer_header() -> None:
    assert bearer("a-b_c.1") == "Bearer a-b_c.1"


def test_what_is_left_until_a_deadline_shrinks_to_a_timeout() -> None:
    clock = ManualClock()
    deadline = Deadline(clock, 10.0)
    clock.advance(4.0)
    assert deadline.left() == pytest.approx(6.0)
    clock.advance(6.0)
    with pytest.raises(TimeoutError):
        deadline.left()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_alone_may_be_served_without_a_token(host: str) -> None:
    check_listen(host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "node7", "fe80::1", "localhost.evil.example"])
def test_listening_beyond_this_machine_takes_a_token(host: str) -> None:
    check_listen(host, "token")
    with pytest.raises(ConfigError, match=r"access\.token_file"):
        check_listen(host, "")


def played(app: Any, *, path: str = "/echo", headers: Iterable[tuple[bytes, bytes]] = ()) -> list[Message]:
    """What an ASGI app sends for a request without a body."""
    sent: list[Message] = []
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "let in"})


@pytest.mark.parametrize(
    "value",
    [None, b"", b"Bearer", b"Bearer ", b"Bearer secre", b"Bearer secrets", b"bearer secret", b"secret", b"\xff"],
)
def test_nobody_is_let_in_without_the_token(value: bytes | None) -> None:
    headers = [] if value is None else [(b"authorization", value)]
    start, body = played(TokenGuard(inner, "secret"), headers=headers)
    assert start["status"] == 401
    assert (b"connection", b"close") in start["headers"]
    assert b"ConfigError" in body["body"]
    assert b"secret" not in body["body"]


def test_the_token_lets_in_and_health_needs_none() -> None:
    guard = TokenGuard(inner, "secret")
    assert played(guard, headers=[(b"x", b"y"), (b"authorization", b"Bearer secret")]) == [{"type": "let in"}]
    assert played(guard, path="/health") == [{"type": "let in"}]
    assert played(TokenGuard(inner, "")) == [{"type": "let in"}]
    assert played(guard, path="/health/../generate")[0]["status"] == 401


@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (SchemaError("x"), 422, None),
        (TargetUnavailable("busy"), 503, (b"retry-after", b"1")),
        (ConfigError("token"), 401, (b"connection", b"close")),
        (TargetError("x"), 500, None),
    ],
)
def test_a_refusal_says_by_its_status_what_to_do(
    error: EaglefeedError, status: int, header: tuple[bytes, bytes] | None
) -> None:
    reply = refusal_reply(error)
    assert reply.status_code == status
    assert {name for name, _ in reply.raw_headers} >= {b"content-length", b"content-type"}
    assert [pair for pair in reply.raw_headers if pair[0] in (b"retry-after", b"connection")] == (
        [header] if header else []
    )


def test_a_refusal_can_have_a_status_of_its_own() -> None:
    assert refusal_reply(StorageError("unknown session"), 409).status_code == 409


def request(*messages: Message, length: int | None = None) -> tuple[Request, list[Message]]:
    """A request that receives these messages; the list loses those that were received."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(3600)
        return left.pop(0)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "headers": headers}, receive), left


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def read(asked: Request, max_bytes: int, timeout_s: float = 20.0) -> bytes:
    return bytes(asyncio.run(read_body(asked, max_bytes, timeout_s)))


def test_a_body_of_exactly_the_limit_is_read() -> None:
    asked, _ = request(part(b"abc"), part(b"de", more=False), length=5)
    assert read(asked, 5) == b"abcde"


def test_a_body_over_the_limit_is_refused_before_any_of_it_is_read() -> None:
    asked, left = request(part(b"abc"), length=6)
    with pytest.raises(SchemaError, match="wanted at most 5 bytes, got 6") as caught:
        read(asked, 5)
    assert len(left) == 1
    assert refusal_reply(caught.value).status_code == 413


def test_a_body_of_no_stated_length_is_read_up_to_the_limit_and_no_further() -> None:
    asked, left = request(part(b"abc"), part(b"def"), part(b"ghi"))
    with pytest.raises(SchemaError, match="at most 5 bytes") as caught:
        read(asked, 5)
    assert left == [part(b"ghi")]
    assert refusal_reply(caught.value).status_code == 413


def test_a_body_that_does_not_come_in_time_is_refused() -> None:
    asked, _ = request(part(b"abc"), length=5)
    with pytest.raises(TargetUnavailable, match="got 3 bytes") as caught:  # the request itself may be well
        read(asked, 5, timeout_s=0.02)
    assert refusal_reply(caught.value).status_code == 408


def test_a_body_cut_short_is_no_body() -> None:
    asked, _ = request(part(b"abc"), {"type": "http.disconnect"}, length=5)
    with pytest.raises(ClientDisconnect):
        read(asked, 5)
