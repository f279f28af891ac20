"""Rank 0's dealings with the queue, ahead of its training loop: leasing whole rounds, and settling what failed."""

import threading
from collections import defaultdict
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from eaglefeed.clock import Clock
from eaglefeed.consumer.leasing import Leaser
from eaglefeed.errors import EaglefeedError, PeerGone
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import MAX_BATCH, DrainState, Lease, LeasedItem
from eaglefeed.queue.holdings import Holdings
from eaglefeed.schema.refs import decode_ref

__all__ = ["Due", "Fault", "Gatherer", "Held", "Over", "Round"]

_WAIT_S, _STUCK_S = 0.5, 5.0

log = get_logger(__name__)


class Held(NamedTuple):
    """A sample and the lease it is held by."""

    token: int
    item: LeasedItem


class Round(NamedTuple):
    """The samples of one optimizer step of all ranks, in the queue's order."""

    held: tuple[Held, ...]


class Due(NamedTuple):
    """The queue has no room and waits for a commit."""


class Over(NamedTuple):
    """Nothing more will come: the queue is drained, this error ended it, or somebody stopped it."""

    error: EaglefeedError | None = None
    drained: bool = False


class Fault(NamedTuple):
    """Why a sample was not materialized on its rank.

    Args:
        reason: for its dead letter.
        retryable: whether it may work later.
        is_gone: whether its producer did not answer.
        is_untried: whether there was just no time for it.
        may_be_store: whether the store may be away.
    """

    reason: str
    retryable: bool
    is_gone: bool = False
    is_untried: bool = False
    may_be_store: bool = False


class Gatherer:
    """A thread that leases rounds, at most `ahead` that the loop has not taken.

    Steps are made of the same samples on every run, so a round that is not full is handed out only where nothing more
    can come: the queue is closed and what is left in it is held here, or it has no room, for what is held here alone.

    Args:
        leaser: leases; used by this thread alone.
        holdings: what is leased.
        size: samples a round.
        ahead: rounds.
        max_age_s: leases that have waited for their round for so long are given back, and taken anew.
        events: gets each Round, each Due, and Over at the end.
        stop: ends it.
        clock: measures ages.
    """

    def __init__(
        self,
        leaser: Leaser,
        *,
        holdings: Holdings,
        size: int,
        ahead: int,
        max_age_s: float,
        events: SimpleQueue[Any],
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._leaser, self._holdings, self._size, self._max_age_s = leaser, holdings, size, max_age_s
        self._events, self._stop, self._clock = events, stop, clock
        self._pending: list[Held] = []
        self._pending_since_s, self._num_unheard = 0.0, 0
        self._stuck_since_s: float | None = None
        self._room, self._has_room = threading.Semaphore(ahead), False
        self._is_due = threading.Event()
        self._outcomes: SimpleQueue[tuple[Held, Fault | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="eaglefeed-rounds", daemon=True)
        self._thread.start()

    def taken(self) -> None:
        """The loop has taken a round."""
        self._room.release()

    def committed(self) -> None:
        """A commit was made: when the queue still waits for one, it is told again."""
        self._is_due.clear()

    def tell(self, held: Held, fault: Fault | None) -> None:
        """What became of a sample on its rank."""
        self._outcomes.put((held, fault))

    def join(self, timeout_s: float) -> None:
        """Wait for the call in hand, once `stop` is set."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        over = Over()
        try:
            while not self._stop.is_set():
                if not self._turn():
                    over = Over(drained=True)
                    break
        except EaglefeedError as error:
            over = Over(error)
        except BaseException as error:
            log.exception("gathering_failed")
            over = Over(EaglefeedError("the stream's background thread failed, this is a bug", got=repr(error)))
            raise
        finally:
            self._events.put(over)

    def _turn(self) -> bool:
        """One call for samples, if there is room for them; False where nothing more will come."""
        self._settle_outcomes()
        self._has_room = self._has_room or self._room.acquire(timeout=_WAIT_S)
        if not self._has_room:
            return True
        answer = self._leaser.ask(min(self._size - len(self._pending), MAX_BATCH))
        if isinstance(answer, Lease):
            self._add(answer)
        elif answer is DrainState.COMMIT_DUE:
            if not self._is_due.is_set():
                self._is_due.set()
                self._events.put(Due())
            self._leaser.pause()
        elif self._pending:
            self._look_at_the_rest()
        elif answer is DrainState.DRAINED and self._leaser.is_over():
            return False
        return True

    def _add(self, lease: Lease) -> None:
        if not self._pending:
            self._pending_since_s = self._clock.monotonic()
        self._pending += [Held(lease.token, item) for item in lease.items]
        self._stuck_since_s = None
        if len(self._pending) == self._size:
            self._pass_on()

    def _pass_on(self) -> None:
        self._num_unheard += len(self._pending)
        self._events.put(Round(tuple(self._pending)))
        self._pending, self._has_room, self._stuck_since_s = [], False, None

    def _look_at_the_rest(self) -> None:
        """A round that is not full, and nothing came."""
        is_all_heard = not self._num_unheard  # what could not be read may come again
        if is_all_heard and (self._leaser.is_over(len(self._holdings)) or self._is_stuck()):
            log.info("incomplete_round", samples=len(self._pending), wanted=self._size)
            self._pass_on()
        elif self._clock.monotonic() - self._pending_since_s > self._max_age_s:
            self._put_back()

    def _is_stuck(self) -> bool:
        if len(self._holdings) > len(self._pending) or not self._leaser.is_stuck():
            self._stuck_since_s = None
            return False
        now_s = self._clock.monotonic()
        self._stuck_since_s = now_s if self._stuck_since_s is None else self._stuck_since_s
        return now_s - self._stuck_since_s >= _STUCK_S

    def _put_back(self) -> None:
        """An old lease would run out, and count as a crash."""
        ids: dict[int, list[str]] = defaultdict(list)
        for token, item in self._pending:
            ids[token].append(item.id)
        for token in sorted(ids, reverse=True):  # each to the head: the oldest last, so that it comes first again
            self._leaser.put_back(token, ids[token], reason="waited long for its round")
        self._pending = []

    def _settle_outcomes(self) -> None:
        while True:
            try:
                (token, item), fault = self._outcomes.get_nowait()
            except Empty:
                return
            self._num_unheard -= 1
            if fault is None:
                self._leaser.answered(decode_ref(item.payload).store_uri)
            elif fault.is_untried:
                self._leaser.put_back(token, [item.id], reason=fault.reason)
            elif fault.is_gone:
                self._leaser.give_back(token, item, PeerGone(fault.reason))
            else:
                kind = {"retryable": fault.retryable, "may_be_store": fault.may_be_store}
                self._leaser.refuse(token, item, reason=fault.reason, **kind)
