"""A queue that lost its data gets the refs of the shards that lie in the store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from eaglefeed.errors import ConfigError, QueueFull, SampleCorrupt, SampleMissing, SchemaError, StorageError
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.queue import rules
from eaglefeed.queue.base import LeaseQueue, QueueItem
from eaglefeed.schema.eagle3_compact import validate_any_ref
from eaglefeed.schema.refs import SampleRef, encode_ref
from eaglefeed.storage.base import FeatureStore, key_of
from eaglefeed.storage.orphans import RefLedger, is_known, name_parts, note_instance, read_own_ref

__all__ = ["Rebuilt", "check_empty", "has_unknown_shards", "newest_refs", "no_shards", "rebuild", "still_there"]


@dataclass
class Rebuilt:
    """What became of the shards: put back, older ones of the same ids, other runs', and damaged ones with reasons."""

    refs: int = 0
    num_bytes: int = 0
    older: int = 0
    foreign: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


def rebuild(store: FeatureStore, prompts: LeaseQueue, samples: LeaseQueue, run_id: str) -> Rebuilt:
    """Put the refs of the run's whole shards into its empty samples queue, in the order in which they were leased.

    Of several shards of one id, the newest that is not damaged counts. What trainers had learned comes again. All
    headers are read before the first ref is put; a shard that is deleted meanwhile is left out.

    Args:
        store: where the shards lie.
        prompts: of the run; nothing was fed yet.
        samples: of the run, as one of its groups sees it; limits and groups are set.
        run_id: as it stands in the refs.

    Raises:
        ConfigError: the queues hold or know something already, a producer lives, or no whole shard is the run's;
            nothing was put.
        QueueFull: more samples than queue.max_depth; nothing was put.
        StorageError: a shard cannot be read now; nothing was put.
    """
    check_empty(prompts, samples)
    found = Rebuilt()
    refs = list(newest_refs(store, run_id, found))
    if not refs:
        raise no_shards(store, run_id, found)
    items = still_there(store, refs)
    max_depth = samples.limits().max_depth
    if len(items) > max_depth:
        raise QueueFull(samples.name, depth=len(items), max_depth=max_depth)
    check_empty(prompts, samples)
    samples.put(items)
    note_instance(store, QueueLedger(run_id, lambda _: samples))
    found.refs, found.num_bytes = len(items), sum(item.stored_bytes for item in items)
    return found


def still_there(store: FeatureStore, refs: Sequence[SampleRef]) -> list[QueueItem]:
    """Those whose shards were not deleted while the others were read, as a samples queue takes them."""
    there = {shard.key for shard in store.scan()}
    return [QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes) for ref in refs if key_of(ref) in there]


def no_shards(store: FeatureStore, run_id: str, found: Rebuilt) -> ConfigError:
    """The store holds no whole shard of the run; tells what else it holds."""
    got = f"{found.foreign} of other runs, {len(found.damaged)} damaged"
    got += "".join(f"; {key}: {reason}" for key, reason in islice(found.damaged.items(), 1))
    fix = "check --run and --store; nothing was put"
    return ConfigError(f"no shards of run {run_id}", subject=store.uri, got=got, fix=fix)


def has_unknown_shards(store: FeatureStore, ledger: RefLedger) -> bool:
    """Whether shards of the run lie in the store that its queue does not know; reads headers up to the first one."""
    return not is_known(store, ledger) and any(_is_of_run(store, shard.key, ledger.run_id) for shard in store.scan())


def _is_of_run(store: FeatureStore, key: str, run_id: str) -> bool:
    try:
        return read_own_ref(store, key).run_id == run_id
    except StorageError:
        return False


def check_empty(*queues: LeaseQueue) -> None:
    """Refuse queues that a rebuild would mix with what is there.

    Raises:
        ConfigError: one holds or knows something, or is closed, or a producer of the run lives.
    """
    for stats in [queue.stats() for queue in queues]:
        if count := stats.workers.get("producer"):
            what, wanted, got = "a producer lives, nothing was put", "none", str(count)
            fix = f"stop it, its janitor deletes shards; a killed one counts for {rules.WORKER_GRACE_S:g} s more"
            raise ConfigError(what, subject=stats.name, wanted=wanted, got=got, fix=fix)
        if stats.closed or stats.unsettled or stats.done or stats.dead:
            what, wanted = "not empty, nothing was put", "an empty queue"
            got = f"{stats.unsettled} to do, {stats.done} done, {stats.dead} dead{', closed' * stats.closed}"
            fix = "rebuild before feeding; to start over: `eaglefeed queue purge`, rebuild, feed again"
            raise ConfigError(what, subject=stats.name, wanted=wanted, got=got, fix=fix)


def newest_refs(store: FeatureStore, run_id: str, found: Rebuilt) -> Iterator[SampleRef]:
    """The ref of each id's newest whole shard, by the tokens of their newest ones; counts what is left out.

    Raises:
        StorageError: a shard cannot be read now.
    """
    tokens: dict[str, list[tuple[int, str]]] = {}
    for shard in store.scan():
        sample_id, token = name_parts(shard.key)
        tokens.setdefault(sample_id, []).append((token, shard.key))
    for shards in sorted(tokens.values(), key=max):
        refs = [ref for _, key in sorted(shards, reverse=True) if (ref := _read(store, key, run_id, found))]
        found.older += len(refs[1:])
        yield from refs[:1]


def _read(store: FeatureStore, key: str, run_id: str, found: Rebuilt) -> SampleRef | None:
    try:
        ref = read_own_ref(store, key)
        validate_any_ref(ref)
    except (SampleCorrupt, SchemaError) as error:
        found.damaged[key] = str(error)
        return None
    except SampleMissing:  # deleted since it was listed
        return None
    if ref.run_id != run_id:
        found.foreign += 1
        return None
    return ref
