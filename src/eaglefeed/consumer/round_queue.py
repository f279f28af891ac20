"""Rank 0's side of a RoundStream: the leases of all ranks' samples, and what becomes of them."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from eaglefeed.clock import Clock
from eaglefeed.consumer.gathering import Gatherer, Held
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.leasing import Leaser
from eaglefeed.consumer.settling import Settler
from eaglefeed.errors import QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.storage.base import FeatureStore

__all__ = ["RoundQueue", "RoundStats"]

_JOIN_S = 60.0

log = get_logger(__name__)


@dataclass
class RoundStats(StreamStats):
    """On rank 0, what became of the whole job's samples; elsewhere this rank's, as far as it knows.

    `padded` are places in rounds that were filled with nothing.
    """

    padded: int = 0


class RoundQueue:
    """Leases rounds once `begin` was called, keeps their leases alive, and settles them. RoundStream explains the rest.

    Args:
        round_size: samples of all ranks.
        ahead: rounds.
        events: where rounds go; see Gatherer.
    """

    def __init__(
        self,
        samples: LeaseQueue,
        store: FeatureStore,
        *,
        consumer: str,
        prompts: LeaseQueue | None,
        round_size: int,
        ahead: int,
        visibility_timeout_s: float,
        stall_timeout_s: float,
        max_lease_age_s: float,
        max_attempts: int,
        retain: bool,
        fail_without_producers: bool,
        producer_grace_s: float,
        outage_s: float,
        stats: RoundStats,
        events: SimpleQueue[Any],
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._samples, self._consumer, self._stats, self._stop = samples, consumer, stats, stop
        self.gatherer: Gatherer | None = None
        self.renewer = LeaseRenewer(
            samples,
            visibility_timeout_s=visibility_timeout_s,
            stall_timeout_s=stall_timeout_s,
            max_lease_age_s=max_lease_age_s,
            on_renewed=lambda: samples.beat("trainer", consumer),
        )
        self._holdings = Holdings(self.renewer)
        self.settler = Settler(
            samples,
            store,
            holdings=self._holdings,
            stats=stats,
            retain=retain,
            outage_s=outage_s,
            stop=stop,
            clock=clock,
        )
        self.settler.clean()  # what an earlier trainer had committed when it died
        self.renewer.start()

        def begin() -> Gatherer:
            leaser = Leaser(
                samples,
                consumer=consumer,
                session=self.settler.session,
                prompts=prompts,
                holdings=self._holdings,
                stats=stats,
                visibility_timeout_s=visibility_timeout_s,
                max_attempts=max_attempts,
                fail_without_producers=fail_without_producers,
                producer_grace_s=producer_grace_s,
                outage_s=outage_s,
                stop=stop,
                clock=clock,
            )
            return Gatherer(
                leaser,
                holdings=self._holdings,
                size=round_size,
                ahead=ahead,
                max_age_s=max_lease_age_s / 2,
                events=events,
                stop=stop,
                clock=clock,
            )

        self._begin = begin

    def begin(self) -> Gatherer:
        """Lease from now on."""
        self.gatherer = self._begin()
        return self.gatherer

    def still_held(self, held: Sequence[Held | None]) -> list[bool]:
        """Which of a round's samples are there and ours. A lease that was lost is the next holder's to train on."""
        with contextlib.suppress(QueueUnavailable):  # then nobody else has them either
            self._holdings.keep_up()  # a pause of this process may have cost them
        return [each is not None and not self._is_lost(each) for each in held]

    def taken(self, held: Sequence[Held | None], is_there: list[bool]) -> None:
        """These were taken, and nothing in the place of the others: the next `ack` is for them."""
        self._stats.padded += is_there.count(False)
        for each, there in zip(held, is_there, strict=True):
            if each is not None and there:
                self.settler.add(each.token, each.item.id)
                self._stats.delivered += 1
                self._stats.redelivered += each.item.delivery_count > 1

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
        if self.gatherer is not None:
            self.gatherer.committed()
        self.settler.clean()
        return count

    def close(self, *, drained: bool) -> None:
        """Give back what is not acknowledged, once `stop` is set."""
        if self.gatherer is not None:
            self.gatherer.join(_JOIN_S)
        is_there = self.settler.close(drained=drained)
        self.renewer.stop()
        with contextlib.suppress(QueueUnavailable):  # then the sign of life just grows old
            if is_there:
                self._samples.farewell("trainer", self._consumer)

    def _is_lost(self, held: Held) -> bool:
        if self.renewer.is_kept(held.token):
            return False
        self._stats.stale += 1
        self._holdings.settle(held.token, [held.item.id])
        log.warning("lease_lost", lease=held.token, sample_id=held.item.id)
        return True
