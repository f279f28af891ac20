"""Where a process shows its metrics: a small HTTP server in a thread, with bounds on what a client may hold of it."""

import hmac
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from eaglefeed.access import bearer, check_listen
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError
from eaglefeed.logs import get_logger

__all__ = ["HEALTH", "METRICS_PATH", "Exporter", "exporting"]

HEALTH, METRICS_PATH = "/health", "/metrics"
_MAX_CONNECTIONS = 16
_MAX_TIME_S = 15.0
"""A connection is cut after it, whatever it is doing; Prometheus by default waits 10 s."""
_LOOK_S = 0.2

log = get_logger(__name__)


class Exporter(HTTPServer):
    """Answers GET /metrics to whoever has the token, and GET /health to everybody.

    Args:
        text: makes the metrics, in any thread.
        host: where it listens.
        port: 0 for a free one.
        token: what /metrics asks for; "" for none.
        clock: measures how long a connection lasts.

    Raises:
        ConfigError: beyond this machine without a token, an unusable one, or it cannot listen there.
    """

    request_queue_size = 64
    allow_reuse_address = True

    def __init__(
        self, text: Callable[[], bytes], *, host: str, port: int, token: str = "", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        check_listen(host, token)
        self._clock, self._open = clock, dict[socket.socket, float]()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        wanted = bearer(token).encode() if token else b""
        try:
            super().__init__((host, port), partial(_Answer, text, wanted))
        except (OSError, OverflowError, UnicodeError) as error:
            fix = "stop what listens there, or set another metrics.host or metrics.port (0 takes a free one)"
            got = getattr(error, "strerror", None) or str(error)
            raise ConfigError("cannot listen", subject=f"{host} port {port}", got=got, fix=fix) from None

    def server_bind(self) -> None:
        """Bind, without the look-up of the host's name that http.server makes."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server_name, self.server_name)  # noqa: S104 - compared
        return f"http://[{host}]:{self.server_port}" if ":" in host else f"http://{host}:{self.server_port}"

    @property
    def num_open(self) -> int:
        """Connections that are answered now."""
        return len(self._open)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or not at all where too many are answered."""
        if self.num_open >= _MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        thread = threading.Thread(target=self._answer, args=(request, client_address), name="metrics", daemon=True)
        self._open[request] = self._clock.monotonic()
        try:
            thread.start()
        except RuntimeError:  # there are too many threads; the caller tells and cuts it
            self._open.pop(request, None)
            raise

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # cut, or the client has gone
        except Exception:  # noqa: BLE001 - a scrape must not end what is scraped
            self.handle_error(request, client_address)
        finally:
            self._open.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Called by serve_forever every _LOOK_S: cut what takes too long."""
        now_s = self._clock.monotonic()
        for request, since_s in list(self._open.items()):
            if now_s - since_s > _MAX_TIME_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the signature is socketserver's
        """Log what went wrong, by its class: the text may hold anything."""
        log.error("metrics_failed", reason=getattr(sys.exc_info()[0], "__name__", ""))


class _Answer(BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so that the connection ends with it."""

    timeout = _MAX_TIME_S
    server_version, sys_version = "eaglefeed", ""

    def __init__(self, text: Callable[[], bytes], wanted: bytes, *args: Any) -> None:
        self._text, self._wanted = text, wanted
        super().__init__(*args)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == HEALTH:
            self._send(200, b"alive\n")
        elif path != METRICS_PATH:
            self._send(404, b"try /metrics\n")
        elif self._wanted and not self._is_let_in():
            self._send(401, b"wrong or missing token: authorization: Bearer ... (access.token_file)\n")
        else:
            self._send(200, self._text(), CONTENT_TYPE_PLAIN_0_0_4)

    def _is_let_in(self) -> bool:
        given = self.headers.get("authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, self._wanted)

    def _send(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("www-authenticate", "Bearer")
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """No access log."""


@contextmanager
def exporting(text: Callable[[], bytes], *, host: str, port: int, token: str = "") -> Iterator[Exporter]:
    """An Exporter that serves meanwhile; its address is logged, for it may be one that was free.

    Raises:
        ConfigError: as Exporter.
    """
    with Exporter(text, host=host, port=port, token=token) as exporter:
        thread = threading.Thread(target=exporter.serve_forever, args=(_LOOK_S,), name="metrics-server", daemon=True)
        thread.start()
        log.info("metrics_are_shown", url=exporter.url + METRICS_PATH)
        try:
            yield exporter
        finally:
            exporter.shutdown()
            thread.join()
