"""Producers that keep their samples, as processes that are killed and stopped: nothing lost, nothing twice."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pipeline
from eaglefeed.consumer import leasing
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import PeerGone, SampleMissing
from eaglefeed.queue import EmbeddedServer, connect, open_queue, rules
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.prompt import PromptRow, encode_prompt
from eaglefeed.schema.refs import SampleRef, decode_ref
from eaglefeed.storage import peers as peers_module
from faults import peer_producer
from faults.processes import wait_until
from peers import pulling

PATIENCE_S = 60
PLENTY = 2**30

pytestmark = pytest.mark.timeout(180)


class Cluster:
    """A run's server and queues, and its producers."""

    def __init__(self, folder: Path, stack: ExitStack, data_plane: str) -> None:
        self._stack, self.data_plane = stack, data_plane
        server = stack.enter_context(EmbeddedServer(folder / "queue"))
        self._url = server.url
        client = connect(server.url)
        stack.callback(client.close)
        self.prompts, self.samples = open_queue(client, "run", "prompts"), open_queue(client, "run", "samples")
        self.puller = stack.enter_context(pulling(data_plane=data_plane))

    def feed(self, count: int, *, length: int = 3, close: bool = True) -> None:
        rows = [PromptRow((1 + index, *[2] * (length - 1)), (0, *[1] * (length - 1))) for index in range(count)]
        prompts = [pipeline.prompt(index, rows=(row,), max_length=length) for index, row in enumerate(rows)]
        self.prompts.put([QueueItem(each.sample_id, encode_prompt(each)) for each in prompts])
        if close:
            self.prompts.close()

    def start(self, name: str, capacity_bytes: int = PLENTY) -> "Producer":
        words = [peer_producer.__file__, self._url, name, self.data_plane, str(capacity_bytes)]
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return Producer(process)

    def refs(self) -> list[SampleRef]:
        return [decode_ref(item.payload) for item in self.samples.payloads()]

    def stream(self, **options: Any) -> SampleStream:
        return SampleStream(self.samples, self.puller, consumer="t", prompts=self.prompts, **options)


class Producer:
    """A process, and where it listens."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self._out = process.stdout
        self.uri = self._out.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> dict[str, Any]:
        """Wait for its end; what it did."""
        told = dict(json.loads(self._out.readline()))
        assert self.process.wait(PATIENCE_S) == 0
        return told

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.fixture(params=["http", "gloo"])
def data_plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(tmp_path: Path, data_plane: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(rules, "WORKER_GRACE_S", peer_producer.GRACE_S)
    monkeypatch.setattr(leasing, "_GONE_DELAY_S", 0.2)
    monkeypatch.setattr(leasing, "_RECALL_S", 0.2)
    monkeypatch.setattr(peers_module, "_GONE_S", 0.2)
    monkeypatch.setattr(peers_module, "_WAITS", 0)
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack, data_plane)


def ids_of(cluster: Cluster, uri: str) -> set[str]:
    return {ref.sample_id for ref in cluster.refs() if ref.store_uri == uri}


def test_a_killed_producers_held_prompts_and_nothing_else_are_made_again_and_each_is_trained_once(
    cluster: Cluster,
) -> None:
    doomed, other = cluster.start("same-name"), cluster.start("same-name")
    cluster.feed(24)
    wait_until(lambda: cluster.prompts.stats().held == 24)
    lost, others = ids_of(cluster, doomed.uri), ids_of(cluster, other.uri)
    assert lost and others  # noqa: PT018  one sentence
    assert len(lost | others) == 24
    doomed.kill()
    counts: Counter[str] = Counter()
    with cluster.stream(max_attempts=2) as stream:
        for batch in stream:
            (name,) = batch.sample_ids
            counts[name] += 1
            assert batch.aux_hidden_states[0, :, 0].tolist() == [1.0 + int(name[2:]), 2.0, 2.0]
        stats = stream.stats
    assert counts == {f"p-{index}": 1 for index in range(24)}
    assert (stats.redelivered, stats.dead, stats.retried) == (0, 0, 0)
    assert stats.gone >= len(lost)
    told = other.end()
    assert (told["produced"], told["dead"], told["retried"], told["stale"]) == (24, 0, 0, 0)
    done = cluster.prompts.stats()
    assert (done.done, done.held, done.dead, done.redelivered) == (24, 0, 0, 0)
    assert (cluster.samples.stats().done, cluster.samples.stats().redelivered) == (24, 0)


@pytest.mark.parametrize("data_plane", ["http"])
def test_a_stopped_producer_that_wakes_frees_what_was_made_again_and_delivers_nothing_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_PULL_S", 0.5)
    stopped, other = cluster.start("stopped"), cluster.start("other")
    cluster.feed(12, close=False)
    wait_until(lambda: cluster.prompts.stats().held == 12)
    old = [ref for ref in cluster.refs() if ref.store_uri == stopped.uri]
    stopped.process.send_signal(signal.SIGSTOP)
    counts: Counter[str] = Counter()
    with cluster.stream(max_attempts=2) as stream:
        while sum(counts.values()) < 12:
            for batch in stream.take(4, wait_s=0.2, linger_s=0.0):
                counts.update(batch.sample_ids)
                stream.ack()
        stopped.process.send_signal(signal.SIGCONT)
        wait_until(lambda: all(_is_freed(cluster, ref) for ref in old))
        cluster.prompts.close()
        assert list(stream) == []
    assert counts == {f"p-{index}": 1 for index in range(12)}
    assert stream.stats.dead == 0
    assert other.end()["produced"] == 12
    assert stopped.end()["produced"] == len(old)
    assert (cluster.samples.stats().done, cluster.prompts.stats().done) == (12, 12)


def _is_freed(cluster: Cluster, ref: SampleRef) -> bool:
    try:
        cluster.puller.header(ref)
    except SampleMissing:
        return True
    except PeerGone:  # it has just been woken, and its machine is busy
        return False
    return False


@pytest.mark.parametrize("data_plane", ["http"])
def test_a_producers_memory_stays_within_its_bound_and_it_goes_on_when_commits_free_room(cluster: Cluster) -> None:
    producer = cluster.start("p", 5 * _SAMPLE_BYTES)
    before = producer.rss_bytes()
    cluster.feed(24, length=_LENGTH)
    wait_until(lambda: cluster.prompts.stats().held == 5)
    largest = 0
    with cluster.stream(prefetch=1, held=2) as stream:
        for number, batch in enumerate(stream, 1):
            assert batch.input_ids.shape == (1, _LENGTH)
            assert cluster.prompts.stats().held <= 5
            largest = max(largest, producer.rss_bytes())
            del batch
            stream.ack(number)
            stream.commit(number)
    assert number == 24
    told = producer.end()
    assert (told["produced"], told["dead"], told["retried"]) == (24, 0, 0)
    # Beside what is kept: two in the making with what the target needs for them, and the allocator's leftovers.
    assert largest - before < (5 + 8) * _SAMPLE_BYTES, (largest - before) / _SAMPLE_BYTES
    assert 24 > 5 + 8


_LENGTH = 20_000
_SAMPLE_BYTES = _LENGTH * (12 * 4 + 3 * 8 + pipeline.VOCAB * 4) + 4096


@pytest.mark.parametrize("data_plane", ["http"])
def test_a_restarted_producer_of_the_same_name_does_not_keep_its_predecessors_prompts_held(cluster: Cluster) -> None:
    first = cluster.start("name")
    cluster.feed(2)
    wait_until(lambda: cluster.prompts.stats().held == 2)
    first.kill()
    second = cluster.start("name")
    with cluster.stream() as stream:
        assert sorted(name for batch in stream for name in batch.sample_ids) == ["p-0", "p-1"]
    assert second.end()["produced"] == 2
