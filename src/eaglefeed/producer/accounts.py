"""What became of every prompt that a producer leased: settled with the queue, and counted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from eaglefeed.errors import (
    ContractMismatch,
    EaglefeedError,
    IdConflict,
    SchemaError,
    StaleLease,
    StorageError,
    StoreFull,
)
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import Lease, LeasedItem, LeaseQueue
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.refs import SampleRef

__all__ = ["Accounts", "ProducerStats"]

T = TypeVar("T")

log = get_logger(__name__)


@dataclass
class ProducerStats:
    """What a producer did: nothing it leased is missing here.

    Args:
        produced: samples handed off.
        dead: prompts that became dead letters.
        retried: prompts given back after a failure, to be tried again.
        returned: prompts given back untried.
        stale: prompts whose lease was lost.
        num_tokens: of the samples handed off.
        num_bytes: theirs, stored.
        paused_s: waited for room in the queue or the store.
        write_wait_s: how long the target waited for the writer.
    """

    produced: int = 0
    dead: int = 0
    retried: int = 0
    returned: int = 0
    stale: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    paused_s: float = 0.0
    write_wait_s: float = 0.0


class Accounts:
    """Holds a producer's leases and settles their items. All but `settle` belong to the producer's own thread.

    Args:
        prompts: the queue they are from.
        renewer: renews a lease as long as an item of it is held.
        max_attempts: deliveries after which a prompt that fails is a dead letter.
    """

    def __init__(self, prompts: LeaseQueue, renewer: LeaseRenewer, *, max_attempts: int) -> None:
        self.stats = ProducerStats()
        self._prompts, self._renewer, self._max_attempts = prompts, renewer, max_attempts
        self._held = Holdings(renewer)

    def add(self, lease: Lease) -> None:
        """Hold a new lease's items."""
        self._held.add(lease.token, [item.id for item in lease.items])

    def settle(self, token: int, ids: Sequence[str]) -> None:
        """Hold these no longer. Nothing else counts as progress: a store that hangs must not keep its leases."""
        self._held.settle(token, ids)
        self._renewer.progress()

    def produced(self, ref: SampleRef) -> None:
        """It was handed off."""
        self.stats.produced += 1
        self.stats.num_tokens += ref.num_tokens
        self.stats.num_bytes += ref.stored_bytes

    def outcome(self, token: int, item: LeasedItem, step: Callable[[], T]) -> T | None:
        """The result of a step on an item's way; None when it failed, and the item is settled.

        Raises:
            StoreFull: no room; the item is still held, as after any error that passes.
            ContractMismatch: this producer must not go on.
        """
        try:
            return step()
        except StoreFull as error:
            log.error("store_full", sample_id=item.id, lease=token, reason=str(error))  # noqa: TRY400
            raise
        except ContractMismatch:
            raise
        except StaleLease as error:
            self.stats.stale += 1
            log.warning("lease_lost", sample_id=item.id, lease=token, reason=str(error))
        # torch raises RuntimeError, also when it is out of memory
        except (IdConflict, SchemaError, StorageError, RuntimeError) as error:
            self._fail(token, item, error)
        return None

    def give_back(self, token: int, ids: list[str], reason: str) -> None:
        """To the head of the queue, with nothing counted against them."""
        self.settle(token, ids)
        given = self._prompts.nack(token, ids, reason=reason, delay_s=0)
        self.stats.returned += len(given.ok)
        self.stats.stale += len(given.stale)

    def give_all_back(self, reason: str) -> None:
        """All that is still held; a hand-off of it that comes later finds its lease lost."""
        for token, ids in self._held.drain().items():
            self.give_back(token, ids, reason)

    def _fail(self, token: int, item: LeasedItem, error: Exception) -> None:
        final = isinstance(error, EaglefeedError) and not error.retryable
        final = final or item.delivery_count >= self._max_attempts
        reason = f"{type(error).__name__}: {error}"[:1000]
        log.error("prompt_failed", sample_id=item.id, lease=token, final=final, reason=reason)
        self.settle(token, [item.id])
        if self._prompts.nack(token, [item.id], reason=reason, retryable=not final).stale:
            self.stats.stale += 1
        elif final:
            self.stats.dead += 1
        else:
            self.stats.retried += 1
