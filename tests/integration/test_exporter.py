"""Where a process shows its metrics: who is let in, and what a client may hold of it."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
import structlog

from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError
from eaglefeed.ops.exporter import Exporter, exporting

TOKEN = "a-token-of-the-test's-own"
TEXT = b"eaglefeed_test 1.0\n"


def ask(exporter: Exporter, path: str = "/metrics", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(exporter.url).netloc, timeout=10)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


@contextmanager
def shown(text: Callable[[], bytes] = lambda: TEXT, **options: object) -> Iterator[Exporter]:
    with exporting(text, **{"host": "127.0.0.1", "port": 0, **options}) as exporter:  # type: ignore[arg-type]
        yield exporter


def opened(exporter: Exporter, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", exporter.server_port), timeout=10)
    client.sendall(sent)
    return client


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_metrics_and_health_are_shown_on_a_free_port_that_is_logged() -> None:
    with structlog.testing.capture_logs() as logs, shown() as exporter:
        assert ask(exporter) == ask(exporter, "/metrics?x=1") == (200, TEXT)
        assert ask(exporter, "/health") == (200, b"alive\n")
        assert ask(exporter, "/")[0] == ask(exporter, "/metrics/")[0] == 404
        assert logs == [{"event": "metrics_are_shown", "url": f"{exporter.url}/metrics", "log_level": "info"}]
        assert exporter.server_port > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_nothing_listens_beyond_loopback_without_a_token(host: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"beyond this machine without a token; set access.token_file"),
        shown(host=host),
    ):
        pass


def test_beyond_loopback_metrics_ask_for_the_token_and_health_does_not() -> None:
    with shown(host="0.0.0.0", token=TOKEN) as exporter:
        assert ask(exporter, Authorization=f"Bearer {TOKEN}") == (200, TEXT)
        for wrong in ("", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"bearer {TOKEN}", "Bearer \u00e9"):
            status, said = ask(exporter, Authorization=wrong)
            assert (status, TOKEN.encode() in said) == (401, False), wrong
        assert ask(exporter)[0] == 401
        assert ask(exporter, "/health") == (200, b"alive\n")


def test_a_connection_that_finds_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with structlog.testing.capture_logs() as logs, shown() as exporter:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with opened(exporter) as client:
                assert is_cut(client)
        assert exporter.num_open == 0
        assert ask(exporter) == (200, TEXT)
    assert [line["reason"] for line in logs if line["event"] == "metrics_failed"] == ["RuntimeError"]


def test_an_address_in_use_is_told_with_its_fix() -> None:
    with shown() as exporter:
        fix = r"cannot listen.*in use.*metrics\.port"
        with pytest.raises(ConfigError, match=fix), shown(port=exporter.server_port):
            pass
    with pytest.raises(ConfigError, match="cannot listen"), shown(host="192.0.2.1", token=TOKEN):
        pass


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b" 414 "),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", b" 431 "),
        (b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n", b" 431 "),
        (b"POST /metrics HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b" 501 "),
    ],
    ids=["line", "header", "headers", "method"],
)
def test_a_request_beyond_the_bounds_is_refused(request_bytes: bytes, status: bytes) -> None:
    with shown() as exporter:
        with opened(exporter, request_bytes) as client:
            assert status in client.recv(64)
        assert ask(exporter)[0] == 200


def test_clients_that_hold_every_connection_are_cut_after_a_while_and_others_not_served_before() -> None:
    clock = ManualClock()
    with Exporter(lambda: TEXT, host="127.0.0.1", port=0, clock=clock) as exporter, ExitStack() as stack:
        thread = threading.Thread(target=exporter.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(exporter.shutdown)
        slow = [stack.enter_context(opened(exporter, b"GET /metrics HT")) for _ in range(16)]
        with opened(exporter, b"GET /metrics HTTP/1.0\r\n\r\n") as one_more:
            assert is_cut(one_more)
        clock.advance(16.0)
        assert all(map(is_cut, slow))
        end_s = time.monotonic() + 10
        while exporter.num_open and time.monotonic() < end_s:
            time.sleep(0.01)
        assert ask(exporter) == (200, TEXT)


def test_what_cannot_be_collected_is_logged_without_its_text_and_the_next_scrape_is_answered() -> None:
    failing = [True]

    def text() -> bytes:
        if failing.pop() if failing else False:
            raise RuntimeError("secret")
        return TEXT

    with structlog.testing.capture_logs() as logs, shown(text) as exporter:
        with pytest.raises(http.client.RemoteDisconnected):
            ask(exporter)
        assert ask(exporter) == (200, TEXT)
    assert [(line["event"], line.get("reason")) for line in logs][1:] == [("metrics_failed", "RuntimeError")]
    assert "secret" not in str(logs)
