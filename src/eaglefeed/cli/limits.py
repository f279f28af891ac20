"""The bounds of a run's queues, held against its store and its largest sample."""

from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.reports import human_bytes
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.queue.base import QueueLimits
from eaglefeed.storage.base import StoreHealth

__all__ = ["check_limits", "check_peer_bytes", "configure_queues", "queue_limits"]

_HIGH_SHARE, _LOW_SHARE = 0.8, 0.6


def queue_limits(settings: Settings, health: StoreHealth) -> QueueLimits:
    """The configured bounds, and never more bytes than 80 % and 60 % of what the store has free now."""
    queue = settings.queue
    return QueueLimits(
        max_depth=queue.max_depth,
        high_count=queue.high_count,
        low_count=queue.low_count,
        high_bytes=min(queue.high_bytes, int(_HIGH_SHARE * health.free_bytes)),
        low_bytes=min(queue.low_bytes, int(_LOW_SHARE * health.free_bytes)),
        max_deliveries=queue.max_deliveries,
    )


def configure_queues(settings: Settings, queues: RunQueues, limits: QueueLimits) -> None:
    """Give both queues their limits, and the samples their groups, once and for good."""
    queues.samples.configure(limits, groups=settings.queue.groups)
    queues.prompts.configure(limits)


def check_limits(limits: QueueLimits, settings: Settings, largest_bytes: int, health: StoreHealth) -> None:
    """Refuse high marks below one training step: the trainer would wait for samples, and producers for room.

    Args:
        limits: as `queue_limits` makes them.
        settings: of the run.
        largest_bytes: size of its largest sample.
        health: of its store.

    Raises:
        ConfigError: they are; says how much a step takes.
    """
    step = settings.train.samples_per_step
    if limits.high_count < step:
        wanted, fix = f"at least train.samples_per_step = {step}", "raise queue.high_count"
        what = "room for less than one step"
        raise ConfigError(what, subject="queue.high_count", wanted=wanted, got=limits.high_count, fix=fix)
    if limits.high_bytes < step * largest_bytes:
        raise _too_few_bytes(limits, settings, largest_bytes, health)


def _too_few_bytes(limits: QueueLimits, settings: Settings, largest_bytes: int, health: StoreHealth) -> ConfigError:
    step = settings.train.samples_per_step
    got, first = human_bytes(limits.high_bytes), "raise queue.high_bytes"
    if limits.high_bytes < settings.queue.high_bytes:
        got += f", {_HIGH_SHARE:.0%} of the {human_bytes(health.free_bytes)} that the store has free"
        in_memory = settings.store_uri.startswith("shm://")
        first = "raise the container's shm_size" if in_memory else "free space in the store"
    return ConfigError(
        "room for less than one step",
        subject="queue.high_bytes",
        wanted=f"{step} * {human_bytes(largest_bytes)} (the largest sample) = {human_bytes(step * largest_bytes)}",
        got=got,
        fix=f"{first}, or lower feed.max_length or train.samples_per_step",
    )


def check_peer_bytes(settings: Settings, largest_bytes: int) -> None:
    """Refuse a producer's memory for samples below its largest one.

    Raises:
        ConfigError: it is.
    """
    room = settings.store.peer_bytes
    if room < largest_bytes:
        wanted, fix = f"at least {human_bytes(largest_bytes)}, the largest sample", "raise it, or lower feed.max_length"
        what = "a producer could not keep one sample"
        raise ConfigError(what, subject="store.peer_bytes", wanted=wanted, got=human_bytes(room), fix=fix)
