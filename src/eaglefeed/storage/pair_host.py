"""The sender's side of pair groups: where the clients of a server meet it, and its answers over them."""

import asyncio
import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError, PeerGone, SchemaError, StorageError, TargetMismatch
from eaglefeed.logs import get_logger
from eaglefeed.schema.protocol import FILE_BYTES_HEADER, PAIR_BODY, PAIR_HEADER, PairGrant, PairRequest
from eaglefeed.storage.pair_group import SENDER, Backend, PairGroup, join_pair
from eaglefeed.storage.pair_store import MeetingPlace
from eaglefeed.storage.replies import cut, read_body
from eaglefeed.storage.shard import TensorWriter

__all__ = ["PairHost", "PairReply", "grant_pair"]

T = TypeVar("T")

_NAME = re.compile(r"[0-9a-f]{32}")
_JOIN_S = 30.0
_SPARED_S, _IDLE_S = 30.0, 600.0
_SPARE_S = 5.0
_MAX_REQUEST_BYTES = 4096
_log = get_logger(__name__)


@dataclass(eq=False)
class _Hosted:
    """A pair; while it has no group it is being joined."""

    backend: Backend
    name: str
    epoch: int
    used_s: float
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    group: PairGroup | None = None
    is_busy: bool = False

    @property
    def is_idle(self) -> bool:
        return self.group is not None and not self.is_busy


class PairHost:
    """The pairs of a server with its clients, bounded in number.

    Args:
        host: where the server listens.
        port: of the meeting place; 0 for a free one.
        backends: what pairs may run over; none, and nothing listens.
        device: of the tensors that go over nccl.
        max_pairs: at a time. Beyond it one that has been idle for 30 s makes room, else a client is sent away.
        clock: measures deadlines and idleness.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        backends: Sequence[Backend],
        *,
        device: torch.device | None = None,
        max_pairs: int = 64,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._place = MeetingPlace(host, port) if backends else None
        self.port = self._place.port if self._place else 0
        self._backends, self._device, self._max_pairs, self._clock = backends, device, max_pairs, clock
        self._pairs: dict[str, _Hosted] = {}
        self._num_joining = 0
        self._changed = threading.Condition()

    def grant(self, request: PairRequest) -> PairGrant:
        """Begin to join a pair, in a thread that gives up after 30 s; an older epoch of it ends. Epoch 0 only ends it.

        Raises:
            SchemaError: an impossible name or epoch.
            TargetMismatch: no such backend here.
            StorageError: there are as many pairs as there may be, or as many are being joined.
        """
        place = self._checked(request)
        if request.epoch == 0:
            self._drop(lambda pair: pair.name == request.name)
            return PairGrant(port=self.port, key="")
        now_s = self._clock.monotonic()
        self._drop(lambda pair: pair.name == request.name or (pair.is_idle and now_s - pair.used_s > _IDLE_S))
        pair = _Hosted(request.backend, request.name, request.epoch, now_s)
        self._add(pair)
        threading.Thread(target=self._join, args=(place, pair), name="pair-join", daemon=True).start()
        return PairGrant(port=self.port, key=pair.key)

    def backend_of(self, name_epoch: str) -> Backend | None:
        """What an answer over this pair would run over; None if there is no such pair."""
        with self._changed:
            pair = self._found(name_epoch)
            return None if pair is None else pair.backend

    def send(self, name_epoch: str, tensors: Sequence[Tensor], *, label: bytes, timeout_s: float) -> None:
        """Send over a pair, once it is joined and free; see PairGroup.send.

        Raises:
            PeerGone: no such pair, it is not free within 30 s or in time, or it broke.
        """
        end_s = self._clock.monotonic() + timeout_s
        pair, group = self._claimed(name_epoch, min(timeout_s, _JOIN_S))
        try:
            group.send(tensors, label=label, timeout_s=end_s - self._clock.monotonic())
        finally:
            self._settle(pair, group)

    def close(self) -> None:
        """End every pair; one that is sending ends with its transfer."""
        self._backends = ()
        self._drop(lambda _pair: True)
        if self._place is not None:
            self._place.close()

    def _checked(self, request: PairRequest) -> MeetingPlace:
        if not _NAME.fullmatch(request.name) or request.epoch < 0:
            got = f"{request.name[:40]!r}, {request.epoch}"
            raise SchemaError("not a pair's name and epoch", wanted="32 hex digits, and 0 or more", got=got)
        if self._place is None or request.backend not in self._backends:
            wanted = " or ".join(self._backends) or "the HTTP body alone"
            raise TargetMismatch("no such data plane here", wanted=wanted, got=request.backend)
        return self._place

    def _add(self, pair: _Hosted) -> None:
        with self._changed:
            spared = [each for each in self._pairs.values() if each.is_idle and pair.used_s - each.used_s > _SPARED_S]
            is_full = len(self._pairs) >= self._max_pairs
        if is_full and spared:
            oldest = min(spared, key=lambda each: each.used_s)
            self._drop(lambda each: each is oldest)
        with self._changed:
            # Each join has a thread, also of a pair that was dropped meanwhile.
            if max(len(self._pairs), self._num_joining) >= self._max_pairs:
                raise StorageError("too many pair groups", wanted=f"at most {self._max_pairs}", fix="use the HTTP body")
            self._pairs[pair.name] = pair
            self._num_joining += 1

    def _join(self, place: MeetingPlace, pair: _Hosted) -> None:
        group = None
        try:
            store = place.store(pair.key, _JOIN_S)
            group = join_pair(
                store, backend=pair.backend, rank=SENDER, timeout_s=_JOIN_S, device=self._device, clock=self._clock
            )
        except (EaglefeedError, RuntimeError, OSError) as error:
            if self._backends:
                _log.warning("no_pair_group", backend=pair.backend, reason=str(error)[:300])
        finally:
            with contextlib.suppress(RuntimeError):
                place.forget(pair.key)
            self._joined(pair, group)

    def _joined(self, pair: _Hosted, group: PairGroup | None) -> None:
        with self._changed:
            self._num_joining -= 1
            is_wanted = self._pairs.get(pair.name) is pair
            if is_wanted and group is not None:
                pair.group = group
            elif is_wanted:
                del self._pairs[pair.name]
            self._changed.notify_all()
        if group is not None and not is_wanted:
            group.close()

    def _claimed(self, name_epoch: str, timeout_s: float) -> tuple[_Hosted, PairGroup]:
        with self._changed:
            # Its client can be here before our own thread has taken note that it is joined, or free again.
            self._changed.wait_for(lambda: (found := self._found(name_epoch)) is None or found.is_idle, timeout_s)
            pair = self._found(name_epoch)
            if pair is None or pair.group is None or pair.is_busy:
                raise PeerGone("no such pair group, or one that is not free", subject=name_epoch)
            pair.is_busy = True
            return pair, pair.group

    def _settle(self, pair: _Hosted, group: PairGroup) -> None:
        with self._changed:
            pair.is_busy, pair.used_s = False, self._clock.monotonic()
            is_kept = self._pairs.get(pair.name) is pair and not group.broken
            if not is_kept and self._pairs.get(pair.name) is pair:
                del self._pairs[pair.name]
            self._changed.notify_all()
        if not is_kept:
            group.close()

    def _found(self, name_epoch: str) -> _Hosted | None:
        name, _, epoch = name_epoch.partition(":")
        pair = self._pairs.get(name)
        return pair if pair is not None and str(pair.epoch) == epoch else None

    def _drop(self, is_meant: Callable[[_Hosted], bool]) -> None:
        with self._changed:
            dropped = [pair for pair in self._pairs.values() if is_meant(pair)]
            for pair in dropped:
                del self._pairs[pair.name]
            idle = [pair.group for pair in dropped if pair.group is not None and not pair.is_busy]
            self._changed.notify_all()
        for group in idle:
            group.close()


async def grant_pair(host: PairHost, request: Request) -> Response:
    """The endpoint INIT_NCCL; raises as `PairHost.grant` and `read_body` do."""
    wanted = PairRequest.from_json(bytes(await read_body(request, _MAX_REQUEST_BYTES)), "the request")
    return Response(host.grant(wanted).model_dump_json(), media_type="application/json")


class PairReply(Response):
    """Tensors over a pair group: their header as the body, then the tensors straight from their memory.

    Args:
        host: of the pair.
        pair: its name:epoch.
        writer: hashed already, or, over nccl, perhaps not: then nobody checks the digests.
        headers: besides type, length, pair and size.
        timeout_s: for the tensors; a client that is later is cut.
    """

    media_type = PAIR_BODY

    def __init__(
        self, host: PairHost, pair: str, writer: TensorWriter, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        own = {PAIR_HEADER: pair, FILE_BYTES_HEADER: str(writer.file_bytes)}
        super().__init__(writer.header(), headers={**headers, **own})
        self._host, self._pair, self._writer, self._timeout_s = host, pair, writer, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            # The tensors have their own deadline: this is for a client that does not read the reply.
            async with asyncio.timeout(self._timeout_s + _SPARE_S):
                reason = await self._send(send)
        except TimeoutError:
            reason = "its client does not read"
        if reason is not None:
            _log.warning("answer_over_pair_group_failed", reason=reason)
            await cut(scope, receive)

    async def _send(self, send: Send) -> str | None:
        """Why it failed."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        reason = await _in_thread(self._send_tensors)
        if reason is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return reason

    def _send_tensors(self) -> str | None:
        """Why it failed; no error, whose frames would keep the tensors."""
        try:
            self._host.send(self._pair, self._writer.parts(), label=bytes(self.body), timeout_s=self._timeout_s)
        except PeerGone as error:
            return str(error)[:300]
        return None


async def _in_thread(work: Callable[[], T]) -> T:
    """Await work in a thread of its own: it may stand still until its deadline, and must keep nothing else waiting."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name="pair-send", daemon=True).start()
    return await done
