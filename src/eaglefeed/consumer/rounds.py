"""RoundStream: the samples of a run for all ranks of a training job, a round for each optimizer step."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.empty import empty_batch
from eaglefeed.consumer.expand import TargetHead, as_trained_on
from eaglefeed.consumer.feeding import Feeder, IdleAsked, Ready
from eaglefeed.consumer.gathering import Due, Over
from eaglefeed.consumer.holdings import LeaseTerms
from eaglefeed.consumer.materialize import Materializer
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.round_queue import RoundQueue, RoundStats
from eaglefeed.consumer.state import StreamState, already_begun, read_state
from eaglefeed.errors import ConfigError, EaglefeedError, RankGone, StaleLease
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.storage.base import FeatureStore, Verify
from eaglefeed.storage.buffers import BufferRing

__all__ = ["RoundStats", "RoundStream", "empty_batch"]

_POLL_S, _JOIN_S, _BUFFER_S = 0.5, 60.0, 120.0


class RoundStream:
    """A SampleStream for the ranks of a job: every rank gets the same number of batches, whatever fails.

    A round holds `samples_per_step` samples for each rank. Rank 0 leases it and tells every rank which samples are its
    own; each reads them itself, ahead of its training loop. In the place of a sample that cannot be read, or is not
    there, a rank gets `empty_batch`; rank 0 gives it back, or makes it a dead letter, with the reason. A round of which
    nothing is left is passed over by all.

    All ranks make the same calls in the same order: they get a round in the same call to `take`, or nothing, or the
    same error. `ack` and `commit` tell the queue on rank 0 alone, after the optimizer step. When one rank is stopped,
    all end at the same round; when one dies, the others get RankGone, and the leases run out or are given back.

    Args:
        samples: the queue of refs; on rank 0, None elsewhere.
        store: where their tensors lie, on every rank.
        ranks: the job's, or Ranks.alone().
        samples_per_step: samples a round has for each rank.
        contract: the run's contract.
        draft_vocab_size: D, of empty batches.
        consumer: the job's name, unique in the run.
        prefetch: rounds that are leased and materialized ahead.
        held: samples that the loop keeps at a time on a rank; those of two rounds by default. Memory is bounded by
            these and the samples of prefetch + 1 rounds.
        prompts, visibility_timeout_s, stall_timeout_s, max_lease_age_s, max_attempts, values, retain,
        fail_without_producers, producer_grace_s, outage_s, device, head, clock: as SampleStream's.
    """

    def __init__(
        self,
        samples: LeaseQueue | None,
        store: FeatureStore,
        *,
        ranks: Ranks,
        samples_per_step: int,
        contract: RunContract,
        draft_vocab_size: int,
        consumer: str,
        prompts: LeaseQueue | None = None,
        visibility_timeout_s: float = 60.0,
        stall_timeout_s: float = 600.0,
        max_lease_age_s: float = 1800.0,
        prefetch: int = 2,
        held: int | None = None,
        max_attempts: int = 5,
        values: Verify = "always",
        retain: bool = False,
        fail_without_producers: bool = False,
        producer_grace_s: float = 60.0,
        outage_s: float = 120.0,
        device: torch.device | str = "cpu",
        head: TargetHead | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stats = RoundStats()
        self.round_ids: tuple[str, ...] = ()
        self.commit_due = False
        self._ranks, self._size, self._device, self._head = ranks, samples_per_step, torch.device(device), head
        self._clock, self._stop, self._step, self._ahead = clock, threading.Event(), 0, prefetch
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._feeder: Feeder | None = None
        self._over: Over | None = None
        self._num_taken = 0
        self._setup = {
            "samples_per_step": str(samples_per_step),
            "prefetch": f"{prefetch} rounds",
            "contract": contract.id,
            "draft_vocab_size": str(draft_vocab_size),
        }
        self._empty = empty_batch(contract, draft_vocab_size, device=device)
        kept = 2 * samples_per_step if held is None else held
        ring = BufferRing(
            (prefetch + 1) * samples_per_step + kept,
            deadline_s=min(_BUFFER_S, ranks.timeout_s / 2),  # or the other ranks would take this one for gone
            device=self._device,
            stop=self._stop,
            clock=clock,
        )
        self._materializer = Materializer(store, ring, contract=contract, values=values, head=head)
        self._queue: RoundQueue | None = None
        if ranks.is_first:
            if samples is None:
                raise ConfigError("rank 0 leases for all ranks", subject="RoundStream", wanted="samples", got=None)
            terms = LeaseTerms(
                visibility_timeout_s=visibility_timeout_s,
                stall_timeout_s=stall_timeout_s,
                max_lease_age_s=max_lease_age_s,
                max_attempts=max_attempts,
                retain=retain,
                fail_without_producers=fail_without_producers,
                producer_grace_s=producer_grace_s,
                outage_s=outage_s,
            )
            self._queue = RoundQueue(
                samples,
                store,
                consumer=consumer,
                prompts=prompts,
                terms=terms,
                stats=self.stats,
                stop=self._stop,
                clock=clock,
            )

    @property
    def world_size(self) -> int:
        """Ranks that share its rounds."""
        return self._ranks.world_size

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: all ranks say so after the same call to `take`."""
        return self._over is not None

    @property
    def drained(self) -> bool:
        """Whether the queue had nothing more to lease."""
        return self._over is not None and self._over.drained

    def take(self, n: int, *, wait_s: float | None = None) -> list[Eagle3TargetBatch]:
        """This rank's `n` batches of the next round; none at the end, when a commit is due, or when none came.

        Where nothing comes, a round may wait in part for what is missing: its samples stay leased.

        Args:
            n: samples_per_step.
            wait_s: how long to wait; rank 0's holds for all. None waits for the end, or a commit that is due.

        Raises:
            ConfigError: another `n`, or the ranks were not given the same.
            RankGone: a rank has died, or does not come.
            BuffersHeld: a loop keeps more samples than it said.
            NoProducers: prompts remain and no producer lives, if the stream was told to fail then.
            StaleLease: another trainer has restored the queue.
            QueueUnavailable: the server was away for longer than `outage_s`.
        """
        if n != self._size:
            raise ConfigError("not a round's share", subject="take", wanted=self._size, got=n)
        started_s = self._clock.monotonic()
        try:
            found = self._next(wait_s)
        finally:
            self.stats.wait_s += self._clock.monotonic() - started_s
        if found is None:
            return []
        entry, is_there = found
        first = self._ranks.rank * n
        mine = is_there[first : first + n]
        batches = [
            as_trained_on(batch.to(self._device), self._head) if batch is not None and there else self._empty
            for batch, there in zip(entry.batches, mine, strict=True)
        ]
        # Not earlier: what an error keeps from the loop, the loop's next ack must not settle.
        self.round_ids = tuple(each for each, there in zip(entry.ids, is_there, strict=True) if there)
        if self._queue is not None:
            self._queue.taken(entry.held, is_there)
            self.stats.padded += is_there.count(False)
        else:
            self.stats.delivered += sum(mine)
            self.stats.padded += mine.count(False)
        return batches

    def ack(self, step: int | None = None, sample_ids: Sequence[str] | None = None) -> int:
        """Acknowledge the rounds that were taken, or those samples of them; on rank 0, all as SampleStream's."""
        self._step = self._step if step is None else step
        return self._settle(lambda queue: queue.ack(step, sample_ids))

    def commit(self, step: int) -> int:
        """Settle what was acknowledged at `step` or before, and delete its shards; on rank 0, as SampleStream's."""
        self.commit_due = False
        return self._settle(lambda queue: queue.commit(step))

    def state_dict(self) -> StreamState:
        """What a checkpoint keeps, on rank 0; see SampleStream."""
        if self._queue is not None:
            return self._queue.settler.state_dict()
        return StreamState(run="", queue="", step=self._step, seen=[])

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take the queue back to a checkpoint, on rank 0; raises as SampleStream's."""
        if self._feeder is not None:
            raise already_begun()
        if self._queue is not None:
            self._queue.settler.load_state_dict(state)
        self._step = read_state(state)["step"]

    def stop(self) -> None:
        """Make all ranks end at the same round, within a second or two. Safe in a signal handler."""
        self._stop.set()
        self._events.put(Over())

    def close(self) -> None:
        """End the job's stream, and give back what is not acknowledged. Safe to repeat."""
        self.stop()
        if self._feeder is not None:
            self._feeder.join(_JOIN_S)
        if self._queue is not None:
            self._queue.close(drained=self.drained)

    def __enter__(self) -> "RoundStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._feeder is not None:
            told = error if isinstance(error, EaglefeedError) else EaglefeedError("the loop failed", got=repr(error))
            self._feeder.fail(told)
        self.close()
        reason = None if self._feeder is None else self._feeder.failure
        if isinstance(error, RankGone) and reason is not None and not isinstance(reason, RankGone):
            raise reason from error  # the other rank said why it left

    def _settle(self, call: Callable[[RoundQueue], int]) -> int:
        if self._queue is None:
            return 0
        try:
            return call(self._queue)
        except StaleLease as error:  # a newer session ends the stream
            if self._feeder is not None:
                self._feeder.fail(error)
            raise

    def _begin(self) -> Feeder:
        gatherer = None
        if self._queue is not None:
            size = self._ranks.world_size * self._size
            gatherer = self._queue.begin(self._events, round_size=size, ahead=self._ahead)
        self._feeder = Feeder(
            self._ranks,
            self._materializer,
            size=self._size,
            setup=self._setup,
            gatherer=gatherer,
            events=self._events,
            stop=self._stop,
        )
        return self._feeder

    def _next(self, wait_s: float | None) -> tuple[Ready, list[bool]] | None:
        """The next round of which something is left, and what is; or nothing, for all ranks alike."""
        while self._over is None:
            entry = self._entry(math.inf if wait_s is None else wait_s)
            self._num_taken += 1
            if isinstance(entry, Ready):
                is_there = self._agreed(entry)
                if any(is_there):
                    return entry, is_there
                del entry  # and its memory, before the next is waited for
            elif isinstance(entry, Over):
                self._over = entry
                if entry.error is not None:
                    raise entry.error
            else:
                self.commit_due = isinstance(entry, Due)
                return None
        return None

    def _entry(self, left_s: float) -> Any:
        """What the feeder has next; rank 0 asks for a word to all once it has waited long enough."""
        feeder = self._feeder or self._begin()
        has_asked = not self._ranks.is_first
        while True:
            if self._queue is not None:
                self._queue.renewer.progress()
            poll_s = _POLL_S if has_asked else min(_POLL_S, left_s)
            if (entry := feeder.get(poll_s)) is not None:
                return entry
            left_s -= poll_s
            if left_s <= 0 and not has_asked:
                self._events.put(IdleAsked(self._num_taken))
                has_asked = True

    def _agreed(self, entry: Ready) -> list[bool]:
        """Which samples of a round all ranks take, by rank 0's word: it knows what failed, and whose lease was lost."""
        word = torch.zeros(1 + len(entry.ids), dtype=torch.uint8)
        if self._queue is not None and self._queue.gatherer is not None and self._feeder is not None:
            self._queue.gatherer.taken()
            word[0] = self._stop.is_set() or self._feeder.asked_to_stop.is_set()
            if not entry.is_void:
                word[1:] = torch.tensor(self._queue.still_held(entry.held))
        self._ranks.share([word])
        must_stop, *is_there = [bool(each) for each in word.tolist()]
        if must_stop:
            self._over = Over()
            return [False] * len(is_there)
        return is_there
