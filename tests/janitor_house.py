"""A run over a folder, for tests of what a janitor finds there."""

from pathlib import Path
from typing import Any

import pipeline
import samples as made
from eaglefeed.producer.ledger import QueueLedger, register
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.contract import CONTRACT_FILE
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import Collected, collect
from eaglefeed.storage.shared_dir import SharedDirStore

ONE = pipeline.prompt(0)
THREE = tuple(pipeline.prompt(index) for index in range(3))


class House:
    """A run over a folder, and queues of it that can be lost."""

    def __init__(self, folder: Path, run_id: str = "run", clock: pipeline.TurnableClock | None = None) -> None:
        clock = clock or pipeline.TurnableClock()
        self.run = pipeline.Run(clock=clock, store=SharedDirStore(folder, clock=clock))
        self.run_id, self.clock, self.store = run_id, clock, self.run.store
        self.lose_queue()

    def lose_queue(self) -> None:
        self._server = MemoryServer(self.clock)
        self.run.prompts, self.run.samples = self.open("prompts"), self.open("samples")

    def open(self, name: str) -> LeaseQueue:
        return MemoryLeaseQueue(self._server, "run", name)

    @property
    def ledger(self) -> QueueLedger:
        return QueueLedger(self.run_id, self.open)

    def later(self, seconds: float = 61) -> "House":
        self.clock.advance(seconds)
        return self

    def gc(self, **options: Any) -> Collected:
        return collect(self.store, self.ledger, clock=self.clock, **options)

    def write(self, sample_id: str, token: int) -> SampleRef:
        tensors = made.tensors()
        return self.store.put(made.ref(tensors, sample_id=sample_id, token=token, run_id=self.run_id), tensors)

    def begin(self, *prompts: Any) -> tuple[Lease, SampleRef]:
        """Lease a prompt as a producer does, and write its shard; no hand-off yet."""
        self.run.feed(*(prompts or [ONE]), close=False)
        register(self.store, self.run.samples, self.run_id)
        self.store.put_document(CONTRACT_FILE, pipeline.contract(max_length=16).to_json())
        held = lease(self.run.prompts)
        return held, self.write(held.items[0].id, held.token)

    def hand_off(self, held: Lease, ref: SampleRef) -> None:
        item = QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)
        self.run.prompts.handoff(held.token, ref.sample_id, item, self.run.samples)

    def take_over(self) -> None:
        """The leases of whoever stalled or died run out; another producer does the rest."""
        self.later()
        self.run.prompts.close()
        assert self.run.produce(name="other").dead == 0

    @property
    def keys(self) -> set[str]:
        return {shard.key for shard in self.store.scan()}

    @property
    def open_keys(self) -> set[str]:
        return {key_of(decode_ref(item.payload)) for item in self.run.samples.payloads()}


def lease(queue: LeaseQueue, n: int = 1) -> Lease:
    got = queue.lease(n, visibility_timeout_s=60, consumer="c")
    assert isinstance(got, Lease)
    return got
