"""What `eaglefeed store inspect` tells: a store's shards counted by state, and what a shard says of itself."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.letters import one_line
from eaglefeed.cli.reports import human_bytes
from eaglefeed.errors import ConfigError, EaglefeedError, SampleCorrupt, SchemaError
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.schema.refs import SampleRef, decode_ref, ref_to_json
from eaglefeed.storage.base import SHARD_KEY, FeatureStore, key_of
from eaglefeed.storage.files import read_header
from eaglefeed.storage.header import ShardHeader, ref_of
from eaglefeed.storage.janitor import STALE_TEMPORARY_S
from eaglefeed.storage.orphans import Judged, ShardState, is_known, judge_shards

__all__ = ["count_shards", "describe_shards", "show_counts", "show_shard"]

_PAGE = 1000
_NAMED = 20
_STATES = ("referenced", "dead_lettered", "released", "retained", "leased", "orphan", "foreign", "unreadable")


def count_shards(queues: RunQueues, store: FeatureStore) -> dict[str, Any]:
    """Shards and their bytes by state; of a run at work they are no snapshot, since both sides go on meanwhile."""
    ledger = QueueLedger(queues.run, queues.named)
    open_keys, dead_keys = set[str](), set[str]()
    for samples in ledger.releases():
        open_keys.update(_keys(item.payload for item in samples.payloads()))
        for group in samples.groups():
            dead_keys.update(_keys(letter.payload for letter in queues.named(samples.name, group).dead_letters()))
    done = "retained" if any(ledger.retains(samples.name) for samples in ledger.releases()) else "released"
    states = {name: {"shards": 0, "bytes": 0} for name in _STATES}
    unreadable: list[str] = []
    scan = store.scan()
    while page := list(islice(scan, _PAGE)):
        for judged in judge_shards(store, ledger, page):
            if judged.state is ShardState.GONE:
                continue
            state = states[_state(judged, open_keys, dead_keys, done)]
            state["shards"] += 1
            state["bytes"] += judged.shard.num_bytes
            if judged.state is ShardState.UNREADABLE and len(unreadable) < _NAMED:
                unreadable.append(judged.shard.key)
    temporaries = store.sweep(STALE_TEMPORARY_S, dry_run=True).removed
    return {
        "known": is_known(store, ledger),
        "states": states,
        "temporaries": temporaries,
        "unreadable_keys": unreadable,
    }


def _keys(payloads: Iterator[bytes]) -> Iterator[str]:
    for payload in payloads:
        try:
            yield key_of(decode_ref(payload))
        except (SchemaError, SampleCorrupt):
            continue


def _state(judged: Judged, open_keys: set[str], dead_keys: set[str], done: str) -> str:
    if judged.state is not ShardState.KEPT:
        return str(judged.state)
    if judged.shard.key in dead_keys:
        return "dead_lettered"
    return "referenced" if judged.shard.key in open_keys else done


def show_counts(counts: dict[str, Any], uri: str) -> list[str]:
    """The counts for people."""
    lines = [f"{one_line(key)}: unreadable" for key in counts["unreadable_keys"]]
    for name, state in counts["states"].items():
        if state["shards"] or name == "referenced":
            lines.append(f"{name.replace('_', '-')}: {state['shards']} shards, {human_bytes(state['bytes'])}")
    if counts["temporaries"]:
        lines.append(f"temporaries: {counts['temporaries']} files that crashed writes left")
    if not counts["known"]:
        lines.append(f"{uri}: the queue does not know them: before feeding, `eaglefeed store rebuild`, or delete them")
    return lines


def describe_shards(store: FeatureStore, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """What shards say of themselves, and the faults of those that cannot be read.

    Args:
        store: of the run.
        names: keys of shards in the store, or paths of files.

    Raises:
        ConfigError: a name is neither.
    """
    documents, faults = [], []
    for name in names:
        try:
            documents.append(_describe_shard(store, name))
        except ConfigError:
            raise
        except (EaglefeedError, OSError) as error:
            faults.append({"name": name, "fault": str(error), "kind": type(error).__name__})
    return documents, faults


def _describe_shard(store: FeatureStore, name: str) -> dict[str, Any]:
    if Path(name).is_file():
        return _describe(name, *_read_file(Path(name)))
    if SHARD_KEY.fullmatch(name):
        ref = store.read_ref(name)
        return _describe(name, store.header(ref), ref)
    raise ConfigError("no such shard", subject=name, wanted="xx/<sample_id>.<token>.safetensors, or a file's path")


def _read_file(path: Path) -> tuple[ShardHeader, SampleRef]:
    with path.open("rb") as file:
        header = read_header(file.fileno(), path.stat().st_size, path.name)
    folder = path.absolute().parent
    is_keyed = SHARD_KEY.fullmatch(f"{folder.name}/{path.name}")
    return header, ref_of(header, f"file://{folder.parent if is_keyed else folder}", path.name)


def _describe(name: str, header: ShardHeader, ref: SampleRef) -> dict[str, Any]:
    tensors = {
        key: {
            "dtype": tensor.spec.dtype,
            "shape": list(tensor.spec.shape),
            "begin": tensor.begin,
            "end": tensor.end,
            "xxh3_128": ref.checksums.get(key, ""),
        }
        for key, tensor in header.tensors.items()
    }
    return {"name": name, "num_bytes": header.file_bytes, "ref": ref_to_json(ref), "tensors": tensors}


def show_shard(document: dict[str, Any]) -> list[str]:
    """A shard for people."""
    lines = [f"{document['name']}: {human_bytes(document['num_bytes'])}", "tensors:"]
    lines += [
        f"  {name}: {tensor['dtype']} {tensor['shape']}, bytes {tensor['begin']} to {tensor['end']}, "
        f"xxh3_128 {tensor['xxh3_128']}"
        for name, tensor in document["tensors"].items()
    ]
    fields = {name: value for name, value in document["ref"].items() if name != "checksums"}
    lines += ["ref:", *(f"  {name}: {json.dumps(value)}" for name, value in fields.items())]
    return [one_line(line) for line in lines]
