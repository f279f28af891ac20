"""The lease queue's interface: who works on what, and for how long.

An item is an id with a payload. To each group of its queue it is in exactly one of these states:

    put ─▶ ready ─lease─▶ leased ─ack(step)─▶ tentative ─commit─▶ done
             ▲  ▲           │ │  └─ack────────────────────────────▶ done
             │  │           │ ├─nack(retryable)─▶ delayed ─▶ ready
             │  │           │ └─nack(final)──────▶ dead ─requeue─▶ ready
             │  └─deadline──┘   (a lone crash too many ─▶ dead)
             └─restore── (leased, or tentative beyond the restored step)

A prompt whose sample's tensors stay with their producer is held between its hand-off and that sample's end; when the
producer dies, the prompt is ready again and its sample is parked until another producer hands it off.

A lease is a set of items with one token and one deadline; its token fences every later call. A session is what a group
does between two restores; an older session's calls are refused. An item is released once every group has done it, or
holds it dead and the others have done it: then it takes no room any more. Time is the server's.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

from eaglefeed.queue.values import (
    MAIN_GROUP,
    MAX_BATCH,
    AckResult,
    DeadLetter,
    DrainState,
    Lease,
    LeasedItem,
    NoLease,
    PutResult,
    QueueItem,
    QueueLimits,
    QueueStats,
)

__all__ = [
    "MAIN_GROUP",
    "MAX_BATCH",
    "AckResult",
    "DeadLetter",
    "DrainState",
    "Lease",
    "LeaseQueue",
    "LeasedItem",
    "NoLease",
    "PutResult",
    "QueueItem",
    "QueueLimits",
    "QueueStats",
]


class LeaseQueue(ABC):
    """One queue of a run, as one of its groups sees it.

    Every method raises QueueUnavailable when the server is out of reach, and repeats itself until then: a call whose
    reply was lost returns the reply that it would have had.
    """

    namespace: str
    name: str
    group: str

    @abstractmethod
    def configure(self, limits: QueueLimits, *, groups: Sequence[str] = ()) -> None:
        """Store the queue's limits and declare its groups, once and for good; () leaves them as they are.

        A queue that nobody configured has QueueLimits()'s, and the group MAIN_GROUP alone.

        Raises:
            ConfigError: other groups are declared already, or items were put before.
        """

    @abstractmethod
    def groups(self) -> tuple[str, ...]:
        """The declared groups, by name; MAIN_GROUP alone until somebody declares others or puts an item.

        Also a queue object whose own group is not among them tells them.
        """

    @abstractmethod
    def limits(self) -> QueueLimits:
        """The limits that are stored."""

    @abstractmethod
    def put(self, items: Sequence[QueueItem]) -> PutResult:
        """Add items at the tail for every group, in order; known ids count as duplicates and stay as they are.

        Raises:
            IdConflict: an id is known with another payload; nothing of its chunk was added.
            QueueFull: over the hard cap; nothing of its chunk was added.
            QueueClosed: new ids for a closed queue.
        """

    @abstractmethod
    def lease(
        self, n: int, *, visibility_timeout_s: float, consumer: str, wait_s: float = 0.0, session: int = 0
    ) -> Lease | NoLease:
        """Take up to `n` ready items (1 to MAX_BATCH) from the head, and wait up to `wait_s` for the first.

        Reclaims expired leases and promotes due delayed items on the way, a bounded number each call. An item with a
        crash behind it is leased alone. Nothing is leased while a restore is under way.

        Raises:
            StaleLease: `session` is not the group's newest.
            ConfigError: the group was not declared.
            UnsafeServer: the server has lost the run, which is not the same as one that is drained. One that lost only
                its newest part, as after a failover, is logged, and what it knows is handed out.
        """

    @abstractmethod
    def renew(self, token: int, *, visibility_timeout_s: float) -> int:
        """Move the lease's deadline to now + `visibility_timeout_s` and return it, in server ms. O(1).

        Raises:
            StaleLease: the lease is gone.
        """

    @abstractmethod
    def ack(self, token: int, ids: Sequence[str], *, step: int | None = None, session: int = 0) -> AckResult:
        """Settle items. An id whose lease was reclaimed is stale, also when it is done by now.

        Args:
            token: the lease.
            ids: the items.
            step: the training step that learned them: they are tentative until that step is committed. None settles
                them for good at once.
            session: what `restore` returned, 0 for a group that was never restored.

        Raises:
            StaleLease: `session` is not the group's newest; nothing was settled.
        """

    @abstractmethod
    def nack(
        self,
        token: int,
        ids: Sequence[str],
        *,
        reason: str,
        retryable: bool = True,
        delay_s: float | None = None,
        counted: bool = True,
    ) -> AckResult:
        """Give items back.

        Args:
            token: the lease.
            ids: the items.
            reason: why, kept with the item.
            retryable: False makes them dead letters at once.
            delay_s: 0 puts them back to the head of the ready items without counting anything against them (a
                graceful return); None delays them by the backoff of their delivery count.
            counted: False for a failure that is not theirs: this delivery is not counted, however long they wait.
        """

    @abstractmethod
    def commit(self, step: int, *, session: int = 0) -> int:
        """Settle for good what was acknowledged at `step` or before; returns how many items.

        Commit the oldest checkpoint that you keep: no step before it can be restored any more.

        Raises:
            StaleLease: `session` is not the group's newest; nothing was settled.
        """

    @abstractmethod
    def restore(self, step: int, *, seen: Sequence[str] = ()) -> int:
        """Go back to the checkpoint of `step`, and return the new session; older ones may do nothing any more.

        What was acknowledged at `step` or before is settled for good. Later acks and all leases go back to the head, in
        put order and without counting a delivery; only a lease that had run out counts as the crash that it is. An
        interrupted restore is finished by the next one, of the same step or a later one.

        Args:
            step: the checkpoint's; 0 before the first.
            seen: ids that the checkpoint has learned since the last commit, for a server that lost their acks: they are
                settled wherever they are.

        Raises:
            QueueError: `step` is before the committed one.
        """

    @abstractmethod
    def released(self, n: int = MAX_BATCH) -> list[QueueItem]:
        """Up to `n` items with stored bytes that are released, and whose shards may go; `forget` them afterwards."""

    @abstractmethod
    def forget(self, ids: Sequence[str]) -> None:
        """Take items off the released ones, once their shards are gone. Safe to repeat."""

    @abstractmethod
    def handoff(self, token: int, prompt_id: str, item: QueueItem, samples: "LeaseQueue", *, holder: str = "") -> None:
        """Put `item` into `samples` and settle the prompt, in one step, fenced by the prompt's lease.

        Never refused for room, nor because `samples` is closed. Safe to repeat: a sample that is there with the same
        payload is a success. `samples` is the queue that `rules.samples_of` pairs with this one.

        Args:
            token: the prompt's lease.
            prompt_id: the prompt.
            item: the sample.
            samples: where it goes.
            holder: the producer that its tensors stay with: the prompt is held until every group has done the sample.
                The sample's id is then the prompt's. A parked sample gets the new payload and is ready again.

        Raises:
            StaleLease: the prompt is not this lease's any more; the caller deletes its own shard.
            IdConflict: `samples` has that id with another payload; nothing was changed.
        """

    @abstractmethod
    def recall(self, samples: "LeaseQueue") -> int:
        """Make the prompts of producers that no longer live ready again, and park their samples; returns how many.

        A producer lives while its last `beat` is younger than rules.WORKER_GRACE_S.
        """

    @abstractmethod
    def held_for(self, samples: "LeaseQueue", *, producer: str = "") -> int:
        """How many prompts are held, by any producer or this one, for samples that some group has still to do.

        Those whose samples are dead letters are held too, and nobody waits for them.
        """

    @abstractmethod
    def has_room(self) -> bool:
        """Whether producers may lease another prompt: by count and stored bytes, with hysteresis."""

    @abstractmethod
    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until there is room, at most `timeout_s`; wakes at once when it comes."""

    @abstractmethod
    def beat(self, role: str, worker: str) -> None:
        """Show a sign of life as `role` ("producer" or "trainer"); shared by all queues of the namespace."""

    @abstractmethod
    def farewell(self, role: str, worker: str, *, error: str = "") -> None:
        """Take the sign of life back at the end; an `error` that ended it is kept as rules.LAST_ERROR of its role.

        It stands in the run's record, so that who waits for such workers can say why there are none.
        """

    @abstractmethod
    def close(self) -> None:
        """Take no new ids from now on. Safe to repeat."""

    @abstractmethod
    def stats(self) -> QueueStats:
        """Exact counts, in O(1)."""

    @abstractmethod
    def dead_letters(self) -> Iterator[DeadLetter]:
        """Every dead letter of the group, read in bounded steps."""

    @abstractmethod
    def dead_reasons(self) -> Iterator[tuple[str, str]]:
        """The id and reason of every dead letter of the group, read in bounded steps."""

    @abstractmethod
    def requeue(self, ids: Sequence[str]) -> int:
        """Make dead letters ready again, with a clean count, also in a closed queue; returns how many.

        Requeued prompts reopen their samples, so that trainers wait for them.
        """

    @abstractmethod
    def payloads(self) -> Iterator[LeasedItem]:
        """Every item that is not released nor dead to all groups, in put order, read in bounded steps.

        What is put while it is read may be missing. The delivery_count is of this group's deliveries that ended
        unsettled.
        """

    @abstractmethod
    def find(self, ids: Collection[str]) -> list[QueueItem]:
        """Those of `ids` whose payload is kept: open, dead to some group, or released and not forgotten."""

    @abstractmethod
    def known(self, ids: Collection[str]) -> set[str]:
        """Those of `ids` that were put once, also if they are done and forgotten."""

    @abstractmethod
    def leased(self, tokens: Collection[int]) -> set[int]:
        """Those leases, of any group, that still stand: also run out ones, as long as nobody has reclaimed them.

        A token that does not stand never will again.
        """

    @abstractmethod
    def agree(self, name: str, value: bytes) -> bytes:
        """Store a value in the run's record, unless one of that name stands there; returns what stands there."""

    @abstractmethod
    def agreed(self) -> dict[str, bytes]:
        """The run's record, which is shared by all its queues and outlives a purge, but for its INSTANCE."""

    @abstractmethod
    def purge(self) -> int:
        """Delete the queue and all that it knows but its groups, sessions and last tokens.

        That of a samples queue makes the run's record forget rules.INSTANCE, which becomes a name behind rules.FORMER:
        what knew nothing else of the run than its refs must not take it for the same any more.

        Returns how many items it held that were not done.
        """
