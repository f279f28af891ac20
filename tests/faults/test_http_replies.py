"""What servers do to a client: each is an error in time, and no memory is lost by it."""

import socket
import struct
import threading

import pytest

from eaglefeed.errors import (
    PeerGone,
    SampleCorrupt,
    TargetUnavailable,
)
from eaglefeed.schema.protocol import TENSOR_BODY
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.control import Abort, ControlClient, Fetched
from http_sides import (
    PATIENCE_S,
    Script,
    body_of,
    client_of,
    faking,
    reply,
    replying,
    reset_at_close,
    take_request,
    tensors,
)

MB = 2**20
TENSOR_HEAD = f"content-type: {TENSOR_BODY}\r\n"
WHOLE = body_of(tensors())


def call_of(url: str, *, timeout_s: float = PATIENCE_S, abort: Abort | None = None) -> bytes:
    with client_of(url) as client:
        return client.call("/x", timeout_s=timeout_s, abort=abort).body


def fetch_of(url: str, *, timeout_s: float = PATIENCE_S, ring: BufferRing | None = None) -> Fetched:
    with client_of(url) as client:
        return client.fetch("/tensors", timeout_s=timeout_s, ring=ring, subject="answer", max_bytes=MB)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00\x01\x02garbage\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n0123456789",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.0 200 OK\r\n\r\nis this all?",
        reply(b"short", length=1000),
        reply(b"x" * (MB + 1)),
    ],
    ids=lambda said: repr(said[:30]),
)
def test_garbage_instead_of_a_reply_is_a_server_that_is_not_there(said: bytes) -> None:
    with faking(replying(said)) as server, pytest.raises(TargetUnavailable, match=f"{server.url}: no answer to /x"):
        call_of(server.url)


def test_nobody_at_the_address_is_said_in_the_words_of_the_caller() -> None:
    with faking() as server:
        pass
    client = ControlClient(server.url, unavailable=PeerGone)
    with pytest.raises(PeerGone, match="Connection refused"):
        client.call("/x", timeout_s=PATIENCE_S)


def test_a_name_that_nobody_knows_is_said() -> None:
    with pytest.raises(TargetUnavailable, match=r"no-such-host\.invalid:1"):
        call_of("http://no-such-host.invalid:1")


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_an_answer_cut_short_is_an_error_and_its_memory_comes_back(keep: int) -> None:
    ring = BufferRing(1, deadline_s=0.0)
    cut = replying(reply(WHOLE[:keep], head=TENSOR_HEAD, length=len(WHOLE)))
    with faking(cut) as server, pytest.raises(TargetUnavailable, match="cut short") as caught:
        fetch_of(server.url, ring=ring)
    assert ring.held() == []
    assert caught.value.retryable


def test_an_answer_that_is_reset_is_an_error_and_its_memory_comes_back() -> None:
    def resetting(connection: socket.socket) -> None:
        take_request(connection)
        connection.sendall(reply(WHOLE[:9000], head=TENSOR_HEAD, length=len(WHOLE)))
        reset_at_close(connection)

    ring = BufferRing(1, deadline_s=0.0)
    with faking(resetting) as server, pytest.raises(TargetUnavailable) as caught:
        fetch_of(server.url, ring=ring)
    assert ring.held() == []
    assert caught.value.subject == server.url


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("head", "body", "what"),
    [
        ("content-type: text/html\r\n", b"<html>", "without tensors"),
        ("", WHOLE, "without tensors"),
        (TENSOR_HEAD, b"", "cut short before its header"),
        (TENSOR_HEAD, b"\xff" * 100, "impossible header length"),
        (TENSOR_HEAD, struct.pack("<Q", 10**13) + WHOLE[8:], "impossible header length"),
        (TENSOR_HEAD, struct.pack("<Q", 50) + b"<" * 92, "unreadable header"),
        (TENSOR_HEAD, WHOLE + b"\0", "longer than its header says"),
        (TENSOR_HEAD, WHOLE[:-1], "cut short"),
        (TENSOR_HEAD, flipped(WHOLE, len(WHOLE) - 1), "checksum of"),
    ],
)
def test_an_answer_whose_bytes_are_wrong_is_never_handed_out(head: str, body: bytes, what: str) -> None:
    ring = BufferRing(1, deadline_s=0.0)
    with faking(replying(reply(body, head=head))) as server, pytest.raises(SampleCorrupt, match=what):
        fetch_of(server.url, ring=ring)
    assert ring.held() == []


def test_an_answer_that_promises_ten_terabytes_is_not_waited_for() -> None:
    wanted = "larger than was asked for, wanted at most 1048576 bytes, got 10000000000000 bytes"
    promising = replying(reply(WHOLE, head=TENSOR_HEAD, length=10**13))
    with faking(promising) as server, pytest.raises(SampleCorrupt, match=wanted):
        fetch_of(server.url)


def test_a_reply_that_promises_ten_terabytes_is_not_waited_for() -> None:
    def play(connection: socket.socket) -> None:
        take_request(connection)
        connection.sendall(reply(b"", length=10**13))
        connection.recv(1)

    with faking(play) as server, pytest.raises(TargetUnavailable, match="a reply of more than 1048576 bytes"):
        call_of(server.url)


def test_an_answer_of_no_stated_length_is_not_read() -> None:
    chunked = f"HTTP/1.1 200 OK\r\n{TENSOR_HEAD}transfer-encoding: chunked\r\n\r\n".encode()
    with faking(replying(chunked)) as server, pytest.raises(SampleCorrupt, match="of a stated length"):
        fetch_of(server.url)


def dripping(data: bytes) -> Script:
    """Sends a byte now and then, until the client has had enough."""

    def play(connection: socket.socket) -> None:
        take_request(connection)
        for byte in data:
            connection.sendall(bytes([byte]))
            if threading.Event().wait(0.03):
                return

    return play


@pytest.mark.parametrize(
    "data",
    [
        b"H" * 10_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 90,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        reply(b"x" * 1000),
    ],
)
def test_a_server_that_drips_has_one_deadline_for_all_of_it(data: bytes) -> None:
    with faking(dripping(data)) as server, pytest.raises(TargetUnavailable, match=r"nothing whole within 0\.3 s"):
        call_of(server.url, timeout_s=0.3)


def test_tensors_that_drip_have_one_deadline_and_their_memory_comes_back() -> None:
    def play(connection: socket.socket) -> None:
        take_request(connection)
        connection.sendall(reply(WHOLE[:5000], head=TENSOR_HEAD, length=len(WHOLE)))
        dripping(WHOLE[5000:])(connection)

    ring = BufferRing(1, deadline_s=0.0)
    with faking(play) as server, pytest.raises(TargetUnavailable, match="nothing whole within"):
        fetch_of(server.url, timeout_s=0.4, ring=ring)
    assert ring.held() == []


def silent(connection: socket.socket) -> None:
    take_request(connection)
    connection.recv(1)


def test_a_server_that_says_nothing_is_given_up_and_its_connection_with_it() -> None:
    with faking(silent) as server, pytest.raises(TargetUnavailable, match="nothing whole within"):
        call_of(server.url, timeout_s=0.1)


def test_a_server_that_does_not_take_the_request_is_given_up() -> None:
    done = threading.Event()

    def idle(_connection: socket.socket) -> None:
        done.wait(PATIENCE_S)

    with faking(idle) as server, client_of(server.url) as client:
        with pytest.raises(TargetUnavailable, match="nothing whole within"):
            client.call("/x", bytes(64 * MB), timeout_s=0.2)
        done.set()
