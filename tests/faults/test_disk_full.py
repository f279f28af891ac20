"""A disk that fills while samples are written: nothing is lost, nothing half-written is seen, and nobody runs hot."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from os_faults import instead_of
from small_disk import MB, SmallRun, big_prompt, mounted, shrink
from structlog.testing import capture_logs

import pipeline
from eaglefeed.cli.limits import queue_limits
from eaglefeed.config import Settings
from eaglefeed.consumer import leasing
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.producer import worker
from eaglefeed.queue.base import QueueLimits
from eaglefeed.storage.base import StoreHealth
from eaglefeed.storage.shared_dir import SharedDirStore

SHARD_BYTES = 3840 * (3 * 4 * 4 + 3 * 8 + 50 * 4)  # aux states, ids and masks, logits: 1.04 MB without the header


@pytest.fixture(params=["injected", "mounted"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "injected":
        shrink(monkeypatch, folder, 8 * MB)
    with mounted(monkeypatch, folder, 8 * MB) if request.param == "mounted" else nullcontext():
        yield folder


@pytest.mark.parametrize("lease_batch", [1, 4])
def test_a_producer_on_a_full_disk_holds_no_prompt_and_goes_on_when_there_is_room(disk: Path, lease_batch: int) -> None:
    run = SmallRun(disk / "store")
    run.feed(*(big_prompt(index) for index in range(20)))
    with capture_logs() as logs:
        stats = run.produce(lease_batch=lease_batch)
    run.train(100)
    assert sorted(run.delivered) == sorted(f"p-{index}" for index in range(20))
    assert (stats.produced, stats.retried, stats.dead) == (20, 0, 0)
    assert run.prompts.stats().redelivered == 0
    full = [entry for entry in logs if entry["event"] == "store_full"]
    assert run.num_puts == 20 + len(full)
    assert 1 <= len(full) <= run.num_waits
    assert all("No space left on device" in entry["reason"] for entry in full)


def test_a_full_disk_costs_one_try_until_a_sample_would_fit_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    shrink(monkeypatch, root, 8 * MB)
    run = SmallRun(root)
    run.feed(*(big_prompt(index) for index in range(9)))
    train = run.train
    monkeypatch.setattr(run, "train", lambda count: train(count) if run.num_waits >= 50 else None)
    stats = run.produce()
    assert run.num_waits >= 50
    assert (stats.produced, run.num_puts) == (9, 10)
    assert stats.paused_s >= 50


def test_a_quota_that_no_count_shows_is_tried_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(tmp_path / "store")
    run.feed(big_prompt(0))
    tries = [errno.EDQUOT, errno.EDQUOT]

    def link(real: Callable[..., None], made: str, name: str, **places: int) -> None:
        if name.startswith("p-0.") and tries:
            raise OSError(code := tries.pop(), os.strerror(code))
        real(made, name, **places)

    instead_of(monkeypatch, "link", link)
    stats = run.produce()
    assert (stats.produced, stats.returned, stats.paused_s, run.num_puts) == (1, 2, 10, 3)


@pytest.mark.parametrize("lease_batch", [1, 4, 16])
def test_a_producer_exceeds_the_stores_cap_by_less_than_one_shard(tmp_path: Path, lease_batch: int) -> None:
    cap = int(10.5 * SHARD_BYTES)
    run = SmallRun(tmp_path / "store")
    run.samples.configure(QueueLimits(high_bytes=cap, low_bytes=cap // 2))
    run.feed(*(big_prompt(index) for index in range(40)))
    stats = run.produce(lease_batch=lease_batch)
    assert stats.produced == 40
    assert cap <= run.peak_bytes < cap + SHARD_BYTES


def test_a_run_of_three_times_the_disk_stays_below_nine_tenths_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    shrink(monkeypatch, root, 64 * MB)
    run = SmallRun(root)
    run.trained = 10
    limits = queue_limits(Settings(), StoreHealth(64 * MB, 64 * MB))
    run.samples.configure(limits)
    run.feed(*(big_prompt(index) for index in range(200)))
    stats = run.produce()
    run.train(1000)
    assert (stats.produced, len(set(run.delivered)), len(run.delivered)) == (200, 200, 200)
    assert 0.75 * 64 * MB < run.peak_bytes < 0.9 * 64 * MB
    assert list(run.store.scan()) == []


def _rounds(run: pipeline.Run) -> RoundStream:
    options = {"contract": pipeline.contract(max_length=4096), "draft_vocab_size": 50, "consumer": "t", "prefetch": 1}
    return RoundStream(run.samples, run.store, ranks=Ranks.alone(), samples_per_step=2, **options)


@pytest.mark.parametrize("is_of_rounds", [False, True])
def test_a_loop_and_a_producer_on_a_disk_full_of_uncommitted_samples_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_rounds: bool
) -> None:
    shrink(monkeypatch, tmp_path / "store", 6 * MB)
    monkeypatch.setattr(leasing, "_STARVED_S", 0.3)
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)
    monkeypatch.setattr(worker, "_FULL_PAUSE_S", 0.02)
    monkeypatch.setattr(worker, "_WAIT_S", 0.02)
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=SharedDirStore(tmp_path / "store", durability="none"))
    run.feed(*(big_prompt(index) for index in range(16)))
    thread = threading.Thread(target=run.produce)
    thread.start()
    learned: list[str] = []
    with _rounds(run) if is_of_rounds else SampleStream(run.samples, run.store, consumer="t") as stream:
        while not stream.ended:
            if stream.take(2):
                learned += stream.round_ids
                stream.ack(len(learned))
            else:
                assert not run.samples.stats().full
                stream.commit(len(learned))
    thread.join(30)
    assert sorted(learned) == sorted(f"p-{index}" for index in range(16))
