"""A trainer that is started long before its first sample: it waits, says so, and no rank takes another for dead."""

import itertools
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import structlog

import pipeline
import rank_jobs
from eaglefeed.cli.showing import showing
from eaglefeed.cli.train_stream import run_source
from eaglefeed.config import Settings, load_settings
from eaglefeed.consumer import leasing
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.run import wait_for_run
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.server_process import find_server_binary
from eaglefeed.sections import TrainSection
from eaglefeed.storage.base import open_store

DEADLINE_S = 1.0


def _settings(folder: Path) -> Settings:
    words = [f"run.dir={folder}", "run.id=late", f"train.collective_timeout_s={DEADLINE_S}", "train.num_threads=1"]
    return load_settings(None, words)


def test_a_first_sample_after_40_minutes_is_waited_for_with_a_line_a_minute_and_taken_at_once() -> None:
    run, looks = pipeline.Run(), list[float]()
    run.feed(pipeline.prompt(0))
    run.produce()
    began_s, there = run.clock.monotonic(), run.store.has_document
    at_s = began_s + 40 * 60
    with structlog.testing.capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.store, "has_document", lambda name: run.clock.monotonic() >= at_s and there(name))
        assets = wait_for_run(
            run.store,
            timeout_s=TrainSection().start_timeout_s,  # by default it waits for longer than that
            stop=threading.Event(),
            look=lambda: looks.append(run.clock.monotonic()),
            look_s=5.0,
            clock=run.clock,
        )
    assert assets is not None
    assert run.clock.monotonic() == at_s
    told = [line["waited_s"] for line in logs if line["event"] == "waiting_for_the_first_sample" and "waited_s" in line]
    assert told == [60 * minute for minute in range(1, 41)]
    # Where other ranks wait for this one, each look tells them so: here 30 s would be late.
    assert max(later - before for before, later in itertools.pairwise([began_s, *looks])) < 30 / 4


def test_a_stream_that_waits_for_a_producer_says_so_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.01)
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(pipeline.prompt(0))
    look, ready = leasing.Leaser._look_for_producers, threading.Event()

    def turn(leaser: leasing.Leaser) -> None:
        look(leaser)
        run.clock.advance(7)
        if run.clock.monotonic() > began_s + 40 * 60 and not ready.is_set():
            ready.set()
            run.produce()

    began_s = run.clock.monotonic()
    monkeypatch.setattr(leasing.Leaser, "_look_for_producers", turn)
    with (
        structlog.testing.capture_logs() as logs,
        SampleStream(run.samples, run.store, consumer="t", prompts=run.prompts, clock=run.clock) as stream,
    ):
        assert [batch.sample_ids for batch in stream.take(1)] == [("p-0",)]
    told = [line for line in logs if line["event"] == "waiting_for_samples"]
    assert len(told) in range(36, 41)  # every ninth look of 7 s
    assert {(line["prompts"], line["producers"]) for line in told} == {(1, 0)}


def _wait(pipe: Connection, folder: Path) -> None:
    settings = _settings(folder)
    with (
        Ranks.of_job(timeout_s=DEADLINE_S) as ranks,
        showing(settings, "trainer") as shown,
        run_source(settings, ranks, threading.Event(), shown) as source,
    ):
        pipe.send(source is not None and source.assets.contract.id)
        ranks.tell()  # none leaves before the others are there


def test_ranks_that_are_started_long_before_the_first_producer_wait_for_it(tmp_path: Path) -> None:
    find_server_binary()
    folder = _settings(tmp_path).run_dir
    # The server outlives the ranks, who are killed at the end: the last user of one stops it.
    with EmbeddedServer(folder / "queue") as server, rank_jobs.job(2, _wait, tmp_path) as ranks:
        assert not ranks[0].pipe.poll(2.5 * DEADLINE_S)
        assert not ranks[1].pipe.poll(0)
        client = connect(server.url)
        run = pipeline.Run(store=open_store(f"file://{folder / 'shards'}", durability="none"))
        run.prompts, run.samples = (open_queue(client, "late", name) for name in ("prompts", "samples"))
        run.feed(pipeline.prompt(0))
        run.produce()
        assert [rank.hear() for rank in ranks] == [rank_jobs.CONTRACT.id] * 2
        client.close()
