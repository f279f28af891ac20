"""A server that lost the run, or went back to an older copy of it, is told from one that is drained or just empty."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog

import pipeline
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import StaleLease, UnsafeServer
from eaglefeed.queue import EmbeddedServer, open_queue
from eaglefeed.queue.base import DrainState, LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.connection import QueueClient
from faults.processes import kill, restarted, wait_until
from queue_steps import LONG_S, counts, ids, items, lease, nothing, numbered

LOST = r"run/samples: the server lost the run's data.*store rebuild"


@contextmanager
def older_copy(server: EmbeddedServer, client: QueueClient) -> Iterator[None]:
    """What the body does is lost: the server is killed, and comes back with its files of before."""
    wait_until(lambda: b"aof_buffer_length:0\r" in client.call("INFO", "persistence"))
    kept = server.folder.with_name("kept")
    shutil.copytree(server.folder, kept, ignore=shutil.ignore_patterns("*.sock"))
    yield
    kill(server, client)
    for path in server.folder.iterdir():
        if (kept / path.name).is_dir():
            shutil.rmtree(path)
            shutil.copytree(kept / path.name, path)
        elif path.suffix in (".aof", ".rdb"):
            shutil.copy(kept / path.name, path)


# all of it


@pytest.mark.parametrize("closed", [False, True])
def test_a_flushed_server_is_neither_drained_nor_waited_for(
    client: QueueClient, queue: LeaseQueue, closed: bool
) -> None:
    held = lease(queue, 2)
    if closed:
        queue.close()
    client.call("FLUSHALL")
    assert queue.ack(held.token, ids(held)).ok == ()
    with pytest.raises(UnsafeServer, match=LOST):
        queue.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=60)


def test_who_has_leased_nothing_yet_is_told_too(client: QueueClient) -> None:
    samples = open_queue(client, "run", "samples")
    samples.configure(QueueLimits(), groups=["main"])
    nothing(samples)
    client.call("FLUSHALL")
    with pytest.raises(UnsafeServer, match=LOST):
        nothing(samples)


def test_what_another_application_flushes_of_its_own_database_is_nobody_elses(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    held = lease(queue, 6)
    client.call("EVAL", "redis.call('SELECT', 1) redis.call('SET', 'theirs', 1) redis.call('FLUSHDB')", 0)
    assert len(queue.ack(held.token, ids(held)).ok) == 6
    assert nothing(queue).state is DrainState.EMPTY


@pytest.mark.parametrize("leased", [0, 2])
def test_a_purged_queue_and_one_that_waits_for_its_first_item_are_not_lost(queue: LeaseQueue, leased: int) -> None:
    if leased:
        lease(queue, leased)
    queue.purge()
    assert nothing(queue).state is DrainState.EMPTY
    queue.put(items("again"))
    assert ids(lease(queue)) == ["again"]


def test_a_run_that_is_fed_again_after_a_loss_goes_on(client: QueueClient, queue: LeaseQueue) -> None:
    lease(queue, 2)
    client.call("FLUSHALL")
    with pytest.raises(UnsafeServer):
        nothing(queue)
    assert nothing(queue).state is DrainState.EMPTY
    assert queue.put(items("i0", "i1")).accepted == 2
    assert ids(lease(queue)) == ["i0", "i1"]


def run_on(client: QueueClient) -> pipeline.Run:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.prompts, run.samples = (open_queue(client, "run", name) for name in ("prompts", "samples"))
    return run


def test_a_producer_and_a_trainer_end_with_it_instead_of_waiting_for_ever(client: QueueClient) -> None:
    run = run_on(client)
    run.feed(pipeline.prompt(0), pipeline.prompt(1), close=False)
    flushed = threading.Event()

    def flush() -> None:
        wait_until(lambda: run.samples.stats().ready == 2)
        client.call("FLUSHALL")
        flushed.set()

    flusher = threading.Thread(target=flush)
    flusher.start()
    with pytest.raises(UnsafeServer, match=r"run/prompts: the server lost the run's data"):
        run.worker(clock=run.clock).run(threading.Event())
    flusher.join()
    run.samples.put([QueueItem("x", b"no ref")])
    with SampleStream(run.samples, run.store, consumer="t", prompts=run.prompts) as stream:
        assert stream.take(1, wait_s=0.5) == []
        client.call("FLUSHALL")
        with pytest.raises(UnsafeServer, match=LOST):
            stream.take(1)


# its newest part


def test_a_server_that_went_back_to_an_older_copy_is_told_of_and_hands_out_what_it_knows(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    with older_copy(server, client):
        held = lease(queue, 4)
        queue.ack(held.token, ["i0"])
    with restarted(server):
        assert queue.ack(held.token, ids(held)[1:]).ok == ()  # it was leased to nobody, as far as the server knows
        with structlog.testing.capture_logs() as logs:
            again = lease(queue, 6)
            assert queue.ack(again.token, ids(again)).stale == ()
            nothing(queue)
        assert [entry["event"] for entry in logs if entry["event"] == "server_lost_writes"] == ["server_lost_writes"]
        assert (ids(again), again.token > held.token) == (["i0", "i1", "i2", "i3", "i4", "i5"], True)


def test_a_session_that_the_server_has_forgotten_is_not_taken_for_a_newer_trainer(
    server: EmbeddedServer, client: QueueClient, queue: LeaseQueue
) -> None:
    with older_copy(server, client):
        session = queue.restore(0)
    with restarted(server), pytest.raises(StaleLease, match=r"older data, or lost it.*start this trainer again"):
        queue.ack(1, ["i0"], session=session)


def test_what_a_lost_second_took_is_put_again_by_the_same_feed_without_duplicates(
    server: EmbeddedServer, client: QueueClient
) -> None:
    """100 refs, 10 leased; the server loses the last 40 puts and the lease, and all 100 are accounted for."""
    queue, names = open_queue(client, "run", "prompts"), numbered(100)
    queue.put(items(*names[:60]))
    settled = lease(queue, 5)
    queue.ack(settled.token, ids(settled))
    with older_copy(server, client):
        queue.put(items(*names[60:]))
        lost = lease(queue, 10)
    with restarted(server):
        assert counts(queue) == (55, 0, 0, 5, 0)
        assert queue.put(items(*names)) == (40, 60, 95)
        assert queue.put(items(*names)).accepted == 0
        assert queue.ack(lost.token, ids(lost)).ok == ()
        rest = lease(queue, 100)
        assert ids(rest) == names[5:]
        assert len(queue.ack(rest.token, ids(rest)).ok) == 95
        assert counts(queue) == (0, 0, 0, 100, 0)
