"""The loop's end of a stream: waiting for samples, and handing out their batches."""

import contextlib
import math
import threading
from collections.abc import Callable

import torch

from eaglefeed.clock import Clock
from eaglefeed.consumer.expand import TargetHead, as_trained_on
from eaglefeed.consumer.holdings import Sample, StreamStats
from eaglefeed.consumer.prefetch import End, Prefetcher
from eaglefeed.consumer.settling import Settler
from eaglefeed.errors import EaglefeedError, QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.batch import Eagle3TargetBatch

__all__ = ["Taker"]

_POLL_S = 0.5

log = get_logger(__name__)


class Taker:
    """Takes samples out of a prefetcher; keeps none of them. SampleStream explains the arguments and the errors.

    Leasing begins with the first take: until then the queue can be taken back to a checkpoint.
    """

    def __init__(
        self,
        begin: Callable[[], Prefetcher],
        settler: Settler,
        *,
        holdings: Holdings,
        renewer: LeaseRenewer,
        stats: StreamStats,
        device: torch.device,
        head: TargetHead | None,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._begin, self._settler, self._holdings, self._renewer = begin, settler, holdings, renewer
        self._stats, self._device, self._head, self._stop, self._clock = stats, device, head, stop, clock
        self._prefetcher: Prefetcher | None = None
        self._end: End | None = None
        self.ids: tuple[str, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Whether a take has begun to lease."""
        return self._prefetcher is not None

    @property
    def commit_due(self) -> bool:
        """Whether the queue has no room and waits for a commit."""
        return self._prefetcher is not None and self._prefetcher.commit_due.is_set()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._end is not None or self._stop.is_set()

    @property
    def drained(self) -> bool:
        """Whether the queue had nothing more to lease."""
        return self._end is not None and self._end.error is None

    def end(self, error: EaglefeedError) -> None:
        """Nothing more will come, for this reason."""
        self._end = End(error)

    def committed(self) -> None:
        """A commit was made: none is due until the queue says so again."""
        if self._prefetcher is not None:
            self._prefetcher.commit_due.clear()

    def join(self, timeout_s: float) -> None:
        """Wait for the item in hand, once the stream's `stop` is set."""
        if self._prefetcher is not None:
            self._prefetcher.join(timeout_s)

    def take(self, n: int, wait_s: float | None, linger_s: float, *, heed_commit: bool) -> list[Eagle3TargetBatch]:
        """Up to `n` batches; does not wait while a commit is due, if it is to heed that."""
        taken: list[Eagle3TargetBatch] = []
        names: list[tuple[int, str, int]] = []
        while len(taken) < n and (sample := self._next(linger_s if taken else wait_s, heed_commit)):
            taken.append(as_trained_on(sample.batch.to(self._device), self._head))
            names.append((sample.token, sample.ref.sample_id, sample.delivery_count))
        # Not earlier: what an error keeps from the loop, the loop's next ack must not settle.
        for token, sample_id, delivery_count in names:
            self._settler.add(token, sample_id)
            self._stats.delivered += 1
            self._stats.redelivered += delivery_count > 1
        self.ids = tuple(sample_id for _, sample_id, _ in names)
        return taken

    def _next(self, timeout_s: float | None, heed_commit: bool) -> Sample | None:
        self._renewer.progress()
        started_s, left_s = self._clock.monotonic(), math.inf if timeout_s is None else timeout_s
        try:
            while not self.ended:
                self._prefetcher = self._prefetcher or self._begin()
                is_due = heed_commit and self.commit_due
                wait_s = 0.0 if is_due else min(left_s, _POLL_S)
                entry = self._prefetcher.get(wait_s)
                if isinstance(entry, Sample):
                    if self._is_kept(entry):
                        return entry
                    self._drop(entry)
                elif isinstance(entry, End):
                    self._end = entry
                elif is_due or left_s <= wait_s:
                    return None
                left_s -= wait_s
                self._renewer.progress()
        finally:
            self._stats.wait_s += self._clock.monotonic() - started_s
        if self._end is not None and self._end.error is not None:
            raise self._end.error
        return None

    def _is_kept(self, sample: Sample) -> bool:
        with contextlib.suppress(QueueUnavailable):  # then nobody else has it either
            self._renewer.keep_up()  # a pause of this process may have cost it
        return self._renewer.is_kept(sample.token)

    def _drop(self, sample: Sample) -> None:
        """Its lease was lost before it was trained on: the next holder trains on it."""
        self._stats.stale += 1
        self._holdings.settle(sample.token, [sample.ref.sample_id])
        log.warning("lease_lost", lease=sample.token, sample_id=sample.ref.sample_id)
