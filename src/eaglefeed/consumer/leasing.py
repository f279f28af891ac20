"""What a trainer does with the queue for its leases: asking, giving back, refusing, and watching for producers."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from eaglefeed.clock import Clock
from eaglefeed.consumer.gone import GoneProducers
from eaglefeed.consumer.holdings import LeaseTerms, StreamStats, bear_outage
from eaglefeed.consumer.waiting import Waiting
from eaglefeed.errors import NoProducers, PeerGone, QueueUnavailable, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import DrainState, Lease, LeasedItem, LeaseQueue, NoLease
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.rules import last_error
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.away import StoreOutage

__all__ = ["Leaser", "reason_of"]

_WAIT_S = 0.5
_PAUSE_S = 0.1
_GONE_DELAY_S, _RECALL_S, _AWAY_DELAY_S = 5.0, 5.0, 5.0
_STARVED_S = 30.0

T = TypeVar("T")

log = get_logger(__name__)


def reason_of(error: Exception) -> str:
    """What a dead letter says of an error; it may quote bad data, which is not always text that can be sent."""
    return f"{type(error).__name__}: {error}"[:1000].encode(errors="backslashreplace").decode()


class Leaser:
    """Leases samples, for one thread. SampleStream explains the arguments."""

    def __init__(
        self,
        samples: LeaseQueue,
        *,
        consumer: str,
        session: int,
        prompts: LeaseQueue | None,
        holdings: Holdings,
        stats: StreamStats,
        terms: LeaseTerms,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._samples, self._consumer, self._session, self._stop = samples, consumer, session, stop
        self._prompts, self._holdings, self._stats, self._clock = prompts, holdings, stats, clock
        self._terms = terms
        self._alone_since: float | None = None
        self._starved_since_s: float | None = None
        self._warned, self._waiting = False, Waiting(clock)
        self._recalled_s = -_RECALL_S
        self._store = StoreOutage(clock)
        self._gone = GoneProducers(grace_s=terms.producer_grace_s, fails=terms.fail_without_producers, clock=clock)

    def ask(self, n: int) -> Lease | DrainState:
        """Up to `n` samples, which are held from now on, or why there are none.

        Raises:
            NoProducers: prompts remain and nobody works on them, if that is an error.
            StaleLease: another trainer has restored the queue.
            QueueUnavailable: the queue was away for longer than `outage_s`.
        """

        def lease() -> Lease | NoLease | None:
            self._samples.beat("trainer", self._consumer)
            if not self._holdings.keep_up():
                return None
            return self._samples.lease(
                n,
                visibility_timeout_s=self._terms.visibility_timeout_s,
                consumer=self._consumer,
                wait_s=_WAIT_S,
                session=self._session,
            )

        # A lease whose reply was lost for longer than the client repeats its calls just runs out.
        answer = self._bear(lease)
        if answer is None:
            self.pause()
            return DrainState.EMPTY
        if isinstance(answer, Lease):
            self._alone_since, self._starved_since_s, self._waiting = None, None, Waiting(self._clock)
            self._holdings.add(answer.token, [item.id for item in answer.items])
            return answer
        if answer.state is not DrainState.COMMIT_DUE:
            self._look_for_producers()
        if answer.state is DrainState.EMPTY and self._may_hold_room():
            return DrainState.COMMIT_DUE
        return answer.state

    def pause(self) -> None:
        """Before it is asked again: where a commit is due, or another's is, the queue answers at once."""
        self._stop.wait(_PAUSE_S)

    def is_over(self, num_held: int = 0) -> bool:
        """Whether nothing comes any more to a closed queue beside the `num_held` samples that this process holds.

        Of a producer that died, samples may be parked that another one is about to make again. The recall opened the
        queue, and a third producer, which did not know of it, may have closed it once more.
        """
        # Asked first: a hand-off comes between.
        nobody_works = self._prompts is None or self._bear(self._prompts.stats).drained
        stats = self._bear(self._samples.stats)
        is_all = stats.closed and stats.ready + stats.delayed == 0 and stats.leased == num_held
        if is_all and (nobody_works or not stats.parked):
            return True
        self.pause()
        return False

    def is_stuck(self) -> bool:
        """Whether producers wait for room, and no commit of this group would make any."""
        stats = self._bear(self._samples.stats)
        return stats.full and not stats.tentative

    def put_back(self, token: int, ids: Iterable[str], *, reason: str) -> None:
        """Give samples of a lease back to the head of the queue: nothing is wrong with them."""
        self._holdings.settle(token, ids)
        log.warning("put_back", lease=token, sample_ids=list(ids), reason=reason)
        self._nack(token, list(ids), reason=reason, delay_s=0.0)

    def answered(self, uri: str) -> None:
        """A sample was read: the store is there, and the producer that keeps samples there did answer."""
        self._store.answered()
        self._gone.answered(uri)

    def give_back(self, token: int, item: LeasedItem, error: PeerGone) -> None:
        """Its producer is gone, which is not its fault: it waits until another one has made it again.

        Raises:
            PeerGone: the producer lives and cannot be reached, if that is an error.
        """
        self._stats.gone += 1
        self._holdings.settle(token, [item.id])
        uri = decode_ref(item.payload).store_uri
        delay_s = self._gone.note(uri, error, _GONE_DELAY_S)
        self._nack(token, [item.id], reason=reason_of(error), delay_s=delay_s)
        now_s = self._clock.monotonic()
        if self._prompts is not None and now_s - self._recalled_s >= _RECALL_S:
            self._recalled_s = now_s
            try:
                self._prompts.recall(self._samples)
            except QueueUnavailable as outage:
                log.warning("recall_put_off", reason=str(outage))
        self._gone.tell(uri)

    def refuse(self, token: int, item: LeasedItem, *, reason: str, retryable: bool, may_be_store: bool = False) -> None:
        """It cannot be read: it is tried again later, or set aside; a store that is away counts against none.

        Raises:
            StorageError: the store has been away for longer than `outage_s`.
        """
        if may_be_store and (away_s := self._store.note(item.id, reason)) is not None:
            self._put_off(token, item, reason, away_s)
            return
        final = not retryable or item.delivery_count >= self._terms.max_attempts
        log.error("sample_refused", sample_id=item.id, lease=token, final=final, reason=reason)
        self._holdings.settle(token, [item.id])
        try:
            self._samples.nack(token, [item.id], reason=reason, retryable=not final)
        except QueueUnavailable as outage:
            log.warning("lease_left_to_expire", sample_id=item.id, lease=token, reason=str(outage))
        if final:
            self._stats.dead += 1
        else:
            self._stats.retried += 1

    def _put_off(self, token: int, item: LeasedItem, reason: str, away_s: float) -> None:
        self._holdings.settle(token, [item.id])
        self._stats.returned += 1
        self._nack(token, [item.id], reason=reason, delay_s=_AWAY_DELAY_S)
        if away_s > self._terms.outage_s:
            fix = "see why the store cannot be read here, and start again: no sample was set aside for it"
            raise StorageError(f"no sample could be read for {away_s:.0f} s", got=reason, fix=fix)

    def _nack(self, token: int, ids: list[str], *, reason: str, delay_s: float) -> None:
        """Without counting it against them."""
        try:
            self._samples.nack(token, ids, reason=reason, delay_s=delay_s, counted=False)
        except QueueUnavailable as outage:
            log.warning("lease_left_to_expire", sample_ids=ids, lease=token, reason=str(outage))

    def _bear(self, call: Callable[[], T]) -> T:
        return bear_outage(call, outage_s=self._terms.outage_s, stop=self._stop, clock=self._clock)

    def _may_hold_room(self) -> bool:
        """Whether nothing came for long while acks wait for their commit: then it is due, said once each time.

        Producers may wait for a disk that others filled, which the queue's counts do not show.
        """
        now_s = self._clock.monotonic()
        self._starved_since_s = now_s if self._starved_since_s is None else self._starved_since_s
        if now_s - self._starved_since_s < _STARVED_S:
            return False
        self._starved_since_s = now_s
        return self._bear(self._samples.stats).tentative > 0

    def _look_for_producers(self) -> None:
        """Tell slow producers from dead ones: nothing is ready, prompts remain, and nobody works on them."""
        if self._prompts is None:
            return
        stats = self._bear(self._prompts.stats)
        if self._waiting.is_due():
            alive, waited_s = stats.workers.get("producer", 0), self._waiting.waited_s
            log.info("waiting_for_samples", prompts=stats.unsettled, producers=alive, waited_s=waited_s)
        if stats.workers.get("producer") or not stats.unsettled:
            self._alone_since = None
            return
        now_s = self._clock.monotonic()
        self._alone_since = now_s if self._alone_since is None else self._alone_since
        if now_s - self._alone_since < self._terms.producer_grace_s:
            return
        if self._terms.fail_without_producers:
            raise self._without_producers(stats.unsettled)
        if not self._warned:
            log.warning("no_producers", reason=str(self._without_producers(stats.unsettled)))
            self._warned = True

    def _without_producers(self, num_prompts: int) -> NoProducers:
        words = last_error(self._bear(self._samples.agreed), "producer")
        return NoProducers(num_prompts=num_prompts, grace_s=self._terms.producer_grace_s, last_error=words)
