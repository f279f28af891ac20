"""Many requests, samples and streams, a fifth of them failing: memory, files and threads stay where they were."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog

import pipeline
import queue_servers
from coded_target import CodedTarget, row
from eaglefeed.consumer import leasing
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import TargetError
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.schema.eagle3 import EAGLE3_CORE_FEATURES
from eaglefeed.storage.base import open_store
from target_servers import serving

POISON, BYTES_EACH = 40, 1024


class Forgetful(CodedTarget):
    """Keeps nothing of its forwards."""

    def _forward(self, rows: Any, position_ids: Any) -> Any:
        self.forwards.clear()
        return super()._forward(rows, position_ids)


class Growth:
    """This process's resident memory over what it does again and again, after a warm-up.

    What leaks grows all the time; what an allocator takes once, for whatever ran in this process before, does not.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up, self._numbers, self._points = warm_up, itertools.count(), list[tuple[int, int]]()

    def note(self) -> None:
        if (number := next(self._numbers)) >= self._warm_up and number % 20 == 0:
            self._points.append((number, int(Path("/proc/self/statm").read_text().split()[1]) * 4096))

    @property
    def bytes_each(self) -> float:
        """Slope of the least-squares line, of the third of the time in which it is least."""
        third = len(self._points) // 3
        return min(_slope(self._points[place : place + third]) for place in (0, third, 2 * third))


def _slope(points: list[tuple[int, int]]) -> float:
    mean_x, mean_y = (sum(each) / len(points) for each in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


@pytest.fixture(autouse=True)
def _silent() -> None:
    """Lines that pytest keeps would be counted too."""
    structlog.configure(processors=[_drop])


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


@pytest.fixture
def client(tmp_path: Path) -> Iterator[QueueClient]:
    servers = queue_servers.real_servers()
    if not servers:
        pytest.skip("no Redis or Valkey server is installed")
    with (
        EmbeddedServer(tmp_path / "queue", binary=next(iter(servers.values()))) as server,
        closing(connect(server.url)) as opened,
    ):
        yield opened


def test_requests_of_which_a_fifth_fails_leave_nothing_behind_and_answers_hold_what_was_asked_for_alone() -> None:
    target, growth, failed = Forgetful(), Growth(300), 0
    target.poison.add(POISON)
    wanted = {*EAGLE3_CORE_FEATURES, "logits"}
    with (
        serving(target) as server,
        closing(RemoteEagle3TargetModel([server.url], device="cpu", max_retries=0)) as model,
    ):
        for number in range(1200):
            try:
                batch = model.generate_batch(*row(POISON if number % 5 == 4 else 1 + number % 5, 2, 3))
                assert set(batch.tensors()) == wanted
            except TargetError:
                failed += 1
            growth.note()
    assert failed == 240
    assert growth.bytes_each < BYTES_EACH


def test_samples_of_which_a_fifth_fails_leave_nothing_behind_in_producer_and_trainer(
    client: QueueClient, tmp_path: Path
) -> None:
    num, shards = 2000, tmp_path / "shards"
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=open_store(f"file://{shards}", durability="none"))
    run.prompts, run.samples = (open_queue(client, "run", name) for name in ("prompts", "samples"))
    produced, trained = Growth(400), Growth(400)

    def make(ids: Any) -> None:
        produced.note()
        if ids[0, 0] == POISON:
            raise RuntimeError("poison")

    run.target.before = make
    prompts = [
        pipeline.prompt(at, rows=(pipeline.PromptRow((POISON if at % 5 == 4 else 1 + at % 5, 2), (0, 1)),))
        for at in range(num)
    ]
    for at in range(0, num, 500):
        run.feed(*prompts[at : at + 500], close=at + 500 == num)
    stats = run.worker(max_attempts=1).run(threading.Event())
    assert (stats.produced, stats.dead) == (num * 4 // 5, num // 5)
    for damaged in sorted(shards.glob("*/*.safetensors"))[::5]:
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        for _ in stream:
            trained.note()
    assert (run.samples.stats().done, run.samples.stats().dead) == (num * 16 // 25, num * 4 // 25)
    assert len(list(run.store.scan())) == num * 4 // 25  # those of the dead letters
    assert produced.bytes_each < BYTES_EACH
    assert trained.bytes_each < BYTES_EACH


def _open_files_and_threads() -> tuple[list[str], list[str]]:
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(each.partition(":[")[0] for each in files), sorted(each.name for each in threading.enumerate())


@pytest.mark.parametrize("kind", ["stream", "rounds"])
def test_streams_that_are_opened_and_closed_again_and_again_leave_no_file_thread_or_socket(
    kind: str, client: QueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)
    filled = pipeline.Run(store=open_store(f"file://{tmp_path / 'shards'}", durability="none"))
    filled.prompts, filled.samples = (open_queue(client, "run", name) for name in ("prompts", "samples"))
    filled.feed(*(pipeline.prompt(index) for index in range(12)))
    filled.produce()

    def live() -> None:
        store, own = open_store(f"file://{tmp_path / 'shards'}"), connect(client.address)
        samples = open_queue(own, "run", "samples")
        contract = pipeline.contract(max_length=16)
        if kind == "stream":
            stream: Any = SampleStream(samples, store, consumer="t", contract=contract)
        else:
            options: dict[str, Any] = {"ranks": Ranks.alone(), "samples_per_step": 1, "draft_vocab_size": 5}
            stream = RoundStream(samples, store, consumer="t", contract=contract, **options)
        with stream:
            assert stream.take(1)
        own.close()
        store.close()

    for _ in range(2):
        live()
    before = _open_files_and_threads()
    for _ in range(10):
        live()
    assert _open_files_and_threads() == before
