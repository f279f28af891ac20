"""The receiver's side of pair groups: a client's pairs with one server, opened when needed and kept for later."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.parse import urlsplit

import torch

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError, PeerGone
from eaglefeed.logs import get_logger
from eaglefeed.schema.protocol import INIT_NCCL, PairGrant, PairRequest
from eaglefeed.storage.buffers import refuse_in_worker
from eaglefeed.storage.control import ControlClient, Refused
from eaglefeed.storage.pair_group import RECEIVER, Backend, PairGroup, join_pair, pair_backends
from eaglefeed.storage.pair_store import store_at

__all__ = ["Pair", "PairPool"]

_JOIN_S, _FAREWELL_S = 30.0, 1.0
_BUSY_S, _GRACE_S = 0.1, 1.0
_RETRY_S = 60.0
_MAX_BROKEN = 2
_log = get_logger(__name__)


class Pair:
    """One pair with the server, with an epoch more each time that it had to be opened again."""

    def __init__(self) -> None:
        self.name, self.epoch = secrets.token_hex(16), 0
        self.group: PairGroup | None = None
        self.is_proven = False
        """Whether tensors have come over its group."""

    @property
    def name_epoch(self) -> str:
        """What PAIR_HEADER says of it."""
        return f"{self.name}:{self.epoch}"

    def joined(self) -> PairGroup:
        """Its group.

        Raises:
            PeerGone: it is not open.
        """
        if self.group is None:
            raise PeerGone("the pair group is not open", subject=self.name_epoch)
        return self.group

    def close(self) -> None:
        """Hang up; it can be opened again."""
        if self.group is not None:
            self.group.close()
            self.group = None


class PairPool:
    """Lends pairs; any number of threads may share it.

    Args:
        client: of the server.
        backend: gloo or nccl.
        device: where tensors go; a CUDA device for nccl.
        max_pairs: at a time. Over nccl there is never more than one: transfers of several communicators of the same two
            processes can wait for each other.
        timeout_s: of a request. Opening a pair takes at most half of it, and 30 s: if there is none, the body remains.
        clock: measures the deadlines.

    Raises:
        ConfigError: nccl in a loader's worker, where CUDA is not to be touched.
    """

    def __init__(
        self,
        client: ControlClient,
        *,
        backend: Backend,
        device: torch.device,
        max_pairs: int,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if backend == "nccl":
            refuse_in_worker(client.url)
        self.backend, self.device = backend, device
        self._client, self._clock, self._join_s = client, clock, min(timeout_s / 2, _JOIN_S)
        self._host = urlsplit(client.url).hostname or ""
        self._idle = [Pair() for _ in range(1 if backend == "nccl" else max_pairs)]
        self._freed = threading.Condition()
        self._is_closed = False
        self._off_until_s = float("-inf")
        self._is_told = False
        self._num_broken = 0
        self._late: list[Future[PairGroup]] = []
        self._pid = os.getpid()

    @contextmanager
    def borrow(self) -> Iterator[Pair | None]:
        """A pair for the block alone, open; None if there is none to be had now: use the body of the reply.

        An error that leaves the block ends the pair, unless it is a Refused: the server sends no tensors then.
        """
        pair = self._taken()
        if pair is None:
            yield None
            return
        try:
            yield pair if self._open(pair) else None
        except Refused:
            raise
        except BaseException as error:
            pair.close()
            self._take_note(pair, error)
            raise
        else:
            self._num_broken = 0 if pair.is_proven else self._num_broken
        finally:
            self._give_back(pair)

    def declined(self, pair: Pair) -> None:
        """Take note that the server did not use a borrowed pair: it has it no more, or, of a fresh one, never will."""
        pair.close()
        if not pair.is_proven:
            self._fall_back(PeerGone("the server does not use pair groups"))

    def close(self) -> None:
        """End the pairs and tell the server so; one that is borrowed ends when it comes back."""
        with self._freed:
            self._is_closed, idle, self._idle = True, self._idle, []
        is_heard = True
        for pair in idle:
            pair.close()
            is_heard = is_heard and self._bid_farewell(pair)

    def _take_note(self, pair: Pair, error: BaseException) -> None:
        """Pairs that can be joined and then break at their first transfer, again and again, are none to be had."""
        if isinstance(error, PeerGone) and not pair.is_proven:
            self._num_broken += 1
            if self._num_broken >= _MAX_BROKEN:
                self._num_broken = 0
                self._fall_back(error)

    def _taken(self) -> Pair | None:
        if os.getpid() != self._pid:
            return None  # they are the parent's
        with self._freed:
            if self._is_closed or self._clock.monotonic() < self._off_until_s:
                return None
            if not self._freed.wait_for(lambda: self._idle or self._is_closed, _BUSY_S) or not self._idle:
                return None
            return self._idle.pop()

    def _give_back(self, pair: Pair) -> None:
        with self._freed:
            if not self._is_closed:
                self._idle.append(pair)
                self._freed.notify()
                return
        pair.close()
        self._bid_farewell(pair)

    def _open(self, pair: Pair) -> bool:
        if pair.group is not None:
            return True
        if not all(attempt.done() for attempt in self._late):
            return False
        try:
            pair.group, pair.is_proven = self._joined(self._granted(pair)), False
        except Refused as refused:
            self._fall_back(refused.error)
        except PeerGone as error:
            self._fall_back(error)
        except _OutOfReach:
            pass  # not the pair's fault, and the request itself will say so
        return pair.group is not None

    def _granted(self, pair: Pair) -> PairGrant:
        if self.backend not in pair_backends(self.device):
            raise PeerGone(f"no {self.backend} in this torch, or no device for it")
        pair.epoch += 1
        request = PairRequest(backend=self.backend, name=pair.name, epoch=pair.epoch)
        body = request.model_dump_json().encode()
        try:
            reply = self._client.call(INIT_NCCL, body, timeout_s=self._join_s)
            return PairGrant.from_json(reply.body, self._client.url)
        except EaglefeedError:
            raise _OutOfReach from None

    def _joined(self, grant: PairGrant) -> PairGroup:
        """Join in a thread of its own: connecting can block for longer than its timeout."""
        attempt: Future[PairGroup] = Future()
        threading.Thread(target=_run, args=(attempt, lambda: self._join(grant)), name="pair-join", daemon=True).start()
        try:
            return attempt.result(self._join_s + _GRACE_S)
        except TimeoutError:
            attempt.add_done_callback(_close_late)
            self._late = [*(each for each in self._late if not each.done()), attempt]
            subject = f"{self._host} port {grant.port}"
            raise PeerGone("what listens there does not answer", subject=subject, fix="check --nccl-port") from None

    def _join(self, grant: PairGrant) -> PairGroup:
        try:
            store = store_at(self._host, grant.port, grant.key, self._join_s)
        except RuntimeError as error:
            subject, got = f"{self._host} port {grant.port}", str(error)[:200]
            raise PeerGone("no meeting place of pair groups", subject=subject, got=got) from None
        return join_pair(
            store,
            backend=self.backend,
            rank=RECEIVER,
            timeout_s=self._join_s,
            device=self.device,
            clock=self._clock,
        )

    def _fall_back(self, error: EaglefeedError) -> None:
        with self._freed:
            self._off_until_s = self._clock.monotonic() + _RETRY_S
            is_told, self._is_told = self._is_told, True
        if not is_told:
            _log.warning(
                "tensors_come_over_http", server=self._client.url, wanted=self.backend, reason=str(error)[:300]
            )

    def _bid_farewell(self, pair: Pair) -> bool:
        """Tell the server that a pair is not needed any more; False if it is out of reach."""
        if not pair.epoch:
            return True
        farewell = PairRequest(backend=self.backend, name=pair.name, epoch=0).model_dump_json().encode()
        try:
            self._client.call(INIT_NCCL, farewell, timeout_s=_FAREWELL_S)
        except Refused:
            return True
        except EaglefeedError:
            return False
        return True


class _OutOfReach(Exception):
    """The server does not answer."""


def _run(attempt: "Future[PairGroup]", join: Callable[[], PairGroup]) -> None:
    try:
        attempt.set_result(join())
    except BaseException as error:  # noqa: BLE001 - it is raised where the attempt is awaited
        attempt.set_exception(error)


def _close_late(attempt: "Future[PairGroup]") -> None:
    if attempt.exception() is None:
        attempt.result().close()
