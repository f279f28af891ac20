"""Both sides of pair groups: a server in this process, groups in threads, and processes that can be killed."""

import asyncio
import gc
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from torch import Tensor

from eaglefeed.errors import EaglefeedError
from eaglefeed.schema.protocol import INIT_NCCL, PAIR_HEADER
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.control import ControlClient, Fetched
from eaglefeed.storage.exchange import TensorExchange
from eaglefeed.storage.pair_group import RECEIVER, SENDER, PairGroup, join_pair
from eaglefeed.storage.pair_host import PairHost, PairReply, grant_pair
from eaglefeed.storage.pair_pool import PairPool
from eaglefeed.storage.pair_store import MeetingPlace, store_at
from eaglefeed.storage.replies import TensorReply
from eaglefeed.storage.serving import HttpServer
from eaglefeed.storage.shard import TensorWriter

torch.set_num_threads(1)
CPU = torch.device("cpu")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["eaglefeed.storage.exchange", "eaglefeed.storage.pair_host", "eaglefeed.storage.serving"]
)
MAX_BYTES = 2**30
JOIN_S = 30.0  # a DNS that does not answer takes ten


def tensors_for(seed: int, numel: int) -> dict[str, Tensor]:
    """What a server answers: each kind of tensor that a file can hold, all of it telling the seed."""
    return {
        "values": torch.arange(numel, dtype=torch.float32) + seed,
        "mask": torch.tensor([[seed % 2 == 0], [True], [False]]),
        "ids": torch.full((5,), seed),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "turned": (torch.arange(6).reshape(2, 3) + seed).t(),
    }


def is_answer(fetched: Fetched, seed: int, numel: int) -> bool:
    wanted = tensors_for(seed, numel)
    same = [torch.equal(fetched.tensors[name], tensor) for name, tensor in wanted.items()]
    return set(wanted) == set(fetched.tensors) and all(same) and fetched.metadata == {"seed": str(seed)}


def asked(seed: int, numel: int = 10) -> bytes:
    return json.dumps({"seed": seed, "numel": numel}).encode()


class PairServer:
    """Answers POST /t with `tensors_for`, over the pair that it is offered if it has it."""

    def __init__(self, *, host: str = "127.0.0.1", pair_timeout_s: float = 60.0, max_pairs: int = 8) -> None:
        self.pairs = PairHost(host, 0, ("gloo",), max_pairs=max_pairs)
        self.over: list[str] = []
        self.before: Callable[[int], None] = lambda _seed: None
        self.spoil: Callable[[dict[str, Tensor]], None] = lambda _tensors: None
        self._pair_timeout_s, self._threads = pair_timeout_s, ThreadPoolExecutor(4)
        started = threading.Barrier(4)  # all of its threads are there from the start: tests count threads
        list(self._threads.map(lambda _: started.wait(), range(4)))
        routes = [
            Route(INIT_NCCL, partial(grant_pair, self.pairs), methods=["POST"]),
            Route("/t", self._answer, methods=["POST"]),
        ]
        self._http = HttpServer(Router(routes))
        self._http.start(host, 0)
        self.url = self._http.url

    async def _answer(self, request: Request) -> Response:
        wanted = json.loads(await request.body())
        await asyncio.get_running_loop().run_in_executor(self._threads, self.before, wanted["seed"])
        tensors = tensors_for(**wanted)
        writer = TensorWriter(tensors, {"seed": str(wanted["seed"])})
        for _ in writer.chunks():
            pass
        self.spoil(tensors)
        pair = request.headers.get(PAIR_HEADER, "")
        self.over.append("pair" if self.pairs.backend_of(pair) else "body")
        if self.over[-1] == "pair":
            return PairReply(self.pairs, pair, writer, {}, self._pair_timeout_s)
        return TensorReply(writer, {}, 60.0)

    def stop(self) -> None:
        self._http.stop(0.5)
        self.pairs.close()
        self._threads.shutdown()


class PairClient:
    """Asks a PairServer."""

    def __init__(
        self, url: str, *, max_pairs: int = 4, ring: BufferRing | None = None, timeout_s: float = 2 * JOIN_S
    ) -> None:
        self.client = ControlClient(url)
        self.pool = PairPool(self.client, backend="gloo", device=CPU, max_pairs=max_pairs, timeout_s=timeout_s)
        self.exchange = TensorExchange(self.client, self.pool, ring)

    def ask(self, seed: int, numel: int = 10, *, timeout_s: float = 60.0, max_bytes: int = MAX_BYTES) -> Fetched:
        return self.exchange.fetch(
            "/t", asked(seed, numel), timeout_s=timeout_s, subject=f"answer {seed}", max_bytes=max_bytes
        )

    def epochs(self) -> list[int]:
        """Of the pairs that are not borrowed and have ever been open."""
        return [pair.epoch for pair in self.pool._idle if pair.epoch]

    def close(self) -> None:
        self.pool.close()
        self.client.close()


@contextmanager
def serving(**options: Any) -> Iterator[PairServer]:
    server = PairServer(**options)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def asking(url: str, **options: Any) -> Iterator[PairClient]:
    client = PairClient(url, **options)
    try:
        yield client
    finally:
        client.close()


def joined_pair(timeout_s: float = JOIN_S) -> tuple[PairGroup, PairGroup]:
    """Sender and receiver, both in this process."""
    store = torch.distributed.HashStore()
    found: dict[int, PairGroup] = {}

    def join(rank: int) -> None:
        found[rank] = join_pair(store, backend="gloo", rank=rank, timeout_s=timeout_s)

    together(*(partial(join, rank) for rank in (SENDER, RECEIVER)))
    return found[SENDER], found[RECEIVER]


def together(*works: Callable[[], object]) -> list[BaseException | None]:
    """Run works at the same time; what each raised."""
    errors: list[BaseException | None] = [None] * len(works)

    def run(index: int, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            errors[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def held() -> tuple[int, int]:
    """Open files and threads of this process, with those that starting others takes for good."""
    forkserver.ensure_running()
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def nothing_left_since(before: tuple[int, int]) -> bool:
    """Whether no more files and threads are there than before; an earlier test's may have ended meanwhile."""
    return all(now <= then for now, then in zip(held(), before, strict=True))


@contextmanager
def process(work: Callable[..., None], *args: object) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs `work(pipe, *args)`; it does not outlive the block."""
    ours, theirs = PROCESSES.Pipe()
    child = PROCESSES.Process(target=work, args=(theirs, *args), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()


@contextmanager
def pair_with_process(
    rank: int, num_bytes: int, timeout_s: float, signal: int = 0
) -> Iterator[tuple[PairGroup, BaseProcess, Connection]]:
    """A pair whose `rank` side is another process, which makes one transfer of `num_bytes` when it is told to."""
    place = MeetingPlace("127.0.0.1", 0)
    with process(_other_side, place.port, rank, num_bytes, timeout_s, signal) as (child, pipe):
        group = join_pair(place.store("k", JOIN_S), backend="gloo", rank=1 - rank, timeout_s=JOIN_S)
        try:
            yield group, child, pipe
        finally:
            group.close()
            place.close()


def _other_side(pipe: Connection, port: int, rank: int, num_bytes: int, timeout_s: float, signal: int) -> None:
    group = join_pair(store_at("127.0.0.1", port, "k", JOIN_S), backend="gloo", rank=rank, timeout_s=JOIN_S)
    data = torch.full((num_bytes,), 7, dtype=torch.uint8)
    pipe.recv()
    try:
        if rank == SENDER:
            group.send([data], label=b"", timeout_s=timeout_s)
        else:
            arrived = partial(_signal_self, signal) if signal else lambda _done: None
            group.receive([data], label=b"", timeout_s=timeout_s, arrived=arrived)
        pipe.send("done")
    except EaglefeedError as error:
        pipe.send(type(error).__name__)
    pipe.recv()


def _signal_self(signal: int, _done: int) -> None:
    os.kill(os.getpid(), signal)


def serve_in_process(pipe: Connection) -> None:
    server = PairServer()
    pipe.send(server.url)
    pipe.recv()


def ask_and_signal_self(pipe: Connection, url: str, numel: int, signal: int) -> None:
    """Ask for an answer, and in the middle of it send oneself a signal."""
    client = PairClient(url)
    request = client.exchange.open("/t", asked(1, numel), timeout_s=60.0, subject="answer", max_bytes=MAX_BYTES)
    with request as answer:
        answer.read(memoryview(bytearray(answer.num_bytes)), partial(_signal_self, signal))
    pipe.send("done")
