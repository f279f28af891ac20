"""Two sides for tests of HTTP: servers of ours, and servers that send what a test wants, byte by byte."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from torch import Tensor

from eaglefeed.storage.control import ControlClient
from eaglefeed.storage.serving import HttpServer, TensorReply, read_body
from eaglefeed.storage.shard import TensorWriter, encode_tensors

MAX_REQUEST_BYTES = 1000
PATIENCE_S = 20.0
Script = Callable[[socket.socket], None]


def tensors(rows: int = 3) -> dict[str, Tensor]:
    """Several dtypes and sizes, one of them empty, and more than one piece of a body where rows are many."""
    wide = torch.arange(rows * 1000, dtype=torch.float32).reshape(rows, 1000)
    return {
        "wide": wide,
        "half": wide.to(torch.bfloat16)[:, ::3],
        "ids": torch.arange(rows) - 1,
        "mask": torch.arange(rows) % 2 == 0,
        "none": torch.empty(0, 5),
    }


def hashed(tensors: dict[str, Tensor], metadata: dict[str, str]) -> TensorWriter:
    writer = TensorWriter(tensors, metadata)
    for _ in writer.chunks():
        pass
    return writer


def body_of(tensors: dict[str, Tensor]) -> bytes:
    """A reply's whole body."""
    return bytes(encode_tensors(TensorWriter(tensors, {})))


class App(Router):
    """/echo sends a body back, /tensors sends tensors, /health lives, /port tells the client's port."""

    def __init__(self, sent: dict[str, Tensor] | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        self.sent, self.timeout_s = tensors() if sent is None else sent, timeout_s
        self.arrived, self.go = threading.Event(), threading.Event()
        self.num_echoed = 0
        paths = {"/echo": self._echo, "/tensors": self._tensors, "/health": self._health, "/port": self._port}
        super().__init__([Route(path, endpoint, methods=["GET", "POST"]) for path, endpoint in paths.items()])

    async def _echo(self, request: Request) -> Response:
        self.arrived.set()
        body = await read_body(request, MAX_REQUEST_BYTES)
        self.num_echoed += 1
        return Response(bytes(body))

    async def _tensors(self, request: Request) -> Response:
        body = bytes(await read_body(request, MAX_REQUEST_BYTES)).decode()
        return TensorReply(hashed(self.sent, {"request": body}), {"x-said": body}, self.timeout_s)

    async def _health(self, _request: Request) -> Response:
        return Response("alive")

    async def _port(self, request: Request) -> Response:
        assert request.client is not None
        return Response(str(request.client.port))


@contextmanager
def serving(
    app: Router, *, token: str = "", host: str = "127.0.0.1", max_connections: int = 4096
) -> Iterator[HttpServer]:
    server = HttpServer(app, token=token, max_connections=max_connections)
    server.start(host, 0)
    try:
        yield server
    finally:
        server.stop(0.0)


@contextmanager
def client_of(url: str, token: str = "") -> Iterator[ControlClient]:
    client = ControlClient(url, token=token)
    try:
        yield client
    finally:
        client.close()


class FakeServer:
    """Plays one script a connection, in order, and hangs up at its end; `num_connections` were made."""

    def __init__(self, *scripts: Script) -> None:
        self.num_connections, self.requests = 0, list[bytes]()
        self._scripts, self._listener = scripts, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._play)
        self._thread.start()

    def _play(self) -> None:
        for script in self._scripts:
            with suppress(OSError):
                connection = self._listener.accept()[0]
                self.num_connections += 1
                with connection:
                    connection.settimeout(PATIENCE_S)
                    script(connection)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or accept would wait on
        self._listener.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def faking(*scripts: Script) -> Iterator[FakeServer]:
    server = FakeServer(*scripts)
    try:
        yield server
    finally:
        server.close()


def take_request(connection: socket.socket) -> bytes:
    """Read a request without a body; b"" if the client hung up."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        got = connection.recv(65536)
        if not got:
            return b""
        data += got
    return data


def replying(*parts: bytes) -> Script:
    """Sends one part after each request, then hangs up."""

    def play(connection: socket.socket) -> None:
        for part in parts:
            take_request(connection)
            connection.sendall(part)

    return play


def reply(body: bytes, *, head: str = "", length: int | None = None) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body) if length is None else length}\r\n{head}\r\n".encode() + body


def reset_at_close(connection: socket.socket) -> None:
    """Have the other side see a reset, not an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connected(server: HttpServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), PATIENCE_S)


def raw_exchange(server: HttpServer, data: bytes) -> bytes:
    """Send bytes and read until the server hangs up."""
    with connected(server) as connection:
        connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side hangs up or resets."""
    data = b""
    with suppress(ConnectionResetError):
        while got := connection.recv(65536):
            data += got
    return data
