"""What happens ahead of the training loop: leasing refs, and materializing them into a bounded buffer."""

import queue
import threading
from typing import NamedTuple

from eaglefeed.clock import Clock
from eaglefeed.consumer.gone import GoneProducers
from eaglefeed.consumer.holdings import Sample, StreamStats, bear_outage
from eaglefeed.consumer.materialize import Materializer
from eaglefeed.errors import BuffersHeld, ConfigError, EaglefeedError, NoProducers, PeerGone, QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import DrainState, Lease, LeasedItem, LeaseQueue, NoLease
from eaglefeed.queue.holdings import Holdings
from eaglefeed.schema.refs import decode_ref

__all__ = ["End", "Prefetcher"]

_WAIT_S = 0.5
_DUE_PAUSE_S = 0.1
_GONE_DELAY_S, _RECALL_S = 5.0, 5.0

log = get_logger(__name__)


class End(NamedTuple):
    """Nothing more will come: the queue is drained, or this error stopped it."""

    error: EaglefeedError | None


class Prefetcher:
    """A thread that fills a bounded buffer with materialized samples. SampleStream explains the arguments."""

    def __init__(
        self,
        samples: LeaseQueue,
        materializer: Materializer,
        *,
        consumer: str,
        session: int,
        prompts: LeaseQueue | None,
        holdings: Holdings,
        stats: StreamStats,
        visibility_timeout_s: float,
        lease_batch: int,
        prefetch: int,
        max_attempts: int,
        fail_without_producers: bool,
        producer_grace_s: float,
        outage_s: float,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self.commit_due = threading.Event()
        self._samples, self._materializer, self._consumer, self._stop = samples, materializer, consumer, stop
        self._session, self._prompts, self._holdings, self._stats = session, prompts, holdings, stats
        self._timeout_s, self._lease_batch, self._outage_s = visibility_timeout_s, lease_batch, outage_s
        self._max_attempts = max_attempts
        self._fail_without_producers, self._grace_s, self._clock = fail_without_producers, producer_grace_s, clock
        self._ready: queue.Queue[Sample | End] = queue.Queue(maxsize=prefetch)
        self._alone_since: float | None = None
        self._warned = False
        self._recalled_s = -_RECALL_S
        self._gone = GoneProducers(grace_s=producer_grace_s, fails=fail_without_producers, clock=clock)
        self._thread = threading.Thread(target=self._run, name="eaglefeed-prefetch", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Sample | End | None:
        """The next sample, the end, or None after `timeout_s`."""
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def join(self, timeout_s: float) -> None:
        """Wait for the item in hand, once `stop` is set."""
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        end = End(None)
        try:
            while not self._stop.is_set() and self._lease_once():
                pass
        except EaglefeedError as error:
            end = End(error)
        except BaseException as error:
            log.exception("prefetch_failed")
            end = End(EaglefeedError("the stream's background thread failed, this is a bug", got=repr(error)))
            raise
        finally:
            self._offer(end)

    def _offer(self, entry: Sample | End) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(entry, timeout=_WAIT_S)
            except queue.Full:
                continue
            return

    def _lease_once(self) -> bool:
        lease = self._ask()
        if isinstance(lease, Lease):
            self._alone_since = None
            self._holdings.add(lease.token, [item.id for item in lease.items])
            for item in lease.items:
                if self._stop.is_set():
                    return False
                self._pass_on(lease.token, item)
            return True
        if lease is DrainState.COMMIT_DUE:
            self.commit_due.set()
            # The queue answers this at once, and another trainer's acks may keep it so beyond our commit.
            self._stop.wait(_DUE_PAUSE_S)
        else:
            self._look_for_producers()
        return lease is not DrainState.DRAINED or not self._is_over()

    def _ask(self) -> Lease | DrainState:
        def lease() -> Lease | NoLease:
            self._samples.beat("trainer", self._consumer)
            return self._samples.lease(
                self._lease_batch,
                visibility_timeout_s=self._timeout_s,
                consumer=self._consumer,
                wait_s=_WAIT_S,
                session=self._session,
            )

        # A lease whose reply was lost for longer than the client repeats its calls just runs out.
        answer = bear_outage(lease, outage_s=self._outage_s, stop=self._stop, clock=self._clock)
        return answer if isinstance(answer, Lease) else answer.state

    def _pass_on(self, token: int, item: LeasedItem) -> None:
        """Materialize an item for the loop; nothing here keeps it then."""
        try:
            ref, batch = self._materializer.materialize(item.payload)
        except (BuffersHeld, ConfigError):
            raise  # no fault of this sample's: the stream ends, and gives it back
        except PeerGone as error:
            self._give_back(token, item, error)
        except EaglefeedError as error:
            if not self._stop.is_set():  # else the wait for a buffer may have ended early: it is given back
                self._refuse(token, item, error)
        else:
            self._gone.answered(ref.store_uri)
            self._offer(Sample(token, ref, batch, item.delivery_count))

    def _is_over(self) -> bool:
        """Whether nothing comes any more to a drained queue.

        Of a producer that died, samples may be parked that another one is about to make again. The recall opened the
        queue, and a third producer, which did not know of it, may have closed it once more.
        """
        nobody_works = self._prompts is None or self._prompts.stats().drained  # asked first: a hand-off comes between
        stats = self._samples.stats()
        if stats.drained and (nobody_works or not stats.parked):
            return True
        self._stop.wait(_DUE_PAUSE_S)
        return False

    def _give_back(self, token: int, item: LeasedItem, error: PeerGone) -> None:
        """Its producer is gone, which is not its fault: it waits until another one has made it again."""
        self._stats.gone += 1
        self._holdings.settle(token, [item.id])
        reason, uri = f"{type(error).__name__}: {error}"[:1000], decode_ref(item.payload).store_uri
        delay_s = self._gone.note(uri, error, _GONE_DELAY_S)
        try:
            self._samples.nack(token, [item.id], reason=reason, delay_s=delay_s, counted=False)
            now_s = self._clock.monotonic()
            if self._prompts is not None and now_s - self._recalled_s >= _RECALL_S:
                self._recalled_s = now_s
                self._prompts.recall(self._samples)
        except QueueUnavailable as outage:
            log.warning("lease_left_to_expire", sample_id=item.id, lease=token, reason=str(outage))
        self._gone.tell(uri)

    def _refuse(self, token: int, item: LeasedItem, error: EaglefeedError) -> None:
        final = not error.retryable or item.delivery_count >= self._max_attempts
        reason = f"{type(error).__name__}: {error}"[:1000]
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

    def _look_for_producers(self) -> None:
        """Tell slow producers from dead ones: nothing is ready, prompts remain, and nobody works on them."""
        if self._prompts is None:
            return
        stats = self._prompts.stats()
        if stats.workers.get("producer") or not stats.unsettled:
            self._alone_since = None
            return
        now_s = self._clock.monotonic()
        self._alone_since = now_s if self._alone_since is None else self._alone_since
        if now_s - self._alone_since < self._grace_s:
            return
        error = NoProducers(num_prompts=stats.unsettled, grace_s=self._grace_s)
        if self._fail_without_producers:
            raise error
        if not self._warned:
            log.warning("no_producers", reason=str(error))
            self._warned = True
