"""What became of the samples that a training loop took: acknowledged, committed, and their shards deleted."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from eaglefeed.clock import Clock
from eaglefeed.consumer.holdings import StreamStats, bear_outage
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import AckResult, LeaseQueue
from eaglefeed.queue.holdings import Holdings
from eaglefeed.schema.contract import RETAIN_RECORD
from eaglefeed.storage.base import FeatureStore
from eaglefeed.storage.janitor import delete_released

__all__ = ["Settler"]

T = TypeVar("T")

log = get_logger(__name__)


class Settler:
    """Settles samples with the queue, and bears its outages. SampleStream explains the arguments and the errors."""

    def __init__(
        self,
        samples: LeaseQueue,
        store: FeatureStore,
        *,
        holdings: Holdings,
        stats: StreamStats,
        session: int,
        retain: bool,
        outage_s: float,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._samples, self._store, self._holdings, self._stats = samples, store, holdings, stats
        self._session, self._retain = session, retain
        self._outage_s, self._stop, self._clock = outage_s, stop, clock
        self._taken: dict[int, list[str]] = defaultdict(list)
        self._seen: dict[int, list[str]] = {}
        if retain and store.stays_with_producer:
            fix = "leave retain out, or produce into another kind of store"
            raise ConfigError(
                "its samples cannot be retained, they die with their producer", subject=store.uri, fix=fix
            )
        if retain:  # for the janitors, which know of no stream
            samples.agree(RETAIN_RECORD, b"1")

    def add(self, token: int, sample_id: str) -> None:
        """It was taken: the next `ack` is for it too. Its tensors are the loop's alone."""
        self._taken[token].append(sample_id)

    def ack(self, step: int | None) -> int:
        """Acknowledge what was taken; returns how many samples were."""
        return sum(self._ack_lease(token, ids, step) for token, ids in list(self._taken.items()))

    def commit(self, step: int) -> int:
        """Settle what was acknowledged at `step` or before; returns how many samples."""
        count = self._call(lambda: self._samples.commit(step, session=self._session))
        self._seen = {at: ids for at, ids in self._seen.items() if at > step}
        return count

    def seen(self) -> list[str]:
        """The ids acknowledged with a step since the last commit, in the order of their steps."""
        return [sample_id for step in sorted(self._seen) for sample_id in self._seen[step]]

    def delete_released(self) -> int:
        """Delete the shards that no group needs any more, unless a stream of the run retains them; returns how many."""
        return self._call(lambda: delete_released(self._samples, self._store, retains=self._retains, clock=self._clock))

    def _retains(self) -> bool:
        return self._retain or RETAIN_RECORD in self._samples.agreed()

    def _ack_lease(self, token: int, ids: list[str], step: int | None) -> int:
        def ack() -> AckResult:
            self._holdings.settle(token, ids)
            try:
                return self._samples.ack(token, ids, step=step, session=self._session)
            except QueueUnavailable:
                self._holdings.add(token, ids)
                raise

        result = self._call(ack)
        del self._taken[token]
        self._stats.acked += len(result.ok)
        self._stats.stale += len(result.stale)
        if step is not None:
            self._seen.setdefault(step, []).extend(result.ok)
        if result.stale:
            log.warning("ack_refused", lease=token, sample_ids=list(result.stale))
        return len(result.ok)

    def _call(self, call: Callable[[], T]) -> T:
        return bear_outage(call, outage_s=self._outage_s, stop=self._stop, clock=self._clock)
