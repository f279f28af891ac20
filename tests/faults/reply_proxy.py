"""A proxy between client and server that loses replies, requests, or the server itself, as a test wants."""

import re
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

from eaglefeed.queue.scripts import SHARED, load


class Loss(Enum):
    """What becomes of a request."""

    REPLY = "carried out; its reply is dropped and the connection cut"
    REQUEST = "the connection is cut before the server gets it"
    SILENCE = "carried out; nothing ever comes back and the connection stays open"


class Request(NamedTuple):
    """A script's or command's name, the run it is for, and the how manieth of that name and of all it is."""

    name: str
    run: str
    nth: int
    total: int

    @property
    def is_script(self) -> bool:
        return self.name.islower()


Plan = Callable[[Request], Loss | None]


class ReplyProxy(socketserver.ThreadingUnixStreamServer):
    """`plan` decides what is lost, `lost` names it in order, and `after_loss` runs before the client notices.

    `upstream` is the server's socket; another one takes new connections to another server.
    """

    def __init__(self, path: Path, upstream: Path) -> None:
        super().__init__(str(path), _Handler)
        self.upstream = upstream
        self.url = f"unix://{quote(str(path))}"
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.plan: Plan = lambda _: None
        self.after_loss: Callable[[Request], None] = lambda _: None
        self.lost: list[str] = []
        self.seen: list[Request] = []
        self._counts = Counter[str]()

    def judge(self, raw: bytes) -> tuple[Request, Loss | None]:
        name = _name_of(raw)
        run = re.search(rb"eaglefeed:\{(.+?)\}", raw)
        with self._lock:
            self._counts.update([name, ""])
            request = Request(name, run[1].decode() if run else "", self._counts[name], self._counts[""])
            loss = self.plan(request)
            self.seen.append(request)
            self.lost += [name] if loss else []
        return request, loss


class _Handler(socketserver.StreamRequestHandler):
    server: ReplyProxy

    def handle(self) -> None:
        self.server.connections.add(self.connection)
        try:
            with socket.socket(socket.AF_UNIX) as upstream:
                upstream.connect(str(self.server.upstream))
                with upstream.makefile("rb") as replies:
                    while self._serve_one(upstream, replies):
                        pass
        except (OSError, EOFError):
            pass

    def _serve_one(self, upstream: socket.socket, replies: BinaryIO) -> bool:
        """Pass one request on; False ends the connection."""
        raw = _read_message(self.rfile)
        if _words(raw)[0] == b"CLIENT":
            request, loss = None, None
        else:
            request, loss = self.server.judge(raw)
        if loss is not Loss.REQUEST:
            upstream.sendall(raw)
            reply = _read_message(replies)
        if request and loss:
            self.server.after_loss(request)
            if loss is Loss.SILENCE:
                self.rfile.read()
            return False
        self.wfile.write(reply)
        return True


def _read_message(stream: Any) -> bytes:
    """One whole message of the protocol, as it came."""
    line: bytes = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    kind, size = line[:1], line[1:-2]
    if kind == b"$" and size != b"-1":
        body: bytes = stream.read(int(size) + 2)
        if len(body) != int(size) + 2:
            raise EOFError
        return line + body
    if kind == b"*":
        return line + b"".join(_read_message(stream) for _ in range(int(size)))
    return line


def _words(raw: bytes) -> list[bytes]:
    """A command's first words."""
    return raw.split(b"\r\n", 5)[2:5:2]


@cache
def _scripts() -> dict[bytes, str]:
    names = [Path(str(file)).stem for file in (files("eaglefeed.queue") / "lua").iterdir()]
    loaded = [(name, load(name)) for name in names if name not in SHARED]
    return {key: name for name, script in loaded for key in (script.sha.encode(), script.text.encode())}


def _name_of(raw: bytes) -> str:
    command, *rest = _words(raw)
    name = command.decode().upper()
    return _scripts()[rest[0]] if name in {"EVAL", "EVALSHA"} else name


@contextmanager
def reply_proxy(path: Path, upstream: Path) -> Iterator[ReplyProxy]:
    """A proxy that listens on the socket `path`; its end cuts its clients off."""
    with ReplyProxy(path, upstream) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
            for connection in proxy.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
