"""Producers that keep their samples' tensors, and those who pull them, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pipeline
import samples as made
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.prompt import Prompt
from eaglefeed.schema.refs import SampleRef, encode_ref
from eaglefeed.storage.keeping import KeepingStore
from eaglefeed.storage.options import PeerOptions
from eaglefeed.storage.peer import PeerStore
from faults.processes import in_thread, wait_until

LOOPBACK = "127.0.0.1:0"
TOKEN = "a token of sixteen and more".replace(" ", "-")


@contextmanager
def keeping(address: str = LOOPBACK, *, clock: Any = None, **options: Any) -> Iterator[KeepingStore]:
    """A producer's store, which listens until the end of the block."""
    store = KeepingStore(address, PeerOptions(**options), **({"clock": clock} if clock else {}))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def pulling(**options: Any) -> Iterator[PeerStore]:
    """The store of all others."""
    store = PeerStore(PeerOptions(**options))
    try:
        yield store
    finally:
        store.close()


def put(store: KeepingStore, sample_id: str = "a-1", **shape: Any) -> SampleRef:
    features = made.tensors(**shape)
    return store.put(made.ref(features, sample_id=sample_id), features)


def port_of(store: KeepingStore) -> int:
    return int(store.uri.rpartition("/")[0].rpartition(":")[2])


@dataclass
class PeerRun(pipeline.Run):
    """A run whose producer, in this process, keeps its samples."""

    clock: pipeline.TurnableClock = field(default_factory=pipeline.TurnableClock)
    store: KeepingStore = field(kw_only=True)

    @property
    def held(self) -> int:
        return self.prompts.stats().held

    def offer(self, ref: SampleRef) -> None:
        """Put a ref as a hand-off would."""
        self.samples.put([QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)])


def stream_of(run: PeerRun, store: PeerStore, **options: Any) -> SampleStream:
    """What a trainer `t` sees of the run."""
    return SampleStream(run.samples, store, consumer="t", prompts=run.prompts, clock=run.clock, **options)


def make_and_vanish(run: PeerRun, store: KeepingStore, *prompts: Prompt) -> None:
    """A producer makes samples of prompts, keeps them in `store`, and does nothing any more, not even say farewell."""
    run.feed(*prompts, close=False)
    mine, run.store = run.store, store
    stop, doomed = threading.Event(), run.worker(name="doomed")
    doomed._leave = lambda _why: None  # type: ignore[method-assign]
    doomed._keeper.is_needed = lambda **_: False  # type: ignore[method-assign]
    thread = in_thread(lambda: doomed.run(stop))
    wait_until(lambda: run.held == len(prompts))
    stop.set()
    thread.join()
    run.store = mine
