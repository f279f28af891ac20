"""The client of what listens: calls, and answers whose tensors are read straight into memory that is used again.

http.client underneath, so that no proxy variable is ever looked at: tensors go to the address that was given.
"""

import os
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import NamedTuple

from torch import Tensor

from eaglefeed.access import bearer
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, EaglefeedError, TargetUnavailable
from eaglefeed.schema.protocol import TIMEOUT_HEADER, error_of
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.reading import Cut, Incoming, tensors_of
from eaglefeed.storage.wire import Abort, Body, Connection, Deadline

__all__ = ["Abort", "ControlClient", "Fetched", "Incoming", "Refused", "Reply"]

_ADDRESS = re.compile(r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/?#@]+):(?P<port>\d{1,5})/?")
_MAX_REFUSAL_BYTES = 64 * 1024
_FIX = "check the address, and that the server runs and can be reached from here"


class Refused(Exception):
    """A reply that is no success.

    Args:
        status: the HTTP status.
        error: what the server said, to be raised by whoever does not know better.
    """

    def __init__(self, status: int, error: EaglefeedError) -> None:
        super().__init__(status, str(error))
        self.status, self.error = status, error


class Reply(NamedTuple):
    """A whole reply; the headers' names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Fetched(NamedTuple):
    """An answer's tensors, and the metadata of the file that they came in."""

    headers: Mapping[str, str]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


class ControlClient:
    """Talks to one server; any number of threads may share it, and a process that was forked has its own connections.

    Args:
        url: http(s)://host:port; an IPv6 address in brackets.
        token: the server's, if it has one.
        unavailable: what to raise when no whole answer comes.
        max_idle: connections kept for later.
        clock: measures the deadlines.

    Raises:
        ConfigError: no such address, or an unusable token.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        unavailable: type[EaglefeedError] = TargetUnavailable,
        max_idle: int = 8,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        scheme, self._address, self._host = _parsed(url)
        self.url = f"{scheme}://{self._host}"
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._authorization = {"authorization": bearer(token)} if token else {}
        self._unavailable, self._max_idle, self._clock = unavailable, max_idle, clock
        self._is_closed = False
        self._begin_pool()

    def _begin_pool(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._idle: list[Connection] = []

    def call(
        self,
        path: str,
        body: Body = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        max_bytes: int = 2**20,
        abort: Abort | None = None,
    ) -> Reply:
        """Send a request and read its whole reply.

        Args:
            path: with its slash.
            body: the request's.
            method: GET, POST or DELETE.
            headers: besides host, length, token and timeout.
            timeout_s: for all of it.
            max_bytes: of the reply's body.
            abort: ends it from another thread.

        Raises:
            Refused: the server says no.
            EaglefeedError: of the class `unavailable`: no whole answer came, or too long a one.
        """
        request = self.open(path, body, method=method, headers=headers, timeout_s=timeout_s, abort=abort)
        with request as incoming:
            return Reply(incoming.status, incoming.headers, incoming.read(max_bytes))

    def fetch(
        self,
        path: str,
        body: Body = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        ring: BufferRing | None = None,
        subject: str,
        max_bytes: int,
        abort: Abort | None = None,
    ) -> Fetched:
        """Send a request and read the tensors of its answer; see `call` and `tensors_of`."""
        request = self.open(path, body, method=method, headers=headers, timeout_s=timeout_s, abort=abort)
        with request as incoming:
            return Fetched(incoming.headers, *tensors_of(incoming, ring=ring, subject=subject, max_bytes=max_bytes))

    @contextmanager
    def open(
        self,
        path: str,
        body: Body = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        abort: Abort | None = None,
    ) -> Iterator[Incoming]:
        """Send a request; its reply, whose body is read in the block, within the same deadline; see `call`."""
        abort = abort or Abort()
        translated = partial(self._translated, path, timeout_s, abort)
        head = self._head(method, path, memoryview(body).nbytes, timeout_s, headers or {})
        try:
            connection, response = self._begin(Deadline(self._clock, timeout_s), method, head, body, abort)
        except (OSError, HTTPException) as error:
            raise translated(error) from None
        try:
            incoming = Incoming(response, translated)
            if not 200 <= response.status < 300:
                said = incoming.first(_MAX_REFUSAL_BYTES)
                raise Refused(response.status, error_of(response.status, said, self.url))
            yield incoming
        finally:
            abort.watch(None)
            self._settle(connection, response)

    def close(self) -> None:
        """Hang up where nothing is under way; exchanges under way end as they would, and hang up then."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for connection in idle:
            connection.close()

    def _head(self, method: str, path: str, num_bytes: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        own = {"host": self._host, "content-length": str(num_bytes), TIMEOUT_HEADER: f"{timeout_s:.3f}"}
        lines = {**own, **self._authorization, **headers}
        texts = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
        return "\r\n".join([*texts, "", ""]).encode("latin-1")

    def _begin(
        self, deadline: Deadline, method: str, head: bytes, body: Body, abort: Abort
    ) -> tuple[Connection, HTTPResponse]:
        """Send a request, again over a new connection if the server was just closing the kept one."""
        connection = self._kept(deadline)
        if connection is not None:
            with suppress(_HungUp):
                return connection, _exchange(connection, method, head, body, abort)
        connection = Connection(self._address, self._tls, deadline)
        return connection, _exchange(connection, method, head, body, abort)

    def _kept(self, deadline: Deadline) -> Connection | None:
        if os.getpid() != self._pid:
            self._begin_pool()  # the others are the parent's, whose lock another thread may have held
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.reuse(deadline):
                return connection
            connection.close()

    def _settle(self, connection: Connection, response: HTTPResponse) -> None:
        is_whole = response.isclosed() or response.length == 0
        response.close()
        with self._lock:
            if is_whole and not response.will_close and not self._is_closed and len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.close()

    def _translated(self, path: str, timeout_s: float, abort: Abort, error: OSError | HTTPException) -> EaglefeedError:
        # Or whoever keeps the error would keep the memory that was being read into.
        error.__traceback__ = None
        reason = "aborted" if abort.is_set else _reason(error, timeout_s)
        return self._unavailable(f"no answer to {path} ({reason})", subject=self.url, fix=_FIX)


class _HungUp(ConnectionError):
    """The connection ended before a byte of the reply."""


def _exchange(connection: Connection, method: str, head: bytes, body: Body, abort: Abort) -> HTTPResponse:
    try:
        abort.watch(connection.socket)
        return connection.exchange(method, head, body)
    except BaseException as error:
        abort.watch(None)
        connection.close()
        if isinstance(error, ConnectionError) and not connection.num_received and not abort.is_set:
            raise _HungUp("hung up without an answer") from None
        raise


def _reason(error: OSError | HTTPException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing whole within {timeout_s:g} s"
    text = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return text[:200] if isinstance(error, OSError | Cut) else f"{type(error).__name__}: {text[:200]}"


def _parsed(url: str) -> tuple[str, tuple[str, int], str]:
    """Scheme, host and port, and how the host header has them."""
    match = _ADDRESS.fullmatch(url)
    with suppress(UnicodeError):  # no name that could be looked up
        if match and 0 < (port := int(match["port"])) < 2**16:
            host = match["host"].strip("[]").lower().encode("idna").decode()
            return match["scheme"], (host, port), f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    shown, wanted = re.split("[?#]", url.rpartition("@")[2])[0], "http://host:port or https://host:port"
    got, fix = _in_the_way(url)
    raise ConfigError("no address of a server", subject=shown, wanted=wanted, got=got, fix=fix)


def _in_the_way(url: str) -> tuple[str | None, str]:
    """What an address has beyond scheme, host and port, in words that repeat none of it; and what to do about it."""
    authority, *rest = re.split("[/?#]", url.partition("://")[2], maxsplit=1)
    if "@" in authority:
        return "a user or a password before the host", "leave them out; the server's token is an option of its own"
    if rest and rest[0]:
        return "a path or a query behind the port", "leave it out; a server has the root of its port to itself"
    return None, "correct the address"
