"""The endpoints of a target server, as an ASGI app; schema/protocol.py says what they are."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import StorageError, TargetUnavailable
from eaglefeed.producer.answering import RowsAnswer, WeightsAnswer
from eaglefeed.producer.asking import Asked, read_map, read_rows, read_session
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.serving_metrics import ServerMetrics
from eaglefeed.producer.sessions import Sessions
from eaglefeed.schema import protocol
from eaglefeed.schema.protocol import ModelInfo
from eaglefeed.storage.pair_host import PairHost, grant_pair
from eaglefeed.storage.replies import read_body, refusal_reply

__all__ = ["TargetApp"]

_SMALL_BYTES = 64 * 1024
_UNKNOWN_SESSION = 409


class TargetApp:
    """What a target server answers.

    Args:
        target: whose weights and vocabulary are asked for; its forwards are the batcher's.
        info: what is said of it.
        batcher: answers rows.
        sessions: the clients' vocabulary maps.
        pairs: what answers may travel over besides the body.
        max_request_bytes: of a body with tensors.
        max_tokens: B x S of one request.
        clock: measures deadlines.
    """

    def __init__(
        self,
        target: Eagle3Target,
        info: ModelInfo,
        *,
        batcher: Batcher,
        sessions: Sessions,
        pairs: PairHost,
        max_request_bytes: int,
        max_tokens: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._target, self._info, self._batcher, self._sessions = target, info, batcher, sessions
        self._pairs, self._max_request_bytes, self._clock = pairs, max_request_bytes, clock
        self._max_tokens = max_tokens
        self._metrics = ServerMetrics(batcher.stats, lambda: len(sessions), lambda: batcher.is_ready)
        self._weights_turn = asyncio.Lock()

    def asgi(self) -> ASGIApp:
        """The app; errors of ours leave it as they are."""
        asked = {protocol.HEALTH: self._health, protocol.READY: self._ready, protocol.METRICS: self._show_metrics}
        posted: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            protocol.MODEL_INFO: self._model_info,
            protocol.INPUT_EMBEDDINGS: self._input_embeddings,
            protocol.TARGET_ASSETS: self._target_assets,
            protocol.SET_VOCAB_MAPPING: self._set_vocab_mapping,
            protocol.GENERATE: self._generate,
            protocol.INIT_NCCL: partial(grant_pair, self._pairs),
            protocol.HEARTBEAT: self._heartbeat,
            protocol.DISCONNECT: self._disconnect,
        }
        routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in asked.items()]
        routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
        return Router(routes, redirect_slashes=False)

    async def _health(self, _request: Request) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def _ready(self, _request: Request) -> Response:
        if not self._batcher.is_ready:
            fix = "wait until its first forward is through, or ask another server"
            raise TargetUnavailable("not ready", subject=self._info.target, fix=fix)
        return Response("ready\n", media_type="text/plain")

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _model_info(self, request: Request) -> Response:
        await read_body(request, _SMALL_BYTES)
        return Response(self._info.to_json(), media_type="application/json")

    async def _input_embeddings(self, request: Request) -> ASGIApp:
        return await self._weights(request, lambda: ({"weight": self._target.get_input_embeddings().weight}, {}))

    async def _target_assets(self, request: Request) -> ASGIApp:
        return await self._weights(request, self._target.target_assets)

    async def _weights(
        self, request: Request, get: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, str]]]
    ) -> ASGIApp:
        await read_body(request, _SMALL_BYTES)
        return WeightsAnswer(self._weights_turn, get, self._info, Asked.of(request.headers))

    async def _set_vocab_mapping(self, request: Request) -> Response:
        session = read_session(request.headers)
        ids, mask = read_map(await read_body(request, self._max_request_bytes), "vocabulary map")
        # In a thread: on a GPU the copy waits for the forward under way.
        self._sessions.begin(session, await asyncio.to_thread(self._target.check_vocab_mapping, ids, mask))
        return Response(status_code=204)

    async def _generate(self, request: Request) -> ASGIApp:
        asked = Asked.of(request.headers)
        deadline_s = self._clock.monotonic() + asked.timeout_s
        body = await read_body(request, self._max_request_bytes, asked.timeout_s)
        rows = read_rows(body, asked.request or "request", max_tokens=self._max_tokens)
        try:
            selected = self._sessions.use(asked.session) if asked.session else None
        except StorageError as error:
            return refusal_reply(error, _UNKNOWN_SESSION)
        return RowsAnswer(
            self._batcher,
            self._info,
            asked,
            rows,
            selected,
            deadline_s=deadline_s,
            pairs=self._pairs,
            clock=self._clock,
        )

    async def _heartbeat(self, request: Request) -> Response:
        await read_body(request, _SMALL_BYTES)
        try:
            self._sessions.use(read_session(request.headers))
        except StorageError as error:
            return refusal_reply(error, _UNKNOWN_SESSION)
        return Response(status_code=204)

    async def _disconnect(self, request: Request) -> Response:
        await read_body(request, _SMALL_BYTES)
        self._sessions.end(read_session(request.headers))
        return Response(status_code=204)
