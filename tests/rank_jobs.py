"""Jobs of several ranks, each a process of its own, over gloo: what a rank does, and what it tells its test."""

import dataclasses
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import pipeline
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.storage.base import FeatureStore, open_store

PATIENCE_S = 60.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "eaglefeed.consumer.hf_trainer",
        "eaglefeed.consumer.rounds",
        "eaglefeed.producer.worker",
        "eaglefeed.queue.memory",
        "eaglefeed.queue.redis",
        "eaglefeed.storage.shared_dir",
        "eaglefeed.storage.exchange",
        "eaglefeed.storage.pair_host",
        "eaglefeed.storage.serving",
    ]
)
CONTRACT = pipeline.contract(max_length=16)


@dataclass
class Rank:
    """A rank's process, and what it says."""

    process: BaseProcess
    pipe: Connection

    def hear(self) -> Any:
        """The next thing it says."""
        assert self.pipe.poll(PATIENCE_S), "it says nothing"
        return self.pipe.recv()

    def say(self, word: Any) -> None:
        self.pipe.send(word)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def job(world_size: int, work: Callable[..., None], *args: Any) -> Iterator[list[Rank]]:
    """Processes that run `work(pipe, *args)` as the ranks of a job; none outlives the block."""
    started: list[Rank] = []
    port = _free_port()
    try:
        for rank in range(world_size):
            ours, theirs = PROCESSES.Pipe()
            child = PROCESSES.Process(target=_rank, args=(theirs, rank, world_size, port, work, args), daemon=True)
            child.start()
            theirs.close()
            started.append(Rank(child, ours))
        yield started
    finally:
        for each in started:
            each.process.kill()
        for each in started:
            each.process.join()
            each.process.close()
            each.pipe.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _rank(
    pipe: Connection, rank: int, world_size: int, port: int, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        work(pipe, *args)
    except BaseException as error:  # noqa: BLE001 - its test looks at it
        with suppress(OSError):
            pipe.send((type(error).__name__, str(error)))
        if not isinstance(error, EaglefeedError):
            traceback.print_exc()
        raise SystemExit(1) from None


@dataclass
class Plan:
    """A job over a run in a folder.

    Args:
        folder: of the shards.
        redis_url: of the queue; "" for one in rank 0's memory.
        num_samples: that rank 0 makes first.
        spoilt: numbers of those whose shards are damaged then.
        step: samples a step and rank.
        timeout_s: of the ranks.
        idle_s: of the loop.
        pauses: rank → the step before which it says "here", and waits for a word.
        options: more of the stream's.
    """

    folder: Path
    redis_url: str = ""
    num_samples: int = 0
    spoilt: tuple[int, ...] = ()
    step: int = 2
    timeout_s: float = 20.0
    idle_s: float | None = 5.0
    pauses: dict[int, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def train(pipe: Connection, plan: Plan) -> None:
    """Take rounds until the end, as a training loop does, and tell what came: a row a round, and then the end."""
    store = open_store(f"file://{plan.folder}")
    with Ranks.of_job(timeout_s=plan.timeout_s) as ranks:
        samples = prepared(plan, store) if ranks.is_first else None
        with RoundStream(
            samples,
            store,
            ranks=ranks,
            samples_per_step=plan.step,
            contract=CONTRACT,
            draft_vocab_size=5,
            consumer="job",
            **plan.options,
        ) as stream:
            _loop(pipe, plan, ranks, stream)
        pipe.send(("stats", dataclasses.asdict(stream.stats)))
        if samples is not None:
            stats = samples.stats()
            pipe.send({name: getattr(stats, name) for name in ("done", "dead", "ready", "leased", "tentative")})


def _loop(pipe: Connection, plan: Plan, ranks: Ranks, stream: RoundStream) -> None:
    stream.load_state_dict(stream.state_dict())
    step = 0
    while not stream.ended:
        if plan.pauses.get(ranks.rank) == step:
            pipe.send("here")
            if pipe.recv() == "stop":
                stream.stop()
        batches = stream.take(plan.step, wait_s=plan.idle_s)
        if batches:
            step += 1
            supervised = torch.tensor([float(sum(int(batch.loss_mask.sum()) for batch in batches))])
            ranks.sum([supervised])
            pipe.send(([batch.sample_ids for batch in batches], stream.round_ids, supervised.item()))
            stream.ack(step)
        if not batches:
            stream.commit(step)
    stream.commit(step)
    pipe.send(("end", stream.drained))


def prepared(plan: Plan, store: FeatureStore) -> LeaseQueue:
    """The samples' queue, filled if the plan says so."""
    if plan.redis_url:
        return open_queue(connect(plan.redis_url, max_wait_s=20.0), "run", "samples")
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=store)
    fill(run, plan.num_samples)
    for number in plan.spoilt:
        spoil(plan.folder, number)
    return run.samples


def fill(run: pipeline.Run, num_samples: int) -> None:
    run.feed(*(pipeline.prompt(index) for index in range(num_samples)))
    run.produce()


def spoil(folder: Path, number: int) -> None:
    """Turn a bit of a sample's shard."""
    (path,) = folder.rglob(f"p-{number}.*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
