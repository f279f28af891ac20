"""What a producer that keeps its samples' tensors answers to those who pull them.

    GET    /health                     {"instance": nonce}, without a token
    GET    /<nonce>/samples/<key>      the shard, in the body or over a pair group
    GET    /<nonce>/headers/<key>      its header alone, and its size in FILE_BYTES_HEADER
    DELETE /<nonce>/samples/<key>      nobody needs it any more
    GET    /<nonce>/documents/<name>   a file of the run
    POST   /init_nccl                  see schema/protocol.py

The nonce is of one process: whoever asks for another one's samples is told that it is gone.
"""

import asyncio
import json
from collections.abc import Mapping

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from eaglefeed.errors import PeerGone, SampleMissing
from eaglefeed.schema.protocol import FILE_BYTES_HEADER, HEALTH, INIT_NCCL, PAIR_HEADER, TIMEOUT_HEADER
from eaglefeed.storage.kept import Kept, KeptSamples
from eaglefeed.storage.pair_host import PairHost, PairReply, grant_pair
from eaglefeed.storage.replies import TensorReply
from eaglefeed.storage.shard import ShardWriter, TensorWriter

__all__ = ["PeerApp"]

_MAX_REPLY_S = 600.0
_CPU = torch.device("cpu")


class PeerApp:
    """The endpoints.

    Args:
        nonce: this process's.
        samples: what is kept.
        documents: name → content of the run's files, or their tensors, hashed already.
        pairs: what samples may travel over besides the body,
        device: and the GPU that they leave over nccl.
    """

    def __init__(
        self,
        nonce: str,
        samples: KeptSamples,
        documents: Mapping[str, bytes | TensorWriter],
        pairs: PairHost,
        device: torch.device,
    ) -> None:
        self._nonce, self._samples, self._documents = nonce, samples, documents
        self._pairs, self._device = pairs, device

    def asgi(self) -> ASGIApp:
        """The app: errors of ours leave it as they are."""
        return Router(
            [
                Route(HEALTH, self._health, methods=["GET"]),
                Route(INIT_NCCL, self._init_pair, methods=["POST"]),
                Route("/{nonce}/samples/{key:path}", self._send, methods=["GET"]),
                Route("/{nonce}/samples/{key:path}", self._delete, methods=["DELETE"]),
                Route("/{nonce}/headers/{key:path}", self._header, methods=["GET"]),
                Route("/{nonce}/documents/{name}", self._document, methods=["GET"]),
            ],
            redirect_slashes=False,
        )

    async def _health(self, _request: Request) -> Response:
        return Response(json.dumps({"instance": self._nonce}), media_type="application/json")

    async def _init_pair(self, request: Request) -> Response:
        return await grant_pair(self._pairs, request)

    async def _send(self, request: Request) -> Response:
        kept = self._kept(request)
        pair = request.headers.get(PAIR_HEADER, "")
        backend = self._pairs.backend_of(pair) if pair else None
        device = self._device if backend == "nccl" else _CPU
        writer = await asyncio.to_thread(_placed, kept, device)
        if backend is not None:
            return PairReply(self._pairs, pair, writer, {}, _timeout_s(request))
        return TensorReply(writer, {}, _timeout_s(request))

    async def _header(self, request: Request) -> Response:
        writer = self._kept(request).writer
        return Response(writer.header(), headers={FILE_BYTES_HEADER: str(writer.file_bytes)})

    async def _delete(self, request: Request) -> Response:
        self._check_nonce(request)
        key = request.path_params["key"]
        if not self._samples.pop(key):
            raise SampleMissing(key, key)
        return Response(status_code=204)

    async def _document(self, request: Request) -> Response:
        self._check_nonce(request)
        name = request.path_params["name"]
        found = self._documents.get(name)
        if found is None:
            raise SampleMissing(name, name)
        if isinstance(found, bytes):
            return Response(found)
        return TensorReply(found, {}, _timeout_s(request))

    def _kept(self, request: Request) -> Kept:
        self._check_nonce(request)
        key = request.path_params["key"]
        kept = self._samples.get(key)
        if kept is None:
            raise SampleMissing(key, key)
        return kept

    def _check_nonce(self, request: Request) -> None:
        if request.path_params["nonce"] != self._nonce:
            raise PeerGone("another process listens here now", wanted=request.path_params["nonce"], got=self._nonce)


def _placed(kept: Kept, device: torch.device) -> TensorWriter:
    """The same file of tensors on a device: a body is sent from host memory, and nccl from that of its GPU."""
    tensors = kept.writer.tensors
    if all(tensor.device.type == device.type for tensor in tensors.values()):
        return kept.writer
    moved = ShardWriter(kept.ref, {name: tensor.to(device) for name, tensor in tensors.items()})
    moved.digests = kept.writer.digests
    return moved


def _timeout_s(request: Request) -> float:
    try:
        return max(0.0, min(float(request.headers[TIMEOUT_HEADER]), _MAX_REPLY_S))
    except (KeyError, ValueError):
        return _MAX_REPLY_S
