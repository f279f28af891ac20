"""A target server of a test's own: answers as a real one would, until the test says what goes wrong.

Its answers are made of the token ids alone, so that a test can tell whose they are: aux state [b, s] is the id that
stands there, in all its 3 H columns.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from eaglefeed.errors import EaglefeedError, StorageError
from eaglefeed.schema.protocol import (
    GENERATE,
    MODEL_INFO,
    REQUEST_HEADER,
    SESSION_HEADER,
    SET_VOCAB_MAPPING,
    TENSOR_BODY,
    ModelInfo,
    refusal_of,
)
from eaglefeed.storage.shard import TensorWriter, decode_tensors, encode_tensors

H, V = 2, 16
INFO = ModelInfo(
    target="fake",
    target_fingerprint="0" * 16,
    dtype="float32",
    hidden_size=H,
    vocab_size=V,
    num_hidden_layers=7,
    aux_layer_ids=(1, 2, 3),
    engine="hf",
)

Tensors = dict[str, Tensor]
Fault = Callable[["Handler", Tensors, dict[str, str]], None]


def answer_to(rows: Mapping[str, Tensor], draft_size: int = 0) -> Tensors:
    """The answer to right-padded rows, with a draft vocabulary or without."""
    ids, mask, loss = (rows[name] for name in ("input_ids", "attention_mask", "loss_mask"))
    zero = torch.zeros_like(ids[:, :1])
    found = {
        "aux_hidden_states": (ids * mask)[..., None].expand(*ids.shape, 3 * H).float().contiguous(),
        "input_ids": torch.cat([(ids * mask)[:, 1:], zero], 1),
        "attention_mask": mask,
        "loss_mask": torch.cat([(loss * mask)[:, 1:], zero], 1),
    }
    if not draft_size:
        return found | {"logits": torch.zeros(*ids.shape, V)}
    probs = torch.full((*ids.shape, draft_size), 1 / draft_size)
    return found | {"target_probs": probs, "position_mask": found["loss_mask"].bool()[..., None]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "FakeTarget"

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append(self.path)
        try:
            self._route(bytearray(body))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, body: bytearray) -> None:
        server, session = self.server, self.headers.get(SESSION_HEADER, "")
        if self.path in server.broken:
            server.broken[self.path](self, {}, {})
        elif self.path == MODEL_INFO:
            self.reply(200, server.info.to_json())
        elif self.path == SET_VOCAB_MAPPING:
            tensors, _ = decode_tensors(body, "map")
            server.sessions[session] = len(tensors["selected_token_ids"])
            self.reply(204, b"")
        elif self.path == GENERATE and session and session not in server.sessions:
            self.refuse(StorageError("unknown session"), 409)
        elif self.path == GENERATE:
            rows, _ = decode_tensors(body, "rows")
            metadata = {"request": self.headers[REQUEST_HEADER], "model": server.info.id}
            fault = server.next_fault()
            fault(self, answer_to(rows, server.sessions.get(session, 0)), metadata)
        else:
            self.reply(200, b"")

    def reply(self, status: int, body: bytes | bytearray, *, kind: str = "application/json", length: int = -1) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body) if length < 0 else length))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, error: EaglefeedError, status: int = 0) -> None:
        refusal = refusal_of(error)
        self.reply(status or refusal.status, refusal.body)

    def hang_up(self) -> None:
        self.close_connection = True


def honest(handler: Handler, tensors: Tensors, metadata: dict[str, str]) -> None:
    """No fault."""
    handler.reply(200, encode_tensors(TensorWriter(tensors, metadata)), kind=TENSOR_BODY)


class FakeTarget(ThreadingHTTPServer):
    """`seen` are the paths that were asked for.

    `fault` is what happens to each request for rows, the first `num_faults` of them; `broken` is what happens on other
    paths; `sessions` are the maps' sizes.
    """

    daemon_threads = True

    def __init__(self, port: int, info: ModelInfo) -> None:
        self.info, self.seen = info, list[str]()
        self.fault: Fault = honest
        self.num_faults = 10**9
        self.broken: dict[str, Fault] = {}
        self.sessions: dict[str, int] = {}
        self.ended = threading.Event()
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def num_asked(self, path: str = GENERATE) -> int:
        return self.seen.count(path)

    def next_fault(self) -> Fault:
        self.num_faults -= 1
        return self.fault if self.num_faults >= 0 else honest


@contextmanager
def fake_target(port: int = 0, info: ModelInfo = INFO) -> Iterator[FakeTarget]:
    with FakeTarget(port, info) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
            for connection in server.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
