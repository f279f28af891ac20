"""What goes between the ranks ahead of their training loops: which samples are whose, and what became of them.

Rank 0 leads: each exchange is a message of its own to every rank, and an answer of every rank to it. Whatever the loops
must do alike comes to them in this one order: rounds, a pause in which nothing came, a commit that is due, the end.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgpack

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.gathering import Due, Fault, Gatherer, Held, Over, Round
from eaglefeed.consumer.leasing import reason_of
from eaglefeed.consumer.materialize import Materializer
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.together import pack_error, require_alike, unpack_error
from eaglefeed.errors import BuffersHeld, ConfigError, EaglefeedError, PeerGone
from eaglefeed.logs import get_logger
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.storage.away import is_of_store

__all__ = ["Feeder", "Idle", "IdleAsked", "Ready"]

_MAX_WAIT_S = 1.0
_UNTRIED = Fault("reading the samples before it took too long", retryable=True, is_untried=True)

log = get_logger(__name__)


class IdleAsked(NamedTuple):
    """Rank 0's loop has waited long enough, and had taken so many entries before."""

    num_taken: int


class Idle(NamedTuple):
    """Nothing came for a while."""


class Ready(NamedTuple):
    """A round as one rank sees it.

    Args:
        batches: of this rank, None where there is none.
        ids: of all ranks, rank by rank, "" where there is none.
        held: the same of rank 0, None where it could not be materialized; empty on other ranks.
        is_void: whether some rank was stopped over it: nobody is to take it.
    """

    batches: list[Eagle3TargetBatch | None]
    ids: list[str]
    held: Sequence[Held | None] = ()
    is_void: bool = False


class Feeder:
    """A thread of each rank that hands the loop its entries: Ready, Idle, Due, and Over at the end.

    Args:
        ranks: the job's; the thread's are the messages.
        materializer: reads this rank's samples.
        size: samples a round of each rank.
        setup: what all ranks must have alike.
        gatherer: on rank 0, what leases rounds; None elsewhere.
        events: on rank 0, what comes from the gatherer and the loop: Round, Due, IdleAsked, Over.
        stop: whether this rank is to stop; told to rank 0, which stops all.

    `failure` is what ended a rank that was not stopped, this one or another.
    """

    def __init__(
        self,
        ranks: Ranks,
        materializer: Materializer,
        *,
        size: int,
        setup: Mapping[str, str],
        gatherer: Gatherer | None,
        events: SimpleQueue[Any],
        stop: threading.Event,
    ) -> None:
        self._ranks, self._materializer, self._size, self._gatherer = ranks, materializer, size, gatherer
        self._setup, self._events, self._stop = setup, events, stop
        self._entries: SimpleQueue[Any] = SimpleQueue()
        self._num_entries = 0
        self._wait_s = min(_MAX_WAIT_S, ranks.timeout_s / 4)
        self.failure: EaglefeedError | None = None
        self.asked_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eaglefeed-feeder", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Any:
        """The next entry, or None after `timeout_s`."""
        try:
            return self._entries.get(timeout=timeout_s)
        except Empty:
            return None

    def fail(self, error: EaglefeedError) -> None:
        """This rank cannot go on: end all ranks with this error, or with what ended another one before."""
        self.failure = self.failure or error

    def join(self, timeout_s: float) -> None:
        """Wait for the end, which all ranks come to once one of them is stopped."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        over = Over()
        try:
            require_alike(self._ranks, self._setup)
            over = self._lead() if self._ranks.is_first else self._follow()
        except EaglefeedError as error:
            over = Over(error)
        except BaseException as error:
            log.exception("feeding_failed")
            over = Over(EaglefeedError("the stream's background thread failed, this is a bug", got=repr(error)))
            raise
        finally:
            self._entries.put(over)

    def _put(self, entry: Any) -> None:
        self._entries.put(entry)
        self._num_entries += 1

    def _lead(self) -> Over:
        while True:
            event = self._next_event()
            if isinstance(event, Round):
                self._exchange_round(event)
                continue
            self._exchange(event)
            if isinstance(event, Over):
                return event
            if event is not None:
                self._put(event)

    def _next_event(self) -> Round | Due | Idle | Over | None:
        """What all ranks are told next; None to tell that there is nothing yet."""
        if self.failure is not None:
            return Over(self.failure)
        if self.asked_to_stop.is_set() or self._stop.is_set():
            return Over()
        try:
            event: Any = self._events.get(timeout=self._wait_s)
        except Empty:
            return None
        if isinstance(event, IdleAsked):
            return Idle() if event.num_taken == self._num_entries else None
        return event  # type: ignore[no-any-return]

    def _exchange(self, event: Due | Idle | Over | None) -> None:
        message = _packed(event)
        self._ranks.hand_out([message] * self._ranks.world_size)
        self._hear(self._ranks.collect(self._reply([])))

    def _exchange_round(self, event: Round) -> None:
        slots = _spread(event.held, self._ranks.world_size, self._size)
        ids = [held.item.id if held else "" for slot in slots for held in slot]
        payloads = [[held.item.payload if held else b"" for held in slot] for slot in slots]
        mine = self._ranks.hand_out([_packed(Round(()), ids, each) for each in payloads])
        batches, outcomes = self._materialized(_unpacked(mine)[2])
        answers = self._hear(self._ranks.collect(self._reply(outcomes)))
        held = [each for slot in slots for each in slot]
        kept = [self._settled(each, outcome) for each, outcome in zip(held, itertools.chain(*answers), strict=True)]
        self._put(Ready(batches, ids, kept, is_void=self.asked_to_stop.is_set() or self.failure is not None))

    def _settled(self, held: Held | None, outcome: list[Any]) -> Held | None:
        """A sample that was materialized; the others, the gatherer hears of."""
        if held is None or self._gatherer is None:
            return None
        fault = Fault(*outcome) if outcome else None
        self._gatherer.tell(held, fault)
        return held if fault is None else None

    def _hear(self, replies: Sequence[bytes]) -> list[list[Any]]:
        """What each rank says: whether it must stop, an error that ends all, and what became of its samples."""
        outcomes = []
        for rank, reply in enumerate(replies):
            must_stop, failure, outcome = msgpack.unpackb(reply)
            if must_stop:
                self.asked_to_stop.set()
            if failure and self.failure is None:
                self.failure = unpack_error(failure, rank)
            outcomes.append(outcome)
        return outcomes

    def _follow(self) -> Over:
        while True:
            kind, *rest = _unpacked(self._ranks.hand_out())
            outcomes = self._take_in(*rest) if kind == "Round" else []
            if kind in {"Idle", "Due"}:
                self._put(Idle() if kind == "Idle" else Due())
            self._ranks.collect(self._reply(outcomes))
            if kind == "Over":
                error, drained = rest
                if error:
                    self.failure = unpack_error(error)
                return Over(self.failure if error else None, drained)

    def _take_in(self, ids: list[str], payloads: list[bytes]) -> list[Any]:
        """Materialize this rank's part of a round for the loop; nothing here keeps it then."""
        batches, outcomes = self._materialized(payloads)
        self._put(Ready(batches, ids))
        return outcomes

    def _reply(self, outcomes: list[Any]) -> bytes:
        failure = b"" if self.failure is None else pack_error(self.failure)
        reply: bytes = msgpack.packb([self._stop.is_set(), failure, outcomes])
        return reply

    def _materialized(self, payloads: Sequence[bytes]) -> tuple[list[Eagle3TargetBatch | None], list[Any]]:
        """This rank's batches, and for each sample an empty list, or its Fault."""
        found: list[tuple[Eagle3TargetBatch | None, list[Any]]] = []
        deadline_s = SYSTEM_CLOCK.monotonic() + self._ranks.timeout_s / 2  # the other ranks wait for this one
        for payload in payloads:
            is_late = bool(payload and found) and SYSTEM_CLOCK.monotonic() > deadline_s
            found.append((None, list(_UNTRIED)) if is_late else self._try(payload))
        return [batch for batch, _ in found], [outcome for _, outcome in found]

    def _try(self, payload: bytes) -> tuple[Eagle3TargetBatch | None, list[Any]]:
        if not payload or self.failure is not None:
            return None, []
        try:
            return self._materializer.materialize(payload)[1], []
        except (BuffersHeld, ConfigError) as error:
            self.failure = error  # no fault of this sample's: the stream ends, and gives it back
        except EaglefeedError as error:
            if self._stop.is_set():  # the wait for a buffer may have ended early: it is given back
                return None, []
            is_gone = isinstance(error, PeerGone)
            reason = error.what if is_gone else reason_of(error)
            return None, list(Fault(reason, error.retryable, is_gone, may_be_store=is_of_store(error)))
        except Exception as error:
            log.exception("materializing_failed")
            self.failure = EaglefeedError("a sample could not be read, this is a bug", got=repr(error))
        return None, []


def _spread(held: Sequence[Held], world_size: int, size: int) -> list[list[Held | None]]:
    """The samples of each rank, dealt out in turn, so that an incomplete round leaves every rank its share."""
    slots: list[list[Held | None]] = []
    for rank in range(world_size):
        mine = list(held[rank::world_size])
        slots.append([*mine, *[None] * (size - len(mine))])
    return slots


def _packed(event: Round | Due | Idle | Over | None, *rest: Any) -> bytes:
    parts = list(rest)
    if isinstance(event, Over):
        parts = [pack_error(event.error) if event.error else b"", event.drained]
    packed: bytes = msgpack.packb([type(event).__name__, *parts])
    return packed


def _unpacked(message: bytes) -> list[Any]:
    return list(msgpack.unpackb(message))
