"""Whether the queue's room holds what its trainers need in flight."""

from collections.abc import Callable

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.rules import WORKER_GRACE_S

__all__ = ["check_room"]

_POLL_S = 1.0

log = get_logger(__name__)


def check_room(
    samples: LeaseQueue,
    *,
    consumer: str,
    round_size: int,
    prefetch: int,
    look: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Refuse a high mark at which producers would stop before the trainers have what they need. Call it at the start.

    A trainer that was killed counts until its sign of life is too old: that is waited for.

    Args:
        samples: the queue.
        consumer: this trainer's name; shows a sign of life.
        round_size: samples of a step, on all its ranks: what it takes before it acknowledges.
        prefetch: RoundStream's, in rounds.
        look: called once a second while it waits.
        clock: measures the wait.

    Raises:
        ConfigError: queue.high_count is too low.
    """
    each, high_count = (prefetch + 1) * round_size, samples.limits().high_count
    deadline_s = clock.monotonic() + WORKER_GRACE_S + _POLL_S
    while (trainers := _trainers(samples, consumer)) * each > high_count:
        if each > high_count or clock.monotonic() > deadline_s:
            samples.farewell("trainer", consumer)
            need, sizes = trainers * each, f"{prefetch} + 1 rounds of {round_size}"
            raise ConfigError(
                "room for fewer samples than its trainers need in flight",
                subject=samples.name,
                wanted=f"queue.high_count of at least {need} = {trainers} trainers x ({sizes})",
                got=high_count,
                fix=f"raise queue.high_count to at least {need}, or lower train.prefetch or train.samples_per_step",
            )
        log.info("trainer_waits_for_room_of_others", trainers=trainers, in_flight_each=each, high_count=high_count)
        look()
        clock.sleep(_POLL_S)


def _trainers(samples: LeaseQueue, consumer: str) -> int:
    samples.beat("trainer", consumer)
    return max(1, samples.stats().workers.get("trainer", 0))
