"""A run that tests take apart step by step: queues on a real server, a store that is a folder, actors."""

import threading
from itertools import count
from pathlib import Path

import pipeline
from eaglefeed.producer.worker import ProducerStats, ProducerWorker
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import DrainState, Lease, LeaseQueue, NoLease, QueueItem
from eaglefeed.queue.connection import QueueClient
from eaglefeed.schema.prompt import encode_prompt
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.base import open_store
from faults.chaos.actors import Actor

_numbers = count(1)


class Run:
    """A run of the test's own: queues on the server, and a store that is a folder."""

    def __init__(self, client: QueueClient, folder: Path) -> None:
        self._client, self.folder, self.namespace = client, folder / "shards", f"interleaved{next(_numbers)}"
        self.store = open_store(f"file://{self.folder}")
        self.prompts, self.samples = self.queue("prompts"), self.queue("samples")

    def queue(self, name: str) -> LeaseQueue:
        return open_queue(self._client, self.namespace, name)

    def actor(self, role: str) -> Actor:
        return Actor(role, self._client.address, self.namespace, self.folder)

    def feed(self, num_prompts: int = 1) -> None:
        made = [pipeline.prompt(index) for index in range(num_prompts)]
        self.prompts.put([QueueItem(each.sample_id, encode_prompt(each)) for each in made])
        self.prompts.close()

    def produce(self, target: pipeline.EchoTarget | None = None) -> ProducerStats:
        """A producer in this process, to the end of the prompts."""
        worker = ProducerWorker(
            prompts=self.prompts,
            samples=self.samples,
            store=self.store,
            target=target or pipeline.EchoTarget(),
            contract=pipeline.contract(),
            assets=lambda: ({}, {}),
            run_id="run",
            name="other",
        )
        return worker.run(threading.Event())

    def shards(self) -> set[str]:
        return {shard.key for shard in self.store.scan()}

    def the_sample(self) -> str:
        """The only sample's shard, whose tensors are the prompt's."""
        (item,) = self.samples.payloads()
        ref = decode_ref(item.payload)
        assert self.store.get(ref)["aux_hidden_states"][0, :, 0].tolist() == [1.0, 2.0, 3.0]
        return ref.feature_keys["input_ids"]


def lease(queue: LeaseQueue, n: int, *, session: int = 0, timeout_s: float = 60.0) -> Lease:
    got = queue.lease(n, visibility_timeout_s=timeout_s, consumer="test", wait_s=10.0, session=session)
    assert isinstance(got, Lease)
    return got


def ids_of(got: Lease) -> list[str]:
    return [item.id for item in got.items]


def learn(queue: LeaseQueue, n: int, *, step: int, session: int) -> list[str]:
    """Lease and acknowledge `n` items as learned at `step`."""
    got = lease(queue, n, session=session)
    assert queue.ack(got.token, ids_of(got), step=step, session=session).stale == ()
    return ids_of(got)


def put(queue: LeaseQueue, num_items: int) -> list[str]:
    ids = [f"s{index}" for index in range(num_items)]
    queue.put([QueueItem(item_id, b"payload", stored_bytes=10) for item_id in ids])
    return ids


def state_of(queue: LeaseQueue, session: int = 0) -> DrainState:
    got = queue.lease(1, visibility_timeout_s=60, consumer="test", session=session)
    assert isinstance(got, NoLease)
    return got.state
