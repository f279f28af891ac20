"""A TCP server that speaks enough of Redis' protocol to answer as a test wants."""

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[list[bytes]], bytes | None]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while (line := self.rfile.readline()).startswith(b"*"):
            command = [self._read_part() for _ in range(int(line[1:]))]
            if command[0].upper() == b"CLIENT":
                self.wfile.write(b"+OK\r\n")
                continue
            self.server.seen.append(command)  # type: ignore[attr-defined]
            reply = self.server.answer(command)  # type: ignore[attr-defined]
            if reply is None:
                return
            self.wfile.write(reply)

    def _read_part(self) -> bytes:
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:-2]


class FakeServer(socketserver.ThreadingTCPServer):
    """`seen` are the commands that came; `answer` gives a raw reply, or None to hang up."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.seen = answer, list[list[bytes]]()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}"

    def names(self) -> list[str]:
        return [command[0].decode() for command in self.seen]


@contextmanager
def fake_server(answer: Answer) -> Iterator[FakeServer]:
    with FakeServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def info(**fields: str) -> bytes:
    healthy = {"redis_version": "8.2.2", "role": "master", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
    return bulk("\r\n".join(f"{name}:{value}" for name, value in {**healthy, **fields}.items()).encode())
