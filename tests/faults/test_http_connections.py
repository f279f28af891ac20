"""Connections that are kept, replaced, ended from another thread, and secured."""

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from eaglefeed.errors import (
    TargetUnavailable,
)
from eaglefeed.storage import serving as serving_module
from eaglefeed.storage.control import Abort, ControlClient
from http_sides import (
    PATIENCE_S,
    App,
    Script,
    client_of,
    faking,
    reply,
    replying,
    reset_at_close,
    serving,
    take_request,
)

MB = 2**20


def call(client: ControlClient, path: str = "/echo", body: bytes = b"hi") -> bytes:
    return client.call(path, body, timeout_s=PATIENCE_S).body


def call_of(url: str, *, timeout_s: float = PATIENCE_S, abort: Abort | None = None) -> bytes:
    with client_of(url) as client:
        return client.call("/x", timeout_s=timeout_s, abort=abort).body


def test_a_connection_that_the_server_closed_meanwhile_is_replaced_in_silence() -> None:
    with faking(replying(reply(b"one")), replying(reply(b"two"))) as server, client_of(server.url) as client:
        assert (call(client, body=b""), call(client, body=b"")) == (b"one", b"two")
        assert server.num_connections == 2


def hanging_up_on(number: int, said: bytes = b"") -> Script:
    """Replies to `number` - 1 requests; takes the next one, says so much, and hangs up."""

    def play(connection: socket.socket) -> None:
        for _ in range(number - 1):
            take_request(connection)
            connection.sendall(reply(b"kept"))
        take_request(connection)
        connection.sendall(said)

    return play


def test_a_connection_that_the_server_closes_on_the_request_is_replaced_once() -> None:
    with faking(hanging_up_on(2), replying(reply(b"new"))) as server, client_of(server.url) as client:
        assert (call(client, body=b""), call(client, body=b"")) == (b"kept", b"new")


def test_a_new_connection_that_is_closed_too_is_an_error() -> None:
    never = replying(reply(b"never asked"))
    with faking(hanging_up_on(2), hanging_up_on(1), never) as server, client_of(server.url) as client:
        call(client, body=b"")
        with pytest.raises(TargetUnavailable, match="hung up"):
            call(client, body=b"")
        assert server.num_connections == 2


def test_nothing_is_sent_twice_once_a_byte_of_the_reply_has_come() -> None:
    def play(connection: socket.socket) -> None:
        replying(reply(b"kept"))(connection)
        take_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        threading.Event().wait(0.1)
        reset_at_close(connection)

    with faking(play, replying(reply(b"never"))) as server, client_of(server.url) as client:
        call(client, body=b"")
        with pytest.raises(TargetUnavailable):
            call(client, body=b"")
        assert server.num_connections == 1


def leaving(said: bytes) -> Script:
    """Sends so much after a request, and takes no other on this connection."""

    def play(connection: socket.socket) -> None:
        take_request(connection)
        connection.sendall(said)
        assert connection.recv(1) == b""

    return play


def test_what_a_server_sends_unasked_is_never_taken_for_an_answer() -> None:
    has_mine, is_sent = threading.Event(), threading.Event()

    def play(connection: socket.socket) -> None:
        replying(reply(b"mine"))(connection)
        has_mine.wait(PATIENCE_S)
        connection.sendall(reply(b"somebody else's"))
        is_sent.set()
        assert connection.recv(1) == b""

    with faking(play, replying(reply(b"mine again"))) as server, client_of(server.url) as client:
        assert call(client, body=b"") == b"mine"
        has_mine.set()
        assert is_sent.wait(PATIENCE_S)
        assert call(client, body=b"") == b"mine again"


def test_a_reply_that_was_not_read_to_its_end_leaves_its_connection_to_nobody() -> None:
    begun = leaving(reply(b"x" * 10, length=100))
    with faking(begun, replying(reply(b"new"))) as server, client_of(server.url) as client:
        with client.open("/x", timeout_s=PATIENCE_S) as incoming:
            incoming.readinto(bytearray(10))
        assert call(client, body=b"") == b"new"


def test_a_connection_that_the_server_means_to_close_is_left() -> None:
    last = leaving(reply(b"last", head="connection: close\r\n"))
    with faking(last, replying(reply(b"new"))) as server, client_of(server.url) as client:
        assert (call(client, body=b""), call(client, body=b"")) == (b"last", b"new")


def test_a_server_that_restarts_is_found_again_by_every_kept_connection() -> None:
    with serving(App()) as first, client_of(first.url) as client:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: call(client), range(50)))
        first.stop()
        second = serving_module.HttpServer(App())
        second.start("127.0.0.1", first.port)
        assert [call(client) for _ in range(8)] == [b"hi"] * 8
        second.stop()


def test_a_proxy_in_the_environment_never_sees_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with faking() as proxy, serving(App()) as server, client_of(server.url) as client:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert call(client) == b"hi"
        assert proxy.num_connections == 0


def aborting(when: threading.Event, abort: Abort) -> threading.Thread:
    def run() -> None:
        when.wait(PATIENCE_S)
        abort.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", reply(b"x" * 10, length=1000)])
def test_an_exchange_is_ended_from_another_thread_whatever_it_waits_for(said: bytes) -> None:
    waiting, abort = threading.Event(), Abort()

    def play(connection: socket.socket) -> None:
        take_request(connection)
        connection.sendall(said)
        waiting.set()
        assert connection.recv(1) == b""  # the client hangs up

    thread = aborting(waiting, abort)
    with faking(play) as server, pytest.raises(TargetUnavailable, match="aborted"):
        call_of(server.url, abort=abort)
    thread.join()


def test_an_exchange_that_was_ended_is_not_tried_again_over_another_connection() -> None:
    waiting, abort = threading.Event(), Abort()

    def play(connection: socket.socket) -> None:
        replying(reply(b"kept"))(connection)
        take_request(connection)
        waiting.set()
        connection.recv(1)

    thread = aborting(waiting, abort)
    with faking(play, replying(reply(b"never"))) as server, client_of(server.url) as client:
        call(client, body=b"")
        with pytest.raises(TargetUnavailable, match="aborted"):
            client.call("/x", timeout_s=PATIENCE_S, abort=abort)
        assert server.num_connections == 1
    thread.join()


def test_an_exchange_is_ended_while_it_sends() -> None:
    waiting, done, abort = threading.Event(), threading.Event(), Abort()

    def play(connection: socket.socket) -> None:
        connection.recv(1)
        waiting.set()
        done.wait(PATIENCE_S)

    thread = aborting(waiting, abort)
    with faking(play) as server, client_of(server.url) as client:
        with pytest.raises(TargetUnavailable, match="aborted"):
            client.call("/x", bytes(64 * MB), timeout_s=PATIENCE_S, abort=abort)
        done.set()
    thread.join()


def test_an_exchange_that_was_ended_before_it_began_sends_nothing() -> None:
    app, abort = App(), Abort()
    abort.set()
    with serving(app) as server, pytest.raises(TargetUnavailable, match="aborted"), client_of(server.url) as client:
        client.call("/echo", timeout_s=PATIENCE_S, abort=abort)
    assert not app.arrived.is_set()


def test_ending_an_exchange_that_is_over_ends_no_other() -> None:
    abort = Abort()
    with serving(App()) as server, client_of(server.url) as client:
        port = client.call("/port", timeout_s=PATIENCE_S, abort=abort).body
        abort.set()
        assert client.call("/port", timeout_s=PATIENCE_S).body == port


def tls_server(certificate: trustme.LeafCert, play: Script) -> Script:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)

    def secured(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.settimeout(PATIENCE_S)
            play(wrapped)

    return secured


@pytest.fixture
def authority(monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """An authority that this process trusts."""
    ca = trustme.CA()
    default = ssl.create_default_context

    def trusting() -> ssl.SSLContext:
        context = default()
        ca.configure_trust(context)
        return context

    monkeypatch.setattr(ssl, "create_default_context", trusting)
    return ca


def secure(url: str, host: str = "127.0.0.1") -> str:
    return url.replace("http://127.0.0.1", f"https://{host}")


def test_https_is_spoken_and_its_connection_kept(authority: trustme.CA) -> None:
    play = tls_server(authority.issue_cert("127.0.0.1"), replying(reply(b"one"), reply(b"two")))
    with faking(play) as server, client_of(secure(server.url)) as client:
        assert (call(client, body=b""), call(client, body=b"")) == (b"one", b"two")
        assert server.num_connections == 1


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_certificate_of_another_host_or_authority_is_refused(authority: trustme.CA, *, is_trusted: bool) -> None:
    leaf = authority.issue_cert("other.example") if is_trusted else trustme.CA().issue_cert("127.0.0.1")
    with (
        faking(tls_server(leaf, replying(reply(b"never")))) as server,
        pytest.raises(TargetUnavailable, match="certificate"),
    ):
        call_of(secure(server.url))


def test_an_https_exchange_is_ended_from_another_thread(authority: trustme.CA) -> None:
    waiting, abort = threading.Event(), Abort()

    def play(connection: socket.socket) -> None:
        take_request(connection)
        waiting.set()
        connection.recv(1)

    thread = aborting(waiting, abort)
    secured = tls_server(authority.issue_cert("127.0.0.1"), play)
    with faking(secured) as server, pytest.raises(TargetUnavailable, match="aborted"):
        call_of(secure(server.url), abort=abort)
    thread.join()


def test_https_asked_of_a_plain_server_is_an_error() -> None:
    def play(connection: socket.socket) -> None:
        connection.recv(1)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with faking(play) as server, pytest.raises(TargetUnavailable, match="SSL"):
        call_of(secure(server.url))
