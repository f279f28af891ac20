"""A real S3 server (moto's, in a process of its own), and a proxy in front of it that fails as a test wants."""

import http.client
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import IO, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

START_DEADLINE_S = 30.0
LIST_PAGE = 50
PREFIX = "team/run"
_SIGNED = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_numbers = count(1)


class S3Server(NamedTuple):
    """`address` is host:port; buckets are made and looked into past the code under test."""

    address: str

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=10)
        try:
            connection.request(method, path, body, {"Authorization": _SIGNED})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def new_bucket(self) -> str:
        name = f"bucket-{next(_numbers)}"
        assert self.request("PUT", f"/{name}")[0] == 200
        return name

    def keys(self, bucket: str) -> list[str]:
        """All objects of the bucket (at most 1,000)."""
        return re.findall(
            r"<Key>([^<]+)</Key>", self.request("GET", f"/{bucket}?list-type=2&max-keys=1000")[1].decode()
        )

    def unfinished(self, bucket: str) -> list[str]:
        """The keys of multipart uploads that were begun and neither completed nor aborted."""
        return re.findall(r"<Key>([^<]+)</Key>", self.request("GET", f"/{bucket}?uploads")[1].decode())


@contextmanager
def running() -> Iterator[S3Server]:
    """Start a server on a free port of the loopback; it is stopped at the end in every case."""
    with tempfile.TemporaryFile() as log:
        # 0 lets the kernel choose; the server says in its log which port it got
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        variables = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(LIST_PAGE)}
        process = subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield S3Server(_address(process, log))
        finally:
            process.kill()
            process.wait(timeout=10)


def _address(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        if found := re.search(rb"Running on http://([0-9.]+:[0-9]+)", log.read()):
            return found[1].decode()
        time.sleep(0.05)
    log.seek(0)
    pytest.fail(f"the S3 server did not start: {log.read()[-2000:].decode(errors='replace')}")


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Set the library's own variables as a user would."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


class Fault(Enum):
    """What becomes of a request."""

    BUSY = "503 SlowDown"
    FULL = "507"
    DENIED = "403"
    STALL = "nothing ever comes back"
    STALL_HALFWAY = "half of the reply's body, then nothing"
    TRUNCATE = "half of the reply's body, then the connection ends"
    SHORTEN = "half of the reply's body, with a length that fits"
    CUT = "the connection ends while the request's body is read; the server never sees it"
    LOSE_REPLY = "carried out; the connection ends instead of a reply"
    FLIP = "the last byte of the reply's body is another"


class Request(NamedTuple):
    """A request, and the how manieth of its kind it is (from 1)."""

    kind: str
    key: str
    nth: int


Plan = Callable[[Request], Fault | None]


class FaultyProxy(ThreadingHTTPServer):
    """`plan` decides which requests fail; `seen` counts all by kind, `failed` those that did.

    Kinds: put, get, head, delete, list, begin (of a multipart upload), part, complete, abort.
    """

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.released = threading.Event()
        self.plan: Plan = lambda _: None
        self.seen: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def fault(self, kind: str, key: str) -> Fault | None:
        with self._lock:
            self.seen[kind] += 1
            found = self.plan(Request(kind, key, self.seen[kind]))
            self.failed[kind] += found is not None
            return found

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gives up is no error of the proxy."""


@contextmanager
def proxied(server: S3Server) -> Iterator[FaultyProxy]:
    """A proxy in front of the server."""
    with FaultyProxy(server.address) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.released.set()
            proxy.shutdown()
            thread.join(timeout=10)


def _kind(method: str, path: str) -> str:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if "uploads" in query:
        return "begin"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[method]
    return "list" if "list-type" in query else method.lower()


_REFUSALS: dict[Fault | None, tuple[int, str]] = {
    Fault.BUSY: (503, "SlowDown"),
    Fault.FULL: (507, "InsufficientStorage"),
    Fault.DENIED: (403, "AccessDenied"),
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def do_GET(self) -> None:
        with suppress(ConnectionError):
            self._serve()

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815  (the base class looks for these)

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        fault = self.server.fault(_kind(self.command, self.path), urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is Fault.CUT:
            self.rfile.read(length // 2)
            return self._end()
        body = self.rfile.read(length)
        if fault is Fault.STALL:
            return self._stall()
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            return self._answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
        return self._forward(body, fault)

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=20)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            reply = connection.getresponse()
            data, headers = reply.read(), dict(reply.getheaders())
        finally:
            connection.close()
        if fault is Fault.LOSE_REPLY:
            return self._end()
        return self._answer(reply.status, headers, data, fault)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, fault: Fault | None = None) -> None:
        if fault is Fault.FLIP:
            data = data[:-1] + bytes([data[-1] ^ 1])
        sent = data[: len(data) // 2] if fault in {Fault.TRUNCATE, Fault.SHORTEN, Fault.STALL_HALFWAY} else data
        if self.command != "HEAD":
            headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
            headers["Content-Length"] = str(len(sent if fault is Fault.SHORTEN else data))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {"connection", "transfer-encoding", "date", "server"}:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        if fault is Fault.STALL_HALFWAY:
            self._stall()
        if fault is Fault.TRUNCATE:
            self._end()

    def _stall(self) -> None:
        self.wfile.flush()
        self.server.released.wait(60)
        self._end()

    def _end(self) -> None:
        self.close_connection = True
