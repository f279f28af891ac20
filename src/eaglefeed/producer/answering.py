"""One request of a target server, from its place in the batcher to the last byte of its answer."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError, TargetUnavailable
from eaglefeed.producer.asking import Asked
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.engine import Selected
from eaglefeed.producer.work import TokenRows, Work
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.protocol import MODEL_HEADER, REQUEST_HEADER, ModelInfo
from eaglefeed.storage.pair_group import Backend
from eaglefeed.storage.pair_host import PairHost, PairReply
from eaglefeed.storage.replies import TensorReply
from eaglefeed.storage.shard import TensorWriter

__all__ = ["RowsAnswer", "WeightsAnswer"]

_MIN_SEND_S = 1.0
"""What an answer that is nearly late has all the same."""
_BUSY_FIX = "ask again later, or another server"


class RowsAnswer:
    """The ASGI app of one request for rows: it holds its place until its answer is sent or given up.

    Args:
        batcher: makes the answer.
        info: of the target.
        asked: the request's headers.
        rows: what it asks about.
        selected: the draft vocabulary of its session; None for logits.
        deadline_s: of the clock's monotonic time.
        pairs: what the answer may travel over besides the body.
        clock: measures it.

    Raises:
        EaglefeedError: when called: no room, too late, or the target's own.
    """

    def __init__(
        self,
        batcher: Batcher,
        info: ModelInfo,
        asked: Asked,
        rows: TokenRows,
        selected: Selected | None,
        *,
        deadline_s: float,
        pairs: PairHost,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._batcher, self._info, self._asked = batcher, info, asked
        self._rows, self._selected = rows, selected
        self._deadline_s, self._pairs, self._clock = deadline_s, pairs, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it."""
        mailbox, plane = _Mailbox(), self._pairs.backend_of(self._asked.pair)
        work = Work(
            request=self._asked.request,
            rows=self._rows,
            deliver=mailbox.put,
            selected=self._selected,
            exact=self._asked.exact,
            deadline_s=self._deadline_s,
            on_device=plane == "nccl",
        )
        work = self._batcher.submit(work)
        try:
            await self._answer(mailbox, plane, scope, receive, send)
        finally:
            mailbox.close()
            self._batcher.release(work, mailbox.put)

    async def _answer(
        self, mailbox: "_Mailbox", plane: Backend | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        outcome = await mailbox.take(receive, self._left_s())
        if isinstance(outcome, EaglefeedError):
            raise outcome
        if outcome is None:
            return
        if plane != self._pairs.backend_of(self._asked.pair):  # it broke meanwhile
            plane, outcome = None, outcome.to("cpu")
        writer = _writer(outcome.tensors(), {}, self._asked, self._info)
        del outcome
        if plane != "nccl":  # whose tensors would come to the host for it, only to be hashed
            await asyncio.to_thread(_hash, writer)
        await self._reply(writer, plane)(scope, receive, send)

    def _reply(self, writer: TensorWriter, plane: Backend | None) -> Response:
        headers, left_s = _headers(self._asked, self._info), max(self._left_s(), _MIN_SEND_S)
        if plane is None:
            return TensorReply(writer, headers, left_s)
        return PairReply(self._pairs, self._asked.pair, writer, headers, left_s)

    def _left_s(self) -> float:
        return self._deadline_s - self._clock.monotonic()


class WeightsAnswer:
    """The ASGI app of one request for weights of the target; one is sent at a time, since some are copies.

    Args:
        turn: held while weights are in memory.
        get: the weights, and texts about them.
        info: of the target.
        asked: the request's headers.
    """

    def __init__(
        self,
        turn: asyncio.Lock,
        get: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, str]]],
        info: ModelInfo,
        asked: Asked,
    ) -> None:
        self._turn, self._get, self._info, self._asked = turn, get, info, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            async with asyncio.timeout(self._asked.timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise TargetUnavailable("others are being sent its weights", fix=_BUSY_FIX) from None
        try:
            writers: list[TensorWriter] = []
            await asyncio.to_thread(self._read, writers)
            reply = TensorReply(writers.pop(), _headers(self._asked, self._info), self._asked.timeout_s)
            await reply(scope, receive, send)
        finally:
            self._turn.release()

    def _read(self, writers: list[TensorWriter]) -> None:
        tensors, texts = self._get()
        here = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        writers.append(_writer(here, texts, self._asked, self._info))
        _hash(writers[0])


def _writer(tensors: Mapping[str, Tensor], texts: Mapping[str, str], asked: Asked, info: ModelInfo) -> TensorWriter:
    return TensorWriter(tensors, {**texts, "request": asked.request, "model": info.id})


def _hash(writer: TensorWriter) -> None:
    """Ahead, since the header comes first; in a thread, since it reads all of it.

    It returns nothing: asyncio keeps a thread's result in a circle of futures until the next garbage collection.
    """
    for _ in writer.chunks():
        pass


def _headers(asked: Asked, info: ModelInfo) -> dict[str, str]:
    return {REQUEST_HEADER: asked.request, MODEL_HEADER: info.id}


class _Mailbox:
    """Carries what becomes of a request from the target's thread into the event loop, and keeps nothing of it."""

    def __init__(self) -> None:
        self._loop, self._came = asyncio.get_running_loop(), asyncio.Event()
        self._held: list[Eagle3TargetBatch | EaglefeedError] = []
        self._closed = False

    def put(self, outcome: Eagle3TargetBatch | EaglefeedError) -> None:
        """In any thread."""
        with suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            self._loop.call_soon_threadsafe(self._hold, outcome)

    async def take(self, receive: Receive, timeout_s: float) -> Eagle3TargetBatch | EaglefeedError | None:
        """What came, or None if the client left before; an error if nothing came in time."""
        waits = asyncio.ensure_future(self._came.wait()), asyncio.ensure_future(_left(receive))
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._held:
            return self._held.pop()
        return None if done else TargetUnavailable("not answered in the client's time", fix=_BUSY_FIX)

    def close(self) -> None:
        """Nobody takes anything any more."""
        self._closed = True
        self._held.clear()

    def _hold(self, outcome: Eagle3TargetBatch | EaglefeedError) -> None:
        if not self._closed:
            self._held.append(outcome)
            self._came.set()


async def _left(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
