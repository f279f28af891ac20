"""What `eaglefeed feed --replay` does: the next epoch of a run, without a target."""

from dataclasses import asdict

from eaglefeed.cli.common import RunQueues, emit, open_queues, opened_store
from eaglefeed.cli.letters import one_line
from eaglefeed.cli.peers import refuse_peers
from eaglefeed.cli.reports import human_bytes
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.producer.replay import Replayed, replay
from eaglefeed.queue import rules

__all__ = ["check_replayed", "replay_epoch"]

_SHOWN = 20


def replay_epoch(settings: Settings, *, epoch: int | None, as_json: bool) -> None:
    """Put what the run retained into an epoch's queue, in the order of train.seed.

    Raises:
        ConfigError: the run's samples stay with their producers, or see `replay`.
    """
    refuse_peers(settings, "nothing to replay")
    with open_queues(settings, known=True) as queues, opened_store(settings) as shards:
        depth, seed = settings.queue.max_depth, settings.train.seed
        found = replay(shards, queues.named, queues.run, epoch=epoch, seed=seed, max_depth=depth)
        uri = shards.uri
    queue = rules.epoch_queue(found.epoch)
    told_seed = None if found.stood else seed  # nobody knows any more which one it was
    document = {"run": settings.run.id, "store": uri, "queue": queue, "seed": told_seed} | asdict(found)
    emit(as_json, document, _tell(found, queue, settings.run.id))


def check_replayed(queues: RunQueues, epoch: int) -> None:
    """Refuse a later epoch whose replay was not finished: its trainers would wait for ever.

    Raises:
        ConfigError: it is one.
    """
    name = rules.epoch_queue(epoch)
    if epoch and not queues.named(name, queues.named(name).groups()[0]).stats().closed:
        what, fix = "nobody has replayed this epoch to its end", "`eaglefeed feed --replay` first, or see train.epoch"
        raise ConfigError(what, subject=name, fix=fix)


def _tell(found: Replayed, queue: str, run: str) -> list[str]:
    lines = [one_line(f"{key}: damaged, left where it is: {reason}") for key, reason in found.damaged.items()]
    more = len(lines) - _SHOWN
    before = f", {found.known} were there before" if found.known else ""
    left = {
        "dead letters": found.dead,
        "damaged": len(found.damaged),
        "without a whole shard": found.gone,
        "never handed off": found.strays,
        "older ones of the same ids": found.older,
        "of other runs": found.foreign,
    }
    left_out = ", ".join(f"{count} {name}" for name, count in left.items() if count)
    return [
        *lines[:_SHOWN],
        *([f"{more} more damaged; --json lists them"] if more > 0 else []),
        f"run {run}: put {found.refs} samples ({human_bytes(found.num_bytes)}) into {queue}{before}",
        *([f"left out {left_out}"] if left_out else []),
        *([f"{queue} was whole before: its order stays, whatever the seed"] if found.stood else []),
        f"now `eaglefeed train train.epoch={found.epoch}`, with train.retain=true unless this is the last epoch",
    ]
