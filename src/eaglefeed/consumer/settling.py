"""What became of the samples that a training loop took: acknowledged, committed, and their shards deleted."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from eaglefeed.clock import Clock
from eaglefeed.consumer.cleaning import Cleaner
from eaglefeed.consumer.holdings import StreamStats, bear_outage
from eaglefeed.consumer.state import StreamState, read_state, seen_in
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import AckResult, LeaseQueue
from eaglefeed.queue.holdings import Holdings
from eaglefeed.schema.contract import RETAIN_RECORD
from eaglefeed.storage.base import FeatureStore
from eaglefeed.storage.janitor import delete_released

__all__ = ["Settler"]

_CLEAN_S, _CLEAN_LAST_S = 60.0, 600.0
"""How long a stop waits for shards to be deleted, and how long the end of a run, after which nobody may come."""
_GIVE_BACK_S = 30.0

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
        retain: bool,
        outage_s: float,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._samples, self._store, self._holdings, self._stats = samples, store, holdings, stats
        self.session, self._retain = 0, retain
        self._outage_s, self._stop, self._clock = outage_s, stop, clock
        self._taken: dict[int, list[str]] = defaultdict(list)
        self._seen: dict[int, list[str]] = {}
        self._step = 0
        self._cleaner = Cleaner(self.delete_released)
        if retain and store.stays_with_producer:
            fix = "leave retain out, or produce into another kind of store"
            raise ConfigError(
                "its samples cannot be retained, they die with their producer", subject=store.uri, fix=fix
            )
        if retain:  # for the janitors, which know of no stream
            samples.agree(RETAIN_RECORD + samples.name, b"1")

    def add(self, token: int, sample_id: str) -> None:
        """It was taken: the next `ack` is for it too. Its tensors are the loop's alone."""
        self._taken[token].append(sample_id)

    def ack(self, step: int | None, sample_ids: Sequence[str] | None) -> int:
        """Acknowledge what was taken, or those of it; returns how many samples were."""
        return sum(self._ack_lease(token, ids, step) for token, ids in self._chosen(sample_ids))

    def commit(self, step: int) -> int:
        """Settle what was acknowledged at `step` or before; returns how many samples."""
        count = self._call(lambda: self._samples.commit(step, session=self.session))
        self._seen = {at: ids for at, ids in self._seen.items() if at > step}
        return count

    def state_dict(self) -> StreamState:
        """The ids that were acknowledged since the last commit, in the order of their steps."""
        seen = [sample_id for step in sorted(self._seen) for sample_id in self._seen[step]]
        return StreamState(run=self._samples.namespace, queue=self._samples.name, step=self._step, seen=seen)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take the queue back to a checkpoint, and act in the session that begins so."""
        checked = read_state(state)
        seen = seen_in(checked, self._samples.namespace, self._samples.name)
        self.session = self._call(lambda: self._samples.restore(checked["step"], seen=seen))
        self._step = checked["step"]

    def give_back(self) -> bool:
        """Give back all that is held, at a clean end; False where the queue is away, and what is left runs out."""
        held, end_s = self._holdings.drain(), self._clock.monotonic() + _GIVE_BACK_S
        left, reason = sorted(held), f"not all given back within {_GIVE_BACK_S:g} s"
        try:
            # Each goes back to the head: the newest lease first, so that the oldest comes out on top again.
            while left and self._clock.monotonic() < end_s:
                given = self._samples.nack(left[-1], held[left[-1]], reason="stream closed", delay_s=0)
                self._stats.returned += len(given.ok)
                left.pop()
        except QueueUnavailable as error:
            reason = str(error)
        if left:
            num_samples = sum(len(held[token]) for token in left)
            log.warning("leases_left_to_expire", leases=left, num_samples=num_samples, reason=reason)
        return not left

    def clean(self) -> None:
        """Something may have been released: its shards are deleted in the background."""
        self._cleaner.ask()

    def close(self, *, drained: bool = False) -> bool:
        """Give back all that is held, and see what was released deleted; False where the queue is away."""
        is_there = self.give_back()
        clean_s = _CLEAN_LAST_S if drained else _CLEAN_S
        self._cleaner.close(clean_s if is_there else 0.0)
        return is_there

    def delete_released(self) -> int:
        """Delete the shards that no group needs any more, unless a stream of the run retains them; returns how many."""
        return self._call(lambda: delete_released(self._samples, self._store, retains=self._retains, clock=self._clock))

    def _retains(self) -> bool:
        return self._retain or RETAIN_RECORD + self._samples.name in self._samples.agreed()

    def _chosen(self, sample_ids: Sequence[str] | None) -> list[tuple[int, list[str]]]:
        """Of what was taken, the ids of each lease that are to be acknowledged."""
        if sample_ids is None:
            return list(self._taken.items())
        wanted = set(sample_ids)
        if unknown := wanted.difference(*self._taken.values()):
            fix = "acknowledge each sample once, after the take that brought it"
            got = ", ".join(sorted(unknown)[:5])
            raise ConfigError("samples that are not in hand", subject="ack", got=got, fix=fix)
        chosen = [(token, [each for each in ids if each in wanted]) for token, ids in self._taken.items()]
        return [(token, ids) for token, ids in chosen if ids]

    def _ack_lease(self, token: int, ids: list[str], step: int | None) -> int:
        def ack() -> AckResult:
            self._holdings.settle(token, ids)
            try:
                return self._samples.ack(token, ids, step=step, session=self.session)
            except QueueUnavailable:
                self._holdings.add(token, ids)
                raise

        result = self._call(ack)
        self._taken[token] = [each for each in self._taken[token] if each not in set(ids)]
        if not self._taken[token]:
            del self._taken[token]
        self._stats.acked += len(result.ok)
        self._stats.stale += len(result.stale)
        if step is not None:
            self._step = step
            self._seen.setdefault(step, []).extend(result.ok)
        if result.stale:
            log.warning("ack_refused", lease=token, sample_ids=list(result.stale))
        return len(result.ok)

    def _call(self, call: Callable[[], T]) -> T:
        return bear_outage(call, outage_s=self._outage_s, stop=self._stop, clock=self._clock)
