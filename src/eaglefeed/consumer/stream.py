"""SampleStream: leases in, Eagle3TargetBatches out, acknowledged after they were trained on."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType

import torch

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.prefetch import End, Holdings, Prefetcher, Sample, StreamStats, bear_outage
from eaglefeed.errors import QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import AckResult, LeaseQueue
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import FeatureStore

__all__ = ["SampleStream", "StreamStats"]

_POLL_S = 0.5
_JOIN_S = 60.0

log = get_logger(__name__)


class SampleStream:
    """Batches for a training loop, materialized ahead in the background.

    A plain loop acknowledges each batch when it asks for the next one:

        for batch in stream:
            train_on(batch)

    `take` never acknowledges by itself: call `ack` when what was taken is safe, at the latest when nothing more comes,
    since the queue is not drained while you hold its last samples.

        while batches := stream.take(8):
            train_on(batches)
            stream.ack()

    What was not acknowledged when the stream is closed goes back to the queue; after a crash its lease runs out.

    Args:
        samples: the queue of refs.
        store: where their tensors lie.
        consumer: this trainer's name, unique in the run.
        contract: id of the run's contract; samples of another are dead letters. "" takes any.
        prompts: the run's prompts queue, to tell slow producers from dead ones; None never does.
        visibility_timeout_s: how long a lease lasts without a renewal.
        max_lease_age_s: a lease is not renewed beyond this age; take what is acknowledged together well within it.
        stall_timeout_s: leases are no longer renewed when the loop asked for nothing in this time.
        lease_batch: samples a lease.
        prefetch: samples that are materialized ahead.
        max_attempts: deliveries after which a sample that cannot be read is a dead letter.
        retain: keep a shard after its acknowledgement.
        fail_without_producers: raise NoProducers when prompts remain and no producer lived for `producer_grace_s`.
        producer_grace_s: that time; a warning comes after it in any case.
        outage_s: how long the queue may be out of reach before QueueUnavailable is raised.
        device: where batches go.
        clock: what waits are measured with.
    """

    def __init__(
        self,
        samples: LeaseQueue,
        store: FeatureStore,
        *,
        consumer: str,
        contract: str = "",
        prompts: LeaseQueue | None = None,
        visibility_timeout_s: float = 60.0,
        stall_timeout_s: float = 600.0,
        max_lease_age_s: float = 1800.0,
        lease_batch: int = 4,
        prefetch: int = 4,
        max_attempts: int = 5,
        retain: bool = False,
        fail_without_producers: bool = False,
        producer_grace_s: float = 60.0,
        outage_s: float = 120.0,
        device: torch.device | str = "cpu",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stats = StreamStats()
        self._samples, self._store, self._consumer, self._retain = samples, store, consumer, retain
        self._device, self._outage_s, self._clock = device, outage_s, clock
        self._renewer = LeaseRenewer(
            samples,
            visibility_timeout_s=visibility_timeout_s,
            stall_timeout_s=stall_timeout_s,
            max_lease_age_s=max_lease_age_s,
            on_renewed=lambda: samples.beat("trainer", consumer),
        )
        self._renewer.start()
        self._holdings = Holdings(self._renewer)
        self._unacked: list[Sample] = []
        self._end: End | None = None
        self._stop = threading.Event()
        self._prefetcher = Prefetcher(
            samples,
            store,
            consumer=consumer,
            contract=contract,
            prompts=prompts,
            holdings=self._holdings,
            stats=self.stats,
            visibility_timeout_s=visibility_timeout_s,
            lease_batch=lease_batch,
            prefetch=prefetch,
            max_attempts=max_attempts,
            fail_without_producers=fail_without_producers,
            producer_grace_s=producer_grace_s,
            outage_s=outage_s,
            clock=clock,
        )

    def __iter__(self) -> Iterator[Eagle3TargetBatch]:
        """Yield batches until the queue is drained; each is acknowledged when the next one is asked for."""
        while batches := self.take(1):
            yield batches[0]
            self.ack()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the queue is drained, or the stream was stopped."""
        return self._end is not None or self._stop.is_set()

    def take(self, n: int, *, wait_s: float | None = None, linger_s: float = 5.0) -> list[Eagle3TargetBatch]:
        """Up to `n` batches; empty at the end of the stream, or when none came in `wait_s`.

        Args:
            n: most batches to take.
            wait_s: how long to wait for the first; None waits for the end of the stream.
            linger_s: how long to wait for each other.

        Raises:
            NoProducers: prompts remain and no producer lives, if the stream was told to fail then.
            QueueUnavailable: the server was away for longer than `outage_s`.
        """
        taken: list[Eagle3TargetBatch] = []
        while len(taken) < n and (sample := self._next(linger_s if taken else wait_s)):
            self.stats.delivered += 1
            self.stats.redelivered += sample.delivery_count > 1
            self._unacked.append(sample)
            taken.append(sample.batch.to(self._device))
        return taken

    def ack(self) -> int:
        """Settle all that was taken, and delete its shards unless they are retained; returns how many it settled.

        A sample whose lease was lost meanwhile is not settled: its next holder has it. It is counted and logged.

        An outage of the queue is borne for `outage_s`. Where only a reply was lost in it, what that call settled counts
        as stale, and its shards stay.

        Raises:
            QueueUnavailable: the outage is longer; what was not settled can be acknowledged again.
        """
        self._renewer.progress()
        return sum(self._ack_lease(token, refs) for token, refs in self._taken_by_lease().items())

    def stop(self) -> None:
        """Make `take` return at once, with nothing from then on. Safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop leasing and give back what is not acknowledged. Safe to repeat."""
        self._stop.set()
        self._prefetcher.stop(_JOIN_S)
        self._unacked.clear()
        # Each goes back to the head: the newest lease first, so that the oldest comes out on top again.
        for token, ids in sorted(self._holdings.drain().items(), reverse=True):
            try:
                self.stats.returned += len(self._samples.nack(token, ids, reason="stream closed", delay_s=0).ok)
            except QueueUnavailable as error:
                log.warning("lease_left_to_expire", lease=token, sample_ids=ids, reason=str(error))
        self._renewer.stop()
        with contextlib.suppress(QueueUnavailable):  # then the sign of life just grows old
            self._samples.farewell("trainer", self._consumer)

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, timeout_s: float | None) -> Sample | None:
        self._renewer.progress()
        started_s = self._clock.monotonic()
        try:
            while not self.ended:
                entry = self._prefetcher.get(_POLL_S if timeout_s is None else timeout_s)
                if isinstance(entry, Sample):
                    if not self._renewer.is_lost(entry.token):
                        return entry
                    self._drop(entry)
                elif isinstance(entry, End):
                    self._end = entry
                elif timeout_s is not None:
                    return None
                self._renewer.progress()
        finally:
            self.stats.wait_s += self._clock.monotonic() - started_s
        if self._end is not None and self._end.error is not None:
            raise self._end.error
        return None

    def _drop(self, sample: Sample) -> None:
        """Its lease was lost before it was trained on: the next holder trains on it."""
        self.stats.stale += 1
        self._holdings.settle(sample.token, [sample.ref.sample_id])
        log.warning("lease_lost", lease=sample.token, sample_id=sample.ref.sample_id)

    def _taken_by_lease(self) -> dict[int, dict[str, SampleRef]]:
        taken: dict[int, dict[str, SampleRef]] = defaultdict(dict)
        for sample in self._unacked:
            taken[sample.token][sample.ref.sample_id] = sample.ref
        return taken

    def _ack_lease(self, token: int, refs: dict[str, SampleRef]) -> int:
        def ack() -> AckResult:
            self._holdings.settle(token, refs)
            try:
                return self._samples.ack(token, list(refs))
            except QueueUnavailable:
                self._holdings.add(token, refs)
                raise

        result = bear_outage(ack, outage_s=self._outage_s, stop=self._stop, clock=self._clock)
        self._unacked = [sample for sample in self._unacked if sample.token != token]
        self.stats.acked += len(result.ok)
        self.stats.stale += len(result.stale)
        if result.stale:
            log.warning("ack_refused", lease=token, sample_ids=list(result.stale))
        if not self._retain:
            for sample_id in result.ok:
                self._store.delete(refs[sample_id])
        return len(result.ok)
