"""A trainer's side of its queue: leases that are kept alive, what becomes of them, and its signs of life."""

import contextlib
import threading
from collections.abc import Sequence

from eaglefeed.clock import Clock
from eaglefeed.consumer.holdings import LeaseTerms, StreamStats
from eaglefeed.consumer.leasing import Leaser
from eaglefeed.consumer.settling import Settler
from eaglefeed.errors import QueueUnavailable
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.storage.base import FeatureStore

__all__ = ["TrainerQueue"]


class TrainerQueue:
    """What SampleStream and rank 0 of a RoundStream hold of the queue. SampleStream explains arguments and errors."""

    def __init__(
        self,
        samples: LeaseQueue,
        store: FeatureStore,
        *,
        consumer: str,
        prompts: LeaseQueue | None,
        terms: LeaseTerms,
        stats: StreamStats,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._samples, self._consumer, self._prompts, self._terms = samples, consumer, prompts, terms
        self._stats, self._stop, self._clock = stats, stop, clock
        self.renewer = LeaseRenewer(
            samples,
            visibility_timeout_s=terms.visibility_timeout_s,
            stall_timeout_s=terms.stall_timeout_s,
            max_lease_age_s=terms.max_lease_age_s,
            on_renewed=lambda: samples.beat("trainer", consumer),
        )
        self.holdings = Holdings(self.renewer)
        self.settler = Settler(
            samples,
            store,
            holdings=self.holdings,
            stats=stats,
            retain=terms.retain,
            outage_s=terms.outage_s,
            stop=stop,
            clock=clock,
        )
        self.settler.clean()  # what an earlier trainer had committed when it died
        self.renewer.start()

    def leaser(self) -> Leaser:
        """Leases in the session that the trainer has by now."""
        return Leaser(
            self._samples,
            consumer=self._consumer,
            session=self.settler.session,
            prompts=self._prompts,
            holdings=self.holdings,
            stats=self._stats,
            terms=self._terms,
            stop=self._stop,
            clock=self._clock,
        )

    def ack(self, step: int | None, sample_ids: Sequence[str] | None) -> int:
        """Acknowledge what was taken; returns how many samples."""
        self.renewer.progress()
        count = self.settler.ack(step, sample_ids)
        if step is None and count:
            self.settler.clean()
        return count

    def commit(self, step: int) -> int:
        """Settle for good what was acknowledged at `step` or before; returns how many samples."""
        self.renewer.progress()
        count = self.settler.commit(step)
        self.settler.clean()
        return count

    def close(self, *, drained: bool) -> None:
        """Give back what is not acknowledged, once `stop` is set and nothing leases any more."""
        is_there = self.settler.close(drained=drained)
        self.renewer.stop()
        with contextlib.suppress(QueueUnavailable):  # then the sign of life just grows old
            if is_there:
                self._samples.farewell("trainer", self._consumer)
