"""The next epoch: what a run's trainers retained goes into a queue of its own, in a seeded order, without a target."""

from dataclasses import dataclass, replace
from typing import Protocol

import xxhash

from eaglefeed.errors import ConfigError, ContractMismatch, QueueFull
from eaglefeed.producer.ledger import QueueLedger, enlist
from eaglefeed.producer.rebuild import Rebuilt, newest_refs, no_shards, still_there
from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, LeaseQueue, QueueItem, QueueStats
from eaglefeed.schema.contract import RETAIN_RECORD
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import FeatureStore

__all__ = ["OpenQueue", "Replayed", "check_over", "replay"]

_SEED = "seed:"
"""In the run's record, with the queue's instance and name behind it."""


class OpenQueue(Protocol):
    """Opens a queue of the run by its name, as one of its groups sees it."""

    def __call__(self, name: str, group: str = MAIN_GROUP) -> LeaseQueue: ...  # noqa: D102


@dataclass
class Replayed(Rebuilt):
    """What became of the shards, and of which epoch this was.

    `refs` were put by this call, `known` by earlier ones; `dead` are dead letters of earlier epochs; `strays` are of
    samples that nobody handed off; `gone` are samples of the epoch before without a whole shard. An epoch that `stood`
    was whole before this call, and keeps the order that it had.
    """

    epoch: int = 0
    known: int = 0
    dead: int = 0
    strays: int = 0
    gone: int = 0
    stood: bool = False


def replay(
    store: FeatureStore, open_queue: OpenQueue, run_id: str, *, epoch: int | None = None, seed: int = 0, max_depth: int
) -> Replayed:
    """Fill an epoch's queue with what earlier epochs trained on and retained, and close it.

    The order depends on the seed, the epoch and the ids alone. Groups and limits are those of the epoch before. Safe to
    repeat: what a killed call left is filled up by the next one of the same seed, and a closed queue stays as it is.

    Args:
        store: where the shards lie.
        open_queue: opens the run's queues.
        run_id: as it stands in the refs.
        epoch: from 1; by default the newest one as long as its queue is not closed, else the one after it.
        seed: of the order.
        max_depth: most samples of the queue.

    Raises:
        ContractMismatch: an earlier call with another seed was killed: half of each order would be none.
        ConfigError: an earlier epoch is not over, the one before retained nothing, or no such epoch can follow.
        QueueFull: more samples than `max_depth`; nothing was put.
        StorageError: a shard cannot be read now; nothing was put.
    """
    found = Replayed(epoch=_which(open_queue, run_id, epoch))
    target, before = open_queue(rules.epoch_queue(found.epoch)), open_queue(rules.epoch_queue(found.epoch - 1))
    if (stats := _by_group(open_queue, target.name)[0]).closed:
        found.known, found.stood = stats.unsettled + stats.done + stats.dead, True
        return found
    for earlier in range(found.epoch):
        check_over(open_queue, rules.epoch_queue(earlier))
    if RETAIN_RECORD + before.name not in before.agreed():
        what, fix = "its trainers retained nothing", "train it with train.retain=true: later epochs need its shards"
        raise ConfigError(what, subject=before.name, fix=fix)
    target.configure(replace(before.limits(), max_depth=max_depth), groups=before.groups())
    enlist(target)
    items = _unseen_items(store, open_queue, run_id, found)
    if (depth := found.known + len(items)) > max_depth:
        raise QueueFull(target.name, depth=depth, max_depth=max_depth)
    _agree_on_seed(target, QueueLedger(run_id, open_queue).instance(), seed)
    target.put(sorted(items, key=lambda item: _place(item.id, epoch=found.epoch, seed=seed)))
    target.close()
    found.refs, found.num_bytes = len(items), sum(item.stored_bytes for item in items)
    return found


def check_over(open_queue: OpenQueue, name: str) -> None:
    """Refuse what has to wait until an epoch is over, in each of its groups.

    Raises:
        ConfigError: its queue is open, or something in it is not done.
    """
    for stats in _by_group(open_queue, name):
        if not stats.closed or stats.unsettled:
            wanted, got = "closed, with nothing left to do", "closed" if stats.closed else "open"
            got += f", {stats.unsettled} to do in group {stats.group}"
            fix = "train it to its end first; one that is open gets more samples: `eaglefeed queue stats` shows whence"
            raise ConfigError("its epoch is not over", subject=name, wanted=wanted, got=got, fix=fix)


def _which(open_queue: OpenQueue, run_id: str, epoch: int | None) -> int:
    names = [queue.name for queue in QueueLedger(run_id, open_queue).releases()]
    newest = max(filter(None, map(rules.epoch_of, names)), default=0)
    if epoch is None:
        is_whole = not newest or _by_group(open_queue, rules.epoch_queue(newest))[0].closed
        return newest + is_whole
    if not 1 <= epoch <= newest + 1:
        fix = "leave --epoch out for the next one; epoch 0 is what was fed"
        raise ConfigError("no such epoch can follow", subject="epoch", wanted=f"1 to {newest + 1}", got=epoch, fix=fix)
    return epoch


def _by_group(open_queue: OpenQueue, name: str) -> list[QueueStats]:
    return [open_queue(name, group).stats() for group in open_queue(name).groups()]


def _unseen_items(store: FeatureStore, open_queue: OpenQueue, run_id: str, found: Replayed) -> list[QueueItem]:
    """What the epoch's queue does not know yet; counts the rest."""
    refs = _retained(list(newest_refs(store, run_id, found)), open_queue, run_id, found)
    if not refs:
        raise no_shards(store, run_id, found)
    known = open_queue(rules.epoch_queue(found.epoch)).known([ref.sample_id for ref in refs])
    found.known = len(known)
    items = still_there(store, unseen := [ref for ref in refs if ref.sample_id not in known])
    found.gone += len(unseen) - len(items)
    return items


def _retained(refs: list[SampleRef], open_queue: OpenQueue, run_id: str, found: Replayed) -> list[SampleRef]:
    """Leave out what no earlier epoch had, and what is a dead letter of one; counts these, and what is gone."""
    ids, handed_off, dead = [ref.sample_id for ref in refs], set[str](), set[str]()
    for queue in QueueLedger(run_id, open_queue).releases():
        at = rules.epoch_of(queue.name)
        if at is not None and at < found.epoch:
            handed_off |= (known := queue.known(ids))
            dead |= _dead_ids(open_queue, queue.name)
            if at == found.epoch - 1:
                stats = _by_group(open_queue, queue.name)[0]
                found.gone = stats.done + stats.dead - len(known)
    found.strays = len(set(ids) - handed_off)
    found.dead = len(handed_off & dead)
    return [ref for ref in refs if ref.sample_id in handed_off - dead]


def _dead_ids(open_queue: OpenQueue, name: str) -> set[str]:
    return {letter.id for group in open_queue(name).groups() for letter in open_queue(name, group).dead_letters()}


def _agree_on_seed(target: LeaseQueue, instance: str, seed: int) -> None:
    stands = target.agree(f"{_SEED}{instance}:{target.name}", str(seed).encode()).decode()
    if stands != str(seed):
        wanted, got = f"seed={stands}", f"seed={seed}"
        fix = f"replay with that seed, or `eaglefeed queue purge --queue {target.name}` first"
        raise ContractMismatch("begun with another seed", subject=target.name, wanted=wanted, got=got, fix=fix)


def _place(sample_id: str, *, epoch: int, seed: int) -> tuple[int, str]:
    return xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{sample_id}".encode()), sample_id
