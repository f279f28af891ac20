"""What crashes leave in a store goes: shards of released samples, orphans, stale temporaries."""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, SampleCorrupt, SchemaError, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.base import FeatureStore
from eaglefeed.storage.orphans import Judged, RefLedger, Released, Releases, ShardState, check_known, judge_shards
from eaglefeed.storage.outage import Outage

__all__ = ["STALE_TEMPORARY_S", "Collected", "Janitor", "collect", "delete_released"]

_PAGE = 1000
_RELEASED_PAGE = 200
_NAMED = 20
_GRACE_S = 60.0
_STEP_S = 5.0
"""What a producer gives its janitor at a time, and one call of the store on top: its own signs of life wait so long."""
STALE_TEMPORARY_S = 3600.0
"""A temporary file of another host that is older belongs to nobody; every write to it makes it young again."""

log = get_logger(__name__)


@dataclass
class Collected:
    """What a janitor deleted (released, orphans, temporaries) and what it left.

    `leased` shards belong to a standing lease, `young` ones are within the grace, `failed` ones could not be deleted;
    `unreadable_keys` are the first of the unreadable ones; `temporaries_left` could not be deleted.
    """

    released: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    temporaries: int = 0
    temporaries_left: int = 0
    kept: int = 0
    leased: int = 0
    young: int = 0
    foreign: int = 0
    unreadable: int = 0
    failed: int = 0
    unreadable_keys: list[str] = field(default_factory=list)

    def count(self, judged: Judged) -> None:
        """Count a shard that stays."""
        if judged.state is not ShardState.GONE:
            setattr(self, judged.state, getattr(self, judged.state) + 1)
        if judged.state is ShardState.UNREADABLE and len(self.unreadable_keys) < _NAMED:
            self.unreadable_keys.append(judged.shard.key)


def delete_released(
    queue: Releases, store: FeatureStore, *, retains: Callable[[], bool] = lambda: False, clock: Clock = SYSTEM_CLOCK
) -> int:
    """Delete the shards of released samples, a page at a time; returns how many samples left the queue's list.

    What a crash or a failing store leaves stays on that list, for the next call; a store that is away ends this one.

    Args:
        queue: the samples.
        store: where the shards lie.
        retains: whether to leave the shards, and only clear the list.
        clock: what a store's errors are measured by.

    Raises:
        QueueUnavailable: the server was away for too long.
    """
    return sum(_released_pages(queue, store, retains, clock, math.inf))


def _released_pages(
    queue: Releases, store: FeatureStore, retains: Callable[[], bool], clock: Clock, step_s: float
) -> Iterator[int]:
    """How many samples left the list, a page or what takes `step_s` at a time."""
    while page := queue.released(_RELEASED_PAGE):
        left, num_gone, failures = deque(page), 0, _Failures(store, clock)
        while left and not failures.outage.is_away:
            gone = _delete_some(left, failures, retain=retains(), end_s=clock.monotonic() + step_s)
            queue.forget(gone)
            num_gone += len(gone)
            yield len(gone)
        failures.tell(num_left=len(page) - num_gone)
        if len(page) < _RELEASED_PAGE or num_gone < len(page):
            return


class _Failures:
    """What a page of released shards met of errors."""

    def __init__(self, store: FeatureStore, clock: Clock) -> None:
        self.store, self.clock, self.outage = store, clock, Outage(clock)
        self._last = ""

    def delete(self, item: Released) -> bool:
        """False where the shard is still there and may be deleted later."""
        try:
            ref = decode_ref(item.payload)
            with self.outage.watch():
                self.store.delete(ref)
        except (SchemaError, SampleCorrupt) as error:  # it names no shard
            log.error("released_ref_unreadable", sample_id=item.id, reason=str(error))  # noqa: TRY400
        except StorageError as error:
            self._last = str(error)
            return False
        return True

    def tell(self, num_left: int) -> None:
        """One line for all of them."""
        if self._last:
            log.warning("released_shards_stay", store=self.store.uri, count=num_left, reason=self._last)


def _delete_some(left: deque[Released], failures: _Failures, *, retain: bool, end_s: float) -> list[str]:
    """Delete shards from the head of `left` until `end_s`, or the store is away; the ids of what is gone."""
    gone = []
    while left and not failures.outage.is_away:
        item = left.popleft()
        if retain or failures.delete(item):
            gone.append(item.id)
        if failures.clock.monotonic() >= end_s:
            break
    return gone


def collect(
    store: FeatureStore,
    ledger: RefLedger,
    *,
    grace_s: float = _GRACE_S,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Collected:
    """Delete what crashes left, and count what is there.

    Args:
        store: of the run, and maybe of others.
        ledger: what the run's queues know.
        grace_s: younger shards are left alone.
        dry_run: only count orphans and temporaries; released samples are left out.
        clock: what ages are measured by.

    Raises:
        ConfigError: the queue does not know this store's shards; nothing was deleted.
        StorageError: the store fails; what was done until then stands.
        QueueUnavailable: the server was away for too long.
    """
    found = Collected()
    for _ in _steps(store, ledger, found, grace_s=grace_s, dry_run=dry_run, clock=clock):
        pass
    return found


def _steps(
    store: FeatureStore,
    ledger: RefLedger,
    found: Collected,
    *,
    grace_s: float,
    dry_run: bool,
    clock: Clock,
    step_s: float = math.inf,
) -> Iterator[None]:
    """A whole pass; a step is a page, or what takes `step_s`. After each the queue may be another one."""
    instance = check_known(store, ledger)
    for queue in () if dry_run else ledger.releases():
        for count in _released_pages(queue, store, partial(ledger.retains, queue.name), clock, step_s):
            found.released += count
            yield
            check_known(store, ledger, instance)
    scan = store.scan()
    while page := list(islice(scan, _PAGE)):
        old = [shard for shard in page if shard.modified_s <= clock.time() - grace_s]
        found.young += len(page) - len(old)
        judged_page, outage = judge_shards(store, ledger, old, clock=clock), Outage(clock)
        check_known(store, ledger, instance)
        end_s = clock.monotonic() + step_s
        for judged in judged_page:
            _deal_with(judged, store, found, outage, dry_run=dry_run)
            if clock.monotonic() >= end_s:
                yield
                check_known(store, ledger, instance)
                end_s = clock.monotonic() + step_s
        yield
    found.temporaries, found.temporaries_left = store.sweep(STALE_TEMPORARY_S, dry_run=dry_run)


def _deal_with(judged: Judged, store: FeatureStore, found: Collected, outage: Outage, *, dry_run: bool) -> None:
    if judged.state is not ShardState.ORPHAN or judged.ref is None:
        found.count(judged)
        return
    try:
        with outage.watch():
            if not dry_run and not store.delete(judged.ref):
                return
    except StorageError as error:
        log.warning("orphan_stays", key=judged.shard.key, reason=str(error))
        found.failed += 1
        if outage.is_away:
            raise
        return
    found.orphans += 1
    found.orphan_bytes += judged.shard.num_bytes


class Janitor:
    """Collects now and then beside other work, a bounded piece a call. Several of a run do each other no harm.

    Args:
        store: of the run.
        ledger: what the run's queues know.
        interval_s: between two passes, with jitter: half of it to one and a half.
        clock: what intervals and ages are measured by.
        jitter: a number from 0 to 1.
    """

    def __init__(
        self,
        store: FeatureStore,
        ledger: RefLedger,
        *,
        interval_s: float = 600.0,
        clock: Clock = SYSTEM_CLOCK,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store, self._ledger, self._clock = store, ledger, clock
        self._interval_s, self._jitter = interval_s, jitter
        self._steps: Iterator[None] | None = None
        self._found = Collected()
        self._refused = False
        self._wait()

    def maybe_run(self) -> None:
        """Do the next piece of work, if it is time. A store that fails, or is another queue's, is told and left.

        Raises:
            QueueUnavailable: the server was away for too long.
        """
        if self._steps is None:
            if self._clock.monotonic() < self._next_s:
                return
            self._found = Collected()
            self._steps = _steps(
                self._store,
                self._ledger,
                self._found,
                grace_s=_GRACE_S,
                dry_run=False,
                clock=self._clock,
                step_s=_STEP_S,
            )
        try:
            next(self._steps)
        except StopIteration:
            log.info("store_collected", **asdict(self._found))
            self._wait()
        except ConfigError as error:
            self._refuse(error)
        except StorageError as error:
            log.warning("store_not_collected", store=self._store.uri, reason=str(error))
            self._wait()

    def _refuse(self, error: ConfigError) -> None:
        if not self._refused:
            log.warning("store_not_collected", store=self._store.uri, reason=str(error))
        self._refused = True
        self._wait()

    def _wait(self) -> None:
        self._steps = None
        self._next_s = self._clock.monotonic() + self._interval_s * (0.5 + self._jitter())
