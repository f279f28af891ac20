"""The producer: wait for room, lease prompts, run the target, and write each sample while the next one is made."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError, QueueUnavailable, StorageError, StoreFull
from eaglefeed.logs import get_logger
from eaglefeed.producer.accounts import Accounts, ProducerStats
from eaglefeed.producer.agreement import RunAgreement
from eaglefeed.producer.making import SampleMaker
from eaglefeed.producer.outage import StoreAway, StoreWatch
from eaglefeed.producer.room import Room
from eaglefeed.producer.staying import Keeper
from eaglefeed.producer.writing import SampleWriter, Writing
from eaglefeed.queue.base import DrainState, Lease, LeasedItem, LeaseQueue
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.batch import Eagle3TargetBackend
from eaglefeed.schema.contract import RunContract
from eaglefeed.storage.base import FeatureStore

__all__ = ["ProducerStats", "ProducerWorker"]

_WAIT_S = 1.0
_FULL_PAUSE_S, _RECALL_S = 5.0, 10.0
_LAST_WRITE_S = 5.0

log = get_logger(__name__)


class ProducerWorker:
    """Turns prompts into samples until the prompts are drained or it is told to stop.

    At most two samples are in memory: one that the target makes, and one that is written and handed off meanwhile.

    Args:
        prompts: the queue it leases from.
        samples: the queue it hands off to, of the same run.
        store: where shards go.
        target: makes the tensors.
        contract: the run's contract as this producer would write it; its max_length is taken from the first prompt.
        assets: what trainers need of the target, written once a run.
        run_id: the run.
        name: this worker's name, unique in the run.
        lease_batch: prompts a lease.
        visibility_timeout_s: how long a lease lasts without a renewal.
        stall_timeout_s: leases are no longer renewed when no sample was finished in this time, and a store that takes
            longer for one ends the run.
        max_lease_age_s: a lease is not renewed beyond this age.
        max_attempts: deliveries after which a prompt that fails is a dead letter.
        outage_s: a store that is out of reach for longer ends the run; until then its prompts are given back uncounted.
        tidy: called between rounds: a bounded piece of a janitor's work.
        clock: what `paused_s` is measured with, and pauses wait on.
    """

    def __init__(
        self,
        *,
        prompts: LeaseQueue,
        samples: LeaseQueue,
        store: FeatureStore,
        target: Eagle3TargetBackend,
        contract: RunContract,
        assets: Callable[[], tuple[dict[str, Tensor], dict[str, str]]],
        run_id: str,
        name: str,
        lease_batch: int = 4,
        visibility_timeout_s: float = 60.0,
        stall_timeout_s: float = 600.0,
        max_lease_age_s: float = 1800.0,
        max_attempts: int = 5,
        outage_s: float = 120.0,
        tidy: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keeper = Keeper(name, store, prompts, samples, run_id, clock)
        name = self._keeper.name
        self._prompts, self._samples, self._store, self._name = prompts, samples, store, name
        self._lease_batch, self._timeout_s, self._stall_timeout_s = lease_batch, visibility_timeout_s, stall_timeout_s
        self._tidy, self._clock, self._outage_s = tidy, clock, outage_s
        self._watch, self._room = StoreWatch(clock), Room(samples, store)
        self._agreement = RunAgreement(store, samples, contract, assets, run_id=run_id, name=name)
        self._maker = SampleMaker(target, self._agreement, run_id=run_id, store_uri=store.uri)
        self._renewer = LeaseRenewer(
            prompts,
            visibility_timeout_s=visibility_timeout_s,
            stall_timeout_s=stall_timeout_s,
            max_lease_age_s=max_lease_age_s,
            on_renewed=lambda: prompts.beat("producer", name),
        )
        self._accounts = Accounts(prompts, self._renewer, max_attempts=max_attempts)
        self._writing: Writing | None = None
        self._idle = False
        self._recalled_s = clock.monotonic()

    @property
    def stats(self) -> ProducerStats:
        """The counts so far."""
        return self._accounts.stats

    def run(self, stop: threading.Event) -> ProducerStats:
        """Work until the prompts are drained, or `stop` is set: then what is begun is finished, the rest given back.

        Over a store whose samples die with their producer, it lives on until nobody needs any that one keeps. An error
        ends it too: after at most _LAST_WRITE_S for the sample that is written, all it holds is given back.

        Raises:
            ConfigError: no sample can be written to the store, whatever the wait.
            ContractMismatch: this producer differs from the run's contract.
            QueueUnavailable: the server was away for too long.
            StorageError: the store did not come to an end with a sample, or was away for longer than `outage_s`; or its
                room is taken by what nobody needs.
        """
        self._store.probe()
        with suppress(StorageError):  # a store that is away is borne when the first sample is made
            self._agreement.check()
        self._keeper.begin()
        self._writer = SampleWriter(
            self._prompts, self._samples, self._store, self._accounts.settle, self._keeper.holder
        )
        self._renewer.start()
        ended_by = ""
        try:
            while not stop.is_set() and self._round(stop):
                pass
            with suppress(StoreFull, StoreAway):
                self._collect()
            while self._keeper.is_needed(stopping=stop.is_set()):
                self._show_life()
                self._clock.sleep(_WAIT_S)
        except Exception as error:
            ended_by = EaglefeedError.text_of(error)
            raise
        finally:
            self._writer.close(_LAST_WRITE_S)
            self._renewer.stop()
            self._leave(ended_by)
        return self.stats

    def _leave(self, ended_by: str) -> None:
        try:
            self._accounts.give_all_back("producer ended")
            self._prompts.farewell("producer", self._name, error=ended_by)
        except QueueUnavailable as error:
            log.warning("leases_left_to_run_out", queue=self._prompts.name, reason=str(error))

    def _round(self, stop: threading.Event) -> bool:
        self._show_life()
        if self._clock.monotonic() - self._recalled_s >= _RECALL_S:
            self._recall()
        try:
            return not self._has_room() or self._lease_once(stop)
        except StoreFull as error:
            self._room.was_missing(error)
        except StoreAway as away:
            if away.away_s > self._outage_s:
                raise away.error from None
        if not stop.is_set():  # here no error keeps a sample any more
            self._clock.sleep(_FULL_PAUSE_S)
            self.stats.paused_s += _FULL_PAUSE_S
        return True

    def _show_life(self) -> None:
        self._prompts.beat("producer", self._name)
        self._tidy()

    def _lease_once(self, stop: threading.Event) -> bool:
        lease = self._prompts.lease(
            self._lease_batch,
            visibility_timeout_s=self._timeout_s,
            consumer=self._name,
            wait_s=0.0 if self._writing else _WAIT_S,
        )
        if isinstance(lease, Lease):
            self._idle = False
            self._accounts.add(lease)
            self._work_through(lease, stop)
        elif self._writing:
            self._collect()
        elif lease.state is DrainState.DRAINED:
            return self._goes_on()
        else:
            if not self._idle:
                log.info("producer_waits_for_prompts", queue=self._prompts.name)
            self._idle = True
        return True

    def _goes_on(self) -> bool:
        """Whether there may be something to do although the prompts are drained."""
        if self._keeper.is_needed():  # rounds look for prompts of the dead now and then
            self._samples.close()
            self._clock.sleep(_WAIT_S)
            return True
        if self._recall():
            return True
        self._samples.close()
        return False

    def _recall(self) -> int:
        """Take prompts back whose samples were held by a producer that died."""
        self._recalled_s = self._clock.monotonic()
        if count := self._prompts.recall(self._samples):
            log.warning("prompts_recalled", count=count, queue=self._prompts.name)
        return count

    def _has_room(self) -> bool:
        if self._is_room():
            self._keeper.end_wait()
            return True
        self._collect()
        started = self._clock.monotonic()
        self._keeper.tell_wait()
        has_room = self._samples.wait_for_room(_WAIT_S) and self._store.wait_for_room(_WAIT_S)
        if has_room and not self._room.is_there():  # the disk is full, which nobody can be woken by
            self._clock.sleep(_WAIT_S)
            has_room = False
        self.stats.paused_s += self._clock.monotonic() - started
        if not has_room and self._prompts.stats().drained:
            return True  # none is needed, and who needs the producer still is for the lease to find out
        if not has_room:
            self._keeper.check_room(self._outage_s)
        return has_room

    def _is_room(self) -> bool:
        if self._writing is not None and self._room.is_last(self._writing.num_bytes):
            self._collect()
        return self._room.is_there()

    def _work_through(self, lease: Lease, stop: threading.Event) -> None:
        for index, item in enumerate(lease.items):
            rest = [left.id for left in lease.items[index:]]
            if stop.is_set() or self._renewer.is_lost(lease.token):
                self._accounts.give_back(lease.token, rest, "producer stopped")
                return
            try:
                if index and not self._is_room():
                    self._accounts.give_back(lease.token, rest, "no room for more samples")
                    return
                self._prompts.beat("producer", self._name)
                self._make(lease.token, item)
            except (StoreFull, StoreAway):
                self._accounts.give_back(lease.token, rest, "no store to write to")
                raise

    def _make(self, token: int, item: LeasedItem) -> None:
        """Make a sample while the one before is written, and have it written next.

        Raises:
            ContractMismatch: this producer differs from the run's contract.
            StoreFull: there was no room for the one before, nor will there be for this one.
            StoreAway: likewise, for a store out of reach.
            StorageError: the store hangs.
        """
        make = partial(self._maker.make, item.payload, token)
        made = self._accounts.outcome(token, item, partial(self._watch.document, make))
        if made is not None:
            self._collect()
            self._writing = self._writer.write(token, item, made)

    def _collect(self) -> None:
        """Wait for the sample that is being written, and account for what became of it.

        Raises:
            StoreFull: there was no room for it, and it was given back.
            StoreAway: likewise, for a store out of reach.
            StorageError: the store hangs.
        """
        if self._writing is None:
            return
        token, item, started_s = self._writing.token, self._writing.item, self._clock.monotonic()
        has_ended = self._writing.wait(self._stall_timeout_s)
        self.stats.write_wait_s += self._clock.monotonic() - started_s
        if not has_ended:
            fix = "see why the store hangs; the prompt is given back, and its sample made again"
            raise StorageError(f"not written in {self._stall_timeout_s:g} s", subject=item.id, fix=fix)
        writing, self._writing = self._writing, None
        try:
            ref = self._accounts.outcome(token, item, partial(self._watch.put, item.id, writing.result))
        except (StoreFull, StoreAway):
            self._accounts.give_back(token, [item.id], "no store to write to")
            raise
        if ref is not None:
            self._accounts.produced(ref)
