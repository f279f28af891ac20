"""Target servers in this process, and what a test asks them."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer
from eaglefeed.schema.protocol import (
    DISCONNECT,
    EXACT_HEADER,
    GENERATE,
    METRICS,
    REQUEST_HEADER,
    SESSION_HEADER,
    SET_VOCAB_MAPPING,
)
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.control import ControlClient, Fetched
from eaglefeed.storage.shard import TensorWriter, encode_tensors

MAX_BYTES = 2**30


@contextmanager
def serving(target: Eagle3Target, *, ready: bool = True, **options: Any) -> Iterator[TargetServer]:
    """A server on a free port; it has warmed up, unless `ready` is false."""
    server = TargetServer(target, info_of(target, "test"), **options)
    server.start()
    try:
        if ready:
            assert server.wait_ready(60)
        yield server
    finally:
        server.stop(grace_s=5.0)


class Asker(ControlClient):
    """A client that asks as RemoteEagle3TargetModel does, and keeps no tensor of an answer."""

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, rows: tuple[Tensor, Tensor, Tensor], *, session: str = "", exact: bool = False, timeout_s: float = 60.0
    ) -> Fetched:
        """Have rows answered, and check that the answer is the one to this request."""
        request = secrets.token_hex(16)
        headers = {REQUEST_HEADER: request, EXACT_HEADER: str(int(exact))}
        headers |= {SESSION_HEADER: session} if session else {}
        body = rows_body(rows)
        fetched = self.fetch(GENERATE, body, headers=headers, timeout_s=timeout_s, subject=request, max_bytes=MAX_BYTES)
        assert fetched.metadata["request"] == fetched.headers[REQUEST_HEADER] == request
        return fetched

    def begin(self, mapping: VocabMapping) -> str:
        """A session with this map."""
        session = secrets.token_hex(16)
        tensors = {
            "selected_token_ids": mapping.selected_token_ids,
            "selected_token_mask": mapping.selected_token_mask,
        }
        body = encode_tensors(TensorWriter(tensors, {}))
        self.call(SET_VOCAB_MAPPING, body, headers={SESSION_HEADER: session}, timeout_s=30)
        return session

    def end(self, session: str) -> None:
        """Disconnect."""
        self.call(DISCONNECT, headers={SESSION_HEADER: session}, timeout_s=30)

    def metric(self, name: str) -> float:
        """A number of the server's /metrics."""
        lines = self.call(METRICS, method="GET", timeout_s=30).body.decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"eaglefeed_target_{name} "))


def rows_body(rows: tuple[Tensor, Tensor, Tensor]) -> bytearray:
    """The body of a request for rows."""
    return encode_tensors(TensorWriter(dict(zip(("input_ids", "attention_mask", "loss_mask"), rows, strict=True)), {}))
