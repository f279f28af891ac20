"""Rank 0's side of a RoundStream: the leases of all ranks' samples, and what becomes of them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from eaglefeed.consumer.gathering import Gatherer, Held
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.trainer_queue import TrainerQueue
from eaglefeed.errors import QueueUnavailable
from eaglefeed.logs import get_logger

__all__ = ["RoundQueue", "RoundStats"]

_JOIN_S = 60.0

log = get_logger(__name__)


@dataclass
class RoundStats(StreamStats):
    """On rank 0, what became of the whole job's samples; elsewhere this rank's, as far as it knows.

    `padded` are places in rounds that were filled with nothing.
    """

    padded: int = 0


class RoundQueue(TrainerQueue):
    """A trainer's queue that leases in rounds, once `begin` was called. RoundStream explains the rest."""

    gatherer: Gatherer | None = None

    def begin(self, events: SimpleQueue[Any], *, round_size: int, ahead: int) -> Gatherer:
        """Lease from now on.

        Args:
            events: where rounds go; see Gatherer.
            round_size: samples of all ranks.
            ahead: rounds.
        """
        self.gatherer = Gatherer(
            self.leaser(),
            holdings=self.holdings,
            size=round_size,
            ahead=ahead,
            max_age_s=self._terms.max_lease_age_s / 2,
            events=events,
            stop=self._stop,
            clock=self._clock,
        )
        return self.gatherer

    def still_held(self, held: Sequence[Held | None]) -> list[bool]:
        """Which of a round's samples are there and ours. A lease that was lost is the next holder's to train on."""
        with contextlib.suppress(QueueUnavailable):  # then nobody else has them either
            self.holdings.keep_up()  # a pause of this process may have cost them
        return [each is not None and not self._is_lost(each) for each in held]

    def taken(self, held: Sequence[Held | None], is_there: list[bool]) -> None:
        """These were taken, and nothing in the place of the others: the next `ack` is for them."""
        for each, there in zip(held, is_there, strict=True):
            if each is not None and there:
                self.settler.add(each.token, each.item.id)
                self._stats.delivered += 1
                self._stats.redelivered += each.item.delivery_count > 1

    def commit(self, step: int) -> int:
        """Settle for good what was acknowledged at `step` or before; returns how many samples."""
        count = super().commit(step)
        if self.gatherer is not None:
            self.gatherer.committed()
        return count

    def close(self, *, drained: bool) -> None:
        """Give back what is not acknowledged, once `stop` is set."""
        if self.gatherer is not None:
            self.gatherer.join(_JOIN_S)
        super().close(drained=drained)

    def _is_lost(self, held: Held) -> bool:
        if self.renewer.is_kept(held.token):
            return False
        self._stats.stale += 1
        self.holdings.settle(held.token, [held.item.id])
        log.warning("lease_lost", lease=held.token, sample_id=held.item.id)
        return True
