"""One HTTP/1.1 connection of a client whose every wait holds to the deadline of the exchange under way."""

import contextlib
import io
import select
import socket
import ssl
import threading
from http.client import HTTPResponse
from typing import cast

from eaglefeed.clock import Clock

__all__ = ["Abort", "Body", "Connection", "Deadline"]

Body = bytes | bytearray | memoryview
_CONNECT_S = 10.0


class Deadline:
    """When an exchange must be over.

    Args:
        clock: measures it.
        timeout_s: from now on.
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock, self._at = clock, clock.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds until then.

        Raises:
            TimeoutError: none.
        """
        if (left := self._at - self._clock.monotonic()) <= 0:
            raise TimeoutError
        return left


class Abort:
    """Ends the exchange that it was given to, from another thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def set(self) -> None:
        """End it now, whatever it waits for; a connection being made is given up once it stands, within 10 s."""
        with self._lock:
            self.is_set = True
            self._shut()

    def watch(self, sock: socket.socket | None) -> None:
        """Answer for this socket from now on; for none at the end of its exchange."""
        with self._lock:
            self._socket = sock
            if self.is_set:
                self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the other side was faster
                # Not SSLSocket's own: that changes what the thread that reads is looking at.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Connection:
    """A socket, sent to and read from until the deadline of its exchange; connecting takes 10 s an address at most.

    Args:
        address: host and port.
        tls: for https.
        deadline: of the first exchange.

    Raises:
        OSError: nobody answers there.
    """

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        self.deadline, self.num_received = deadline, 0
        self.socket = socket.create_connection(address, timeout=min(_CONNECT_S, deadline.left()))
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self.socket.settimeout(deadline.left())
                self.socket = tls.wrap_socket(self.socket, server_hostname=address[0])
        except BaseException:
            self.socket.close()
            raise

    def reuse(self, deadline: Deadline) -> bool:
        """Begin another exchange; False if the server hung up meanwhile, or sent what nobody asked for."""
        self.deadline, self.num_received = deadline, 0
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, method: str, head: bytes, body: Body) -> HTTPResponse:
        """Send a request; its reply, read up to the body.

        Raises:
            OSError: the connection broke, or the deadline has passed.
            http.client.HTTPException: what came is no reply.
        """
        broken = self._send(head, body)
        response = HTTPResponse(cast("socket.socket", self), method=method)
        try:
            response.begin()
        except BaseException as error:
            response.close()
            if broken is not None and isinstance(error, ConnectionError):
                raise broken from None
            raise
        return response

    def _send(self, head: bytes, body: Body) -> OSError | None:
        """Send it; the error if the server has hung up, for it may have said why before it did."""
        try:
            for data in (head, body):
                self.socket.settimeout(self.deadline.left())
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            return error
        return None

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What HTTPResponse reads from; closing it leaves the connection open."""
        return io.BufferedReader(_Reader(self))

    def receive(self, memory: memoryview) -> int:
        """Read what has come, at least a byte; 0 at the end."""
        self.socket.settimeout(self.deadline.left())
        got = self.socket.recv_into(memory)
        self.num_received += got
        return got

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class _Reader(io.RawIOBase):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, memory: memoryview) -> int:  # type: ignore[override] # all that BufferedReader passes
        return self._connection.receive(memory)
