"""What servers read and reply: bodies within bounds, errors, and tensors straight from their memory."""

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eaglefeed.errors import EaglefeedError, SchemaError, TargetUnavailable
from eaglefeed.schema.protocol import TENSOR_BODY, refusal_of
from eaglefeed.storage.shard import TensorWriter

__all__ = ["CUT", "BodyLimit", "TensorReply", "cut", "read_body", "refusal_reply"]

CUT = "eaglefeed.cut"
"""In the scope of a request that HttpServer serves: a function that ends its connection at once, with bytes unsent."""
_PIECE_BYTES = 2**20
_ENDING = {401, 408, 413}  # what is left of the request is not read


class _TooLarge(SchemaError):
    status = 413


class _TooSlow(TargetUnavailable):  # the network's fault, and not the request's: it may go well later
    status = 408


def refusal_reply(error: EaglefeedError, status: int | None = None) -> Response:
    """The reply that says an error.

    Args:
        error: what went wrong.
        status: another HTTP status than the error's own.
    """
    own, body = refusal_of(error)
    status = status or (error.status if isinstance(error, _TooLarge | _TooSlow) else own)
    headers = {"retry-after": "1"} if status == 503 else {"connection": "close"} if status in _ENDING else {}
    return Response(body, status, headers, "application/json")


async def cut(scope: Scope, receive: Receive) -> None:
    """End a connection in the middle of a reply."""
    scope[CUT]()
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, max_bytes: int, timeout_s: float = 60.0) -> bytearray:
    """The body of a request.

    Raises:
        SchemaError: more than `max_bytes`, said before any is read where its length is stated.
        TargetUnavailable: too slow. Of both `refusal_reply` knows the status.
        starlette.requests.ClientDisconnect: it is cut short.
    """
    stated = int(request.headers.get("content-length", 0))  # the parser lets nothing else than digits through
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            if stated <= max_bytes:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_bytes:
                        break
    except TimeoutError:
        wanted, got = f"all of it within {timeout_s:g} s", f"{len(body)} bytes"
        raise _TooSlow("too slow a request", wanted=wanted, got=got, fix="ask again, with more time") from None
    if max(stated, len(body)) > max_bytes:
        wanted, fix = f"at most {max_bytes} bytes", "send less at a time, or raise serve.max_request_bytes"
        raise _TooLarge("too large a request", wanted=wanted, got=stated or None, fix=fix)
    return body


class BodyLimit:
    """Bounds what the bodies of all requests take at a time, each from its first byte until it is answered.

    Args:
        app: what reads them.
        max_bytes: of them together; a request beyond is told to come again.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes, self._held_bytes = app, max_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, unless its body is one too many."""
        own_bytes = 0

        async def counted() -> Message:
            nonlocal own_bytes
            message = await receive()
            num_bytes = len(message.get("body", b""))
            if self._held_bytes + num_bytes > self._max_bytes:
                raise TargetUnavailable("too many requests at a time", fix="ask again later, or another server")
            own_bytes += num_bytes
            self._held_bytes += num_bytes
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= own_bytes


class TensorReply(Response):
    """Tensors as a whole safetensors file, sent from their own memory.

    Once it has been sent, or its client has been cut, nothing holds the tensors any more but who made it.

    Args:
        writer: hashed already.
        headers: besides type and length.
        timeout_s: for all of it; a client that does not read it in time is cut.
    """

    media_type = TENSOR_BODY

    def __init__(self, writer: TensorWriter, headers: Mapping[str, str], timeout_s: float) -> None:
        super().__init__(headers={**headers, "content-length": str(writer.file_bytes)})
        self._writer, self._timeout_s = writer, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(send)
        except TimeoutError:
            await cut(scope, receive)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._writer.header(), "more_body": True})
        for chunk in self._writer.chunks(hashed=False):
            for begin in range(0, len(chunk), _PIECE_BYTES):
                piece = chunk[begin : begin + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            # `send` waits for what was written before: so the memory is not looked at any more when the chunk ends.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
