"""SampleStream: leases in, Eagle3TargetBatches out, acknowledged after they were trained on."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.expand import TargetHead
from eaglefeed.consumer.holdings import LeaseTerms, StreamStats
from eaglefeed.consumer.materialize import Materializer
from eaglefeed.consumer.prefetch import Prefetcher
from eaglefeed.consumer.state import StreamState, already_begun
from eaglefeed.consumer.taking import Taker
from eaglefeed.consumer.trainer_queue import TrainerQueue
from eaglefeed.errors import ConfigError, StaleLease
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.storage.base import FeatureStore, Verify
from eaglefeed.storage.buffers import BufferRing

__all__ = ["SampleStream", "StreamStats"]

_JOIN_S = 60.0


class SampleStream:
    """Batches for a training loop, materialized ahead in the background.

    A plain loop acknowledges each batch when it asks for the next one:

        for batch in stream:
            train_on(batch)

    `take` never acknowledges by itself. A loop with checkpoints (examples/my_trainer.py has one) acknowledges with its
    step, keeps `state_dict()` in each checkpoint, and commits the step of the oldest one that it keeps. Started again,
    it calls `load_state_dict`, and sees every sample that the checkpoint has not seen, once.

    What was not acknowledged when the stream is closed goes back to the queue; after a crash its lease runs out, or the
    next `load_state_dict` ends it. When another trainer has taken the queue back, `take`, `ack` and `commit` raise
    StaleLease: this one must stop. A batch never changes, also after its ack; its memory is used again when none of its
    tensors (nor a view of one) lives any more.

    Args:
        samples: the queue of refs.
        store: where their tensors lie.
        consumer: this trainer's name, unique in the run.
        contract: the run's contract (`load_run_assets` has it); samples of another, or that are not what it says, are
            dead letters, and ids are held against its vocab_size. Its id checks no more than ids do; "" takes any.
        prompts: the run's prompts queue, to tell slow producers from dead ones; None never does.
        visibility_timeout_s: how long a lease lasts without a renewal.
        max_lease_age_s: a lease is not renewed beyond this age; take what is acknowledged together well within it.
        stall_timeout_s: leases are no longer renewed when the loop asked for nothing in this time.
        lease_batch: samples a lease.
        prefetch: samples that are materialized ahead.
        held: samples that the loop keeps at a time, with those of a loop variable while the next are taken: memory is
            bounded by prefetch + held + 1 samples as they are stored. Where `head` or fp8 makes more of them, add what
            was made of the prefetch + 1 ahead (decoded) and of those that the loop keeps (target_probs too).
        max_attempts: deliveries after which a sample that cannot be read is a dead letter.
        values: whose values are checked: every sample's, 1 in 16, or none.
        retain: keep shards after their samples are released.
        fail_without_producers: raise NoProducers when prompts remain and no producer lived for `producer_grace_s`, and
            PeerGone when one that keeps samples has not answered for so long.
        producer_grace_s: that time; a warning or a logged error comes after it in any case.
        outage_s: how long the queue may be out of reach before QueueUnavailable is raised.
        device: where batches go.
        head: of a run with last_hidden_states, on `device`: makes target_probs of them. None takes the samples of other
            runs.
        clock: what waits are measured with.
    """

    def __init__(
        self,
        samples: LeaseQueue,
        store: FeatureStore,
        *,
        consumer: str,
        contract: RunContract | str = "",
        prompts: LeaseQueue | None = None,
        visibility_timeout_s: float = 60.0,
        stall_timeout_s: float = 600.0,
        max_lease_age_s: float = 1800.0,
        lease_batch: int = 4,
        prefetch: int = 4,
        held: int = 16,
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
        self.stats = StreamStats()
        self._held = held
        self._stop = threading.Event()
        device = torch.device(device)
        ring = BufferRing(prefetch + held + 1, device=device, stop=self._stop, clock=clock)
        materializer = Materializer(store, ring, contract=contract, values=values, head=head)
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
        self._queue = queue = TrainerQueue(
            samples,
            store,
            consumer=consumer,
            prompts=prompts,
            terms=terms,
            stats=self.stats,
            stop=self._stop,
            clock=clock,
        )
        self._taker = Taker(
            lambda: Prefetcher(
                queue.leaser(), materializer, lease_batch=lease_batch, prefetch=prefetch, stop=self._stop
            ),
            queue.settler,
            holdings=queue.holdings,
            renewer=queue.renewer,
            stats=self.stats,
            device=device,
            head=head,
            stop=self._stop,
            clock=clock,
        )

    def __iter__(self) -> Iterator[Eagle3TargetBatch]:
        """Yield batches until the queue is drained; each is settled for good when the next one is asked for."""
        while batches := self._taker.take(1, None, 0.0, heed_commit=False):
            yield batches.pop()  # it is the loop's alone
            self.ack()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the queue is drained, or the stream was stopped."""
        return self._taker.ended

    @property
    def drained(self) -> bool:
        """Whether the queue had nothing more to lease."""
        return self._taker.drained

    @property
    def commit_due(self) -> bool:
        """Whether a commit is due; until then, `take` waits for nothing.

        The queue has no room, or nothing has come for half a minute: the store may have none, which no count shows.
        """
        return self._taker.commit_due

    @property
    def round_ids(self) -> tuple[str, ...]:
        """The ids of the samples that were taken last."""
        return self._taker.ids

    def take(self, n: int, *, wait_s: float | None = None, linger_s: float = 5.0) -> list[Eagle3TargetBatch]:
        """Up to `n` batches; none at the end of the stream, when a commit is due, or when none came in `wait_s`.

        What it had in hand when it raised is not taken, and no `ack` is for it: it goes back when the stream is closed.

        Args:
            n: most batches to take, at most `held`.
            wait_s: how long to wait for the first; None waits for the end of the stream or a commit that is due.
            linger_s: how long to wait for each other.

        Raises:
            ConfigError: `n` is more than `held`.
            BuffersHeld: the loop keeps more samples than it said, and none came back; names them.
            NoProducers: prompts remain and no producer lives, if the stream was told to fail then.
            StaleLease: another trainer has restored the queue.
            QueueUnavailable: the server was away for longer than `outage_s`.
        """
        if n > self._held:
            fix = (
                f"pass held={n} to SampleStream, or {2 * n} for a loop that keeps a step's batches until the next one's"
            )
            raise ConfigError(
                "more than the loop may keep", subject="take", wanted=f"held {self._held}", got=n, fix=fix
            )
        return self._taker.take(n, wait_s, linger_s, heed_commit=True)

    def ack(self, step: int | None = None, sample_ids: Sequence[str] | None = None) -> int:
        """Acknowledge what was taken; returns how many samples the queue took it for.

        A sample whose lease was lost meanwhile is not among them: its next holder has it. It is counted and logged.

        An outage of the queue is borne for `outage_s`. Where it lasted longer than the queue's client repeats a call,
        and only the reply was lost in it, the repeated call finds its samples stale: they are settled all the same.

        Args:
            step: the training step that learned them, until whose `commit` they may come again. None settles them for
                good, and deletes the shards of those that no other group needs, unless they are retained.
            sample_ids: those that were trained on, for a loop that takes ahead of its steps; None are all.

        Raises:
            ConfigError: ids that were not taken, or are acknowledged already.
            StaleLease: another trainer has restored the queue.
            QueueUnavailable: the outage is longer; what was not settled can be acknowledged again.
        """
        with self._in_session():
            return self._queue.ack(step, sample_ids)

    def commit(self, step: int) -> int:
        """Settle what was acknowledged at `step` or before, and delete its shards; returns how many samples.

        Commit the step of the oldest checkpoint that you keep: none before it can be restored any more.

        Raises:
            StaleLease: another trainer has restored the queue.
            QueueUnavailable: the outage is longer than `outage_s`. Safe to repeat.
        """
        with self._in_session():
            count = self._queue.commit(step)
        self._taker.committed()
        return count

    def state_dict(self) -> StreamState:
        """What a checkpoint keeps: the step, and the ids acknowledged with a step since the last commit."""
        return self._queue.settler.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take the queue back to a checkpoint: what it has not seen comes again. An earlier epoch's begins this one.

        Where an earlier start may have saved nothing, load the new stream's own `state_dict()`.

        Raises:
            ConfigError: batches were taken already, or the state is of a later epoch or another queue.
            ContractMismatch: it is of a training without a queue.
            SchemaError: it is no stream's state.
            QueueError: a later step is committed: what it learned cannot come again.
        """
        if self._taker.has_begun:
            raise already_begun()
        self._queue.settler.load_state_dict(state)

    def stop(self) -> None:
        """Make `take` return at once, with nothing from then on. Safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop leasing and give back what is not acknowledged. Safe to repeat."""
        self._stop.set()
        self._taker.join(_JOIN_S)
        self._queue.close(drained=self.drained)

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _in_session(self) -> Iterator[None]:
        """A newer session ends the stream."""
        try:
            yield
        except StaleLease as error:
            self._taker.end(error)
            raise
