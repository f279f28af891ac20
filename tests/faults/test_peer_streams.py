"""Producers that keep their samples, and the queue, in this process: made again, trained on once, freed in the end."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

import pipeline
from eaglefeed.consumer import leasing
from eaglefeed.errors import ConfigError, PeerGone
from eaglefeed.producer import worker
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.queue.base import Lease, LeaseQueue
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage import janitor, peers
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import Janitor
from eaglefeed.storage.keeping import KeepingStore
from faults.processes import in_thread, spawned, wait_until
from peers import TOKEN, PeerRun, keeping, make_and_vanish, port_of, pulling, put, stream_of

THREE = tuple(pipeline.prompt(index) for index in range(3))


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GONE_S", 0.05)
    monkeypatch.setattr(leasing, "_GONE_DELAY_S", 0.05)
    monkeypatch.setattr(leasing, "_RECALL_S", 0.05)
    monkeypatch.setattr(worker, "_RECALL_S", 0.2)


@pytest.fixture
def run() -> Iterator[PeerRun]:
    with keeping() as store:
        yield PeerRun(store=store)


def test_a_stream_with_a_wrong_token_ends_and_gives_its_samples_back_uncounted() -> None:
    with keeping(token=TOKEN) as store, pulling(token="quite-another-token") as puller:
        run = PeerRun(store=store)
        run.offer(put(store))
        with stream_of(run, puller) as stream, pytest.raises(ConfigError, match="token"):
            stream.take(1)
        assert (run.samples.stats().ready, run.samples.stats().dead) == (1, 0)
        assert [item.delivery_count for item in run.samples.payloads()] == [0]


_DIES_IN_A_PULL = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as reader:
    reader.sendall(f"GET {sys.argv[2]} HTTP/1.1\\r\\nhost: h\\r\\n\\r\\n".encode())
    reader.recv(10_000)
    print("in the middle", flush=True)
    sys.stdin.read()
"""


def test_a_trainer_killed_in_the_middle_of_a_pull_costs_its_lease_alone(run: PeerRun) -> None:
    ref = put(run.store, batch=4, length=50_000)
    run.offer(ref)
    run.samples.close()
    assert isinstance(run.samples.lease(1, visibility_timeout_s=60, consumer="dies"), Lease)
    path = f"/{run.store.uri.rpartition('/')[2]}/samples/{key_of(ref)}"
    with spawned((_DIES_IN_A_PULL, str(port_of(run.store)), path)) as (trainer,):
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "in the middle\n"
        trainer.kill()
    run.clock.advance(61)
    with pulling() as puller, stream_of(run, puller, values="never") as stream:
        assert [batch.input_ids.shape for batch in stream] == [(4, 50_000)]
    assert (stream.stats.redelivered, stream.stats.gone, stream.stats.dead) == (1, 0, 0)
    assert list(run.store.scan()) == []


def test_refs_of_dead_producers_are_given_back_uncounted_and_never_become_dead_letters(run: PeerRun) -> None:
    with keeping() as dead:
        run.offer(put(dead))
    with pulling() as puller, stream_of(run, puller, max_attempts=2) as stream:
        stream.take(1, wait_s=0.0)
        wait_until(lambda: stream.stats.gone >= 5)
        stats = stream.stats
        assert (stats.dead, stats.retried, stats.delivered) == (0, 0, 0)
    assert [item.delivery_count for item in run.samples.payloads()] == [0]
    assert list(run.samples.dead_letters()) == []
    assert run.samples.stats().redelivered == 0


def _lose(run: PeerRun, *prompts: Any) -> None:
    """A producer makes samples of prompts, and dies."""
    with keeping() as doomed:
        make_and_vanish(run, doomed, *prompts)


def test_a_dead_producers_samples_are_made_again_and_each_is_trained_on_once(run: PeerRun) -> None:
    _lose(run, *THREE)
    run.prompts.close()
    with pulling() as puller, stream_of(run, puller) as stream:
        stream.take(1, wait_s=0.0)
        wait_until(lambda: stream.stats.gone >= 3)
        run.clock.advance(31)
        thread = in_thread(run.produce)
        found = [sample for batch in stream for sample in batch.sample_ids]
        thread.join()
        assert sorted(found) == ["p-0", "p-1", "p-2"]
        assert (stream.stats.redelivered, stream.stats.dead) == (0, 0)
    assert (run.prompts.stats().done, run.samples.stats().done) == (3, 3)
    assert list(run.store.scan()) == []


def test_a_trainer_asks_for_the_prompts_of_the_dead_to_be_taken_back(run: PeerRun) -> None:
    _lose(run, *THREE)
    run.clock.advance(31)
    with pulling() as puller, stream_of(run, puller) as stream:
        stream.take(1, wait_s=0.0)
        wait_until(lambda: run.samples.stats().parked == 3)
    assert (run.held, run.prompts.stats().ready) == (0, 3)


def test_a_trainer_does_not_end_while_a_dead_producers_samples_are_made_again(run: PeerRun) -> None:
    """The samples are closed by a producer that knows nothing of the recall."""
    _lose(run, THREE[0])
    run.prompts.close()
    run.clock.advance(31)
    assert run.prompts.recall(run.samples) == 1
    run.samples.close()
    with pulling() as puller, stream_of(run, puller) as stream:
        assert stream.take(1, wait_s=0.5) == []
        assert not stream.ended
        thread = in_thread(run.produce)
        assert [batch.sample_ids for batch in stream] == [("p-0",)]
        thread.join()


def test_a_producer_that_lives_and_cannot_be_reached_is_told_and_ends_the_stream_if_wanted(run: PeerRun) -> None:
    with keeping() as out_of_reach:
        run.offer(put(out_of_reach))
    with pulling() as puller, structlog.testing.capture_logs() as logs:
        with stream_of(run, puller) as stream:
            stream.take(1, wait_s=0.0)
            wait_until(lambda: stream.stats.gone >= 2)
            run.clock.advance(61)  # it shows signs of life: nobody takes its prompts back
            wait_until(lambda: any(entry["event"] == "producer_unreachable" for entry in logs))
        run.clock.advance(30)
        with stream_of(run, puller, fail_without_producers=True) as stream:
            stream.take(1, wait_s=0.0)
            wait_until(lambda: stream.stats.gone >= 1)
            run.clock.advance(61)
            with pytest.raises(PeerGone, match="can be reached from here"):
                stream.take(1)
    assert (run.samples.stats().delayed, run.samples.stats().dead, run.samples.stats().leased) == (1, 0, 0)
    assert [item.delivery_count for item in run.samples.payloads()] == [0]


def test_a_trainer_ends_when_a_parked_samples_prompt_became_a_dead_letter(run: PeerRun) -> None:
    _lose(run, THREE[0])
    run.prompts.close()
    run.clock.advance(31)
    run.target.before = lambda _ids: 1 // 0 and None
    run.prompts.recall(run.samples)
    lease = run.prompts.lease(1, visibility_timeout_s=60, consumer="c")
    run.prompts.nack(lease.token, ["p-0"], reason="poison", retryable=False)  # type: ignore[union-attr]
    run.samples.close()
    with pulling() as puller, stream_of(run, puller) as stream:
        assert list(stream) == []
    assert run.samples.stats().parked == 1


def test_samples_that_stay_with_their_producer_cannot_be_retained(run: PeerRun) -> None:
    with pulling() as puller, pytest.raises(ConfigError, match="retained"):
        stream_of(run, puller, retain=True)


# freed in the end


def _tensors(store: KeepingStore) -> list[Callable[[], object]]:
    return [weakref.ref(tensor) for sample in store._samples.all() for tensor in sample.writer.tensors.values()]


def test_a_commit_frees_the_tensors_and_the_producer_ends(run: PeerRun) -> None:
    run.feed(*THREE)
    thread = in_thread(run.produce)
    with pulling() as puller, stream_of(run, puller) as stream:
        wait_until(lambda: run.held == 3)
        kept_tensors = _tensors(run.store)
        assert len(kept_tensors) == 15
        batches = stream.take(3)
        stream.ack(1)
        gc.collect()
        assert all(tensor() is not None for tensor in kept_tensors)
        assert thread.is_alive()
        stream.commit(1)
        wait_until(lambda: gc.collect() >= 0 and all(tensor() is None for tensor in kept_tensors))
        assert [batch.sample_ids for batch in batches] == [("p-0",), ("p-1",), ("p-2",)]
    thread.join(20)
    assert not thread.is_alive()
    assert (run.prompts.stats().done, run.held) == (3, 0)
    assert run.samples.stats().workers == {}


def _named(run: PeerRun) -> Any:
    def named(name: str) -> LeaseQueue:
        return {"prompts": run.prompts, "samples": run.samples}[name]

    return named


def test_a_trainer_that_dies_between_commit_and_delete_leaves_nothing_for_long(run: PeerRun) -> None:
    run.feed(*THREE)
    tidy = Janitor(run.store, QueueLedger("run", _named(run)), interval_s=0.01, clock=run.clock)
    thread = in_thread(lambda: run.produce(tidy=tidy.maybe_run))
    wait_until(lambda: run.held == 3)
    lease = run.samples.lease(3, visibility_timeout_s=60, consumer="dies")
    run.samples.ack(lease.token, ["p-0"], step=1)  # type: ignore[union-attr]
    run.samples.commit(1)
    wait_until(lambda: [shard.key.partition("/")[2].partition(".")[0] for shard in run.store.scan()] == ["p-1", "p-2"])
    assert thread.is_alive()
    run.samples.ack(lease.token, ["p-1", "p-2"])  # type: ignore[union-attr]
    thread.join(20)
    assert not thread.is_alive()


def test_what_a_producer_kept_of_samples_that_another_one_has_made_again_is_freed_when_it_wakes(run: PeerRun) -> None:
    with keeping(clock=run.clock) as paused, pulling() as puller:
        make_and_vanish(run, paused, *THREE)
        with stream_of(run, puller) as stream:
            assert [batch.sample_ids for batch in stream.take(1)] == [("p-0",)]
            stream.ack()
        run.clock.advance(31)
        thread = in_thread(run.produce)
        wait_until(lambda: _makers(run) == {run.store.uri})
        run.clock.advance(300)
        found = janitor.collect(paused, QueueLedger("run", _named(run)), clock=run.clock)
        assert list(paused.scan()) == []
        assert (found.orphans, len(list(run.store.scan()))) == (2, 2)
        run.prompts.close()
        with stream_of(run, puller) as stream:
            assert [batch.sample_ids for batch in stream] == [("p-1",), ("p-2",)]
        thread.join(20)
    assert (run.samples.stats().done, run.prompts.stats().done, run.samples.stats().dead) == (3, 3, 0)


def _makers(run: PeerRun) -> set[str]:
    return {decode_ref(item.payload).store_uri for item in run.samples.payloads()}
