"""Which shards nobody needs, as a run's queues and the store know it together.

An orphan is a whole shard that nobody will hand off or read any more. The order of three steps proves that it is one:

1. The shard is listed. The token in its name is that of its producer's lease, which was granted before.
2. The queue is asked which of these leases still stand. A token that does not stand never will again, and a hand-off
   needs its standing lease: the shard was handed off before this answer, or never will be.
3. Only then the queue is asked for the refs that it keeps: open, dead letters, released. If none of them names the
   shard, it never was handed off, or its sample is done and forgotten.

The grace only spares questions about fresh shards; no clock is part of the proof. A queue that lost its data would
answer "no" to everything, and so would one that was purged, or another server's. So each queue has a random instance
id, and the store one note a run that says which queue knows its shards; it is looked at after the answers. Two janitors
at once do each other no harm.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import xxhash

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import FeatureStore, StoredShard
from eaglefeed.storage.outage import Outage

__all__ = [
    "EVERY_KEY",
    "Judged",
    "RefLedger",
    "Released",
    "Releases",
    "ShardState",
    "check_known",
    "introduce",
    "is_known",
    "judge_shards",
    "name_parts",
    "note_instance",
    "read_own_ref",
]

EVERY_KEY = ""
"""In `RefLedger.kept`: every shard of this id stays."""


class Released(Protocol):
    """A sample whose shard may go."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def payload(self) -> bytes: ...  # noqa: D102


class Releases(Protocol):
    """A queue's list of samples whose shards may go; see LeaseQueue."""

    name: str

    def released(self, n: int) -> Sequence[Released]: ...  # noqa: D102
    def forget(self, ids: Sequence[str]) -> None: ...  # noqa: D102


class RefLedger(Protocol):
    """What the queues of a run know of its shards. Every call asks all the queues that the run has by then."""

    run_id: str

    def instance(self) -> str:
        """The random id that these queues agreed on; another one once they lost their data or were purged."""
        ...

    def former(self) -> Collection[str]:
        """The ids that purges made them forget."""
        ...

    def retains(self, queue: str) -> bool:
        """Whether the shards of the samples that this queue has released stay, for a later epoch."""
        ...

    def leased(self, tokens: Collection[int]) -> set[int]:
        """Those leases of prompts that still stand."""
        ...

    def kept(self, ids: Collection[str]) -> Mapping[str, Collection[str]]:
        """Id → keys of the shards that its refs name; EVERY_KEY where one cannot be read, or a queue retains them."""
        ...

    def releases(self) -> Sequence[Releases]:
        """The lists of samples whose shards may go, one a samples queue."""
        ...


class ShardState(StrEnum):
    """What becomes of a shard."""

    KEPT = "kept"
    """A ref names it: open, dead to some group, or released."""
    LEASED = "leased"
    """Its producer may still hand it off."""
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    """Another run's."""
    UNREADABLE = "unreadable"
    """No ref can be read from it now, or that of another shard: nobody knows whose it is."""
    GONE = "gone"
    """Deleted since it was listed."""


class Judged(NamedTuple):
    """A shard, its state, and the ref that it carries, where that was read."""

    shard: StoredShard
    state: ShardState
    ref: SampleRef | None = None


def introduce(store: FeatureStore, ledger: RefLedger) -> bool:
    """Note in the store that this queue knows the run's shards, unless some lie there from before.

    Every producer does so before its first shard. Another queue's note stays, unless a purge made it this one. Safe to
    repeat.

    Returns:
        Whether the note is this queue's.
    """
    if is_known(store, ledger):
        return True
    noted = store.get_document(_document(ledger))
    replaceable = {None, *(_note(ledger, instance) for instance in ledger.former())}
    if noted in replaceable and not any(_is_of_run(store, shard.key, ledger.run_id) for shard in store.scan()):
        note_instance(store, ledger)
    return is_known(store, ledger)


def note_instance(store: FeatureStore, ledger: RefLedger) -> None:
    """Note in the store that this queue knows the run's shards, in place of any other; without a note nobody does."""
    if not is_known(store, ledger):
        store.delete_document(_document(ledger))
        store.put_document(_document(ledger), _note(ledger, ledger.instance()))


def _document(ledger: RefLedger) -> str:
    return f"queue_{xxhash.xxh3_128_hexdigest(ledger.run_id.encode())}.json"


def _note(ledger: RefLedger, instance: str) -> bytes:
    return json.dumps({"run": ledger.run_id, "instance": instance}).encode()


def _is_of_run(store: FeatureStore, key: str, run_id: str) -> bool:
    try:
        return store.read_ref(key).run_id == run_id
    except (SampleCorrupt, SampleMissing):  # one that nobody can read is never deleted
        return False
    except StorageError:
        return True


def is_known(store: FeatureStore, ledger: RefLedger) -> bool:
    """Whether the store's note is this queue's."""
    return store.get_document(_document(ledger)) == _note(ledger, ledger.instance())


def check_known(store: FeatureStore, ledger: RefLedger, since: str = "") -> str:
    """Refuse a store whose shards this queue does not know, or a queue that is another one by now.

    Args:
        store: has the note of the queue that knows the run's shards.
        ledger: the queue.
        since: what an earlier call returned: whatever was asked since then was answered by that queue.

    Returns:
        The queue's instance id.

    Raises:
        ConfigError: the note is not this queue's, or it lost its data or was purged since then.
    """
    instance = ledger.instance()
    if since not in ("", instance) or store.get_document(_document(ledger)) != _note(ledger, instance):
        what = f"the queue of run {ledger.run_id} lost its data, was purged, or never knew these shards"
        fix = (
            "nothing was deleted; `eaglefeed store rebuild` puts their refs into an empty queue; if nobody needs these "
            "shards, delete the folder before feeding"
        )
        raise ConfigError(what, subject=store.uri, fix=fix)
    return instance


def judge_shards(
    store: FeatureStore, ledger: RefLedger, shards: Sequence[StoredShard], *, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Judged]:
    """Decide which of some listed shards are orphans; the module's text says why in this order.

    The queue is asked at once, and each shard that it does not know is read when its turn comes. Whoever deletes them
    calls `check_known` before the first, and again after a pause.

    Raises:
        StorageError: from the iterator: the store is away.
    """
    names = [name_parts(shard.key) for shard in shards]
    leased = ledger.leased({token for _, token in names})
    kept = ledger.kept({sample_id for sample_id, _ in names})
    outage = Outage(clock)

    def judge(shard: StoredShard, sample_id: str, token: int) -> Judged:
        keys = kept.get(sample_id, ())
        if shard.key in keys or EVERY_KEY in keys:
            return Judged(shard, ShardState.KEPT)
        if token in leased:
            return Judged(shard, ShardState.LEASED)
        return _look_inside(store, shard, ledger.run_id, outage)

    return (judge(shard, *name) for shard, name in zip(shards, names, strict=True))


def _look_inside(store: FeatureStore, shard: StoredShard, run_id: str, outage: Outage) -> Judged:
    try:
        with outage.watch():
            ref = read_own_ref(store, shard.key)
    except SampleMissing:
        return Judged(shard, ShardState.GONE)
    except StorageError:
        if outage.is_away:
            raise
        return Judged(shard, ShardState.UNREADABLE)
    return Judged(shard, ShardState.ORPHAN if ref.run_id == run_id else ShardState.FOREIGN, ref)


def name_parts(key: str) -> tuple[str, int]:
    """The sample's id and the lease's token that stand in a shard's key, `xx/<sample_id>.<token>.safetensors`."""
    sample_id, _, token = key.rpartition("/")[2].removesuffix(".safetensors").rpartition(".")
    return sample_id, int(token)


def read_own_ref(store: FeatureStore, key: str) -> SampleRef:
    """The ref that the shard at `key` carries.

    Raises:
        SampleMissing: it is gone.
        SampleCorrupt: it has none, or that of another shard or sample: then nobody knows what the queue knows it by.
        StorageError: it cannot be read now.
    """
    ref = store.read_ref(key)
    sample_id, _ = name_parts(key)
    if ref.sample_id != sample_id:
        raise SampleCorrupt(key, "carries another sample's ref", wanted=sample_id, got=ref.sample_id)
    return ref
