"""Whatever fails, and wherever a job is stopped: ranks never diverge, and no sample is lost or comes twice."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from eaglefeed.consumer import gathering, leasing
from eaglefeed.storage.memory import MemoryStore
from thread_ranks import Seen, streams, train_all


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(leasing, "_WAIT_S", 0.005)
    monkeypatch.setattr(leasing, "_PAUSE_S", 0.005)
    monkeypatch.setattr(gathering, "_WAIT_S", 0.005)


def _spoilt(run: pipeline.Run, corrupt: set[int], missing: set[int]) -> None:
    assert isinstance(run.store, MemoryStore)
    keys = {int(shard.key.split("p-")[1].split(".")[0]): shard.key for shard in run.store.scan()}
    for number in corrupt & keys.keys():
        data, modified_s = run.store._shards[keys[number]]
        run.store._shards[keys[number]] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)
    for number in missing & keys.keys():
        del run.store._shards[keys[number]]


def _trained(run: pipeline.Run, world_size: int, size: int, prefetch: int, stop: tuple[int, int] | None) -> list[Seen]:
    with streams(run, world_size, size, prefetch=prefetch, visibility_timeout_s=1e9) as opened:

        def before(rank: int, step: int) -> None:
            if rank == 0:
                run.clock.advance(30)  # what is missing is tried again after a while
            if stop is not None and rank == stop[0] % world_size and step == stop[1]:
                opened[rank].stop()

        return train_all(opened, size, wait_s=0.02, before=before)


numbers = st.sets(st.integers(0, 13), max_size=8)
jobs = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 14), numbers, numbers, jobs, st.none() | st.tuples(st.integers(0, 2), st.integers(0, 3)), jobs)
def test_ranks_get_equal_numbers_of_batches_and_each_sample_is_trained_on_once_or_set_aside(
    num_samples: int, corrupt: set[int], missing: set[int], job: Any, stop: tuple[int, int] | None, next_job: Any
) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*(pipeline.prompt(index) for index in range(num_samples)))
    run.produce()
    _spoilt(run, corrupt, missing)
    learned: list[str] = []
    for (world_size, size, prefetch), stops in ((job, stop), (next_job, None)):
        seen = _trained(run, world_size, size, prefetch, stops)
        assert [each.error for each in seen] == [None] * world_size
        assert len({len(each.rows) for each in seen}) == 1
        assert len({each.pauses for each in seen}) == 1
        assert all(len(ids) == size for each in seen for ids, _ in each.rows)
        rounds = [[ids for _, ids in each.rows] for each in seen]
        assert all(each == rounds[0] for each in rounds)
        own = [sample_id for each in seen for sample_id in each.own_ids]
        assert sorted(own) == sorted(sample_id for ids in rounds[0] for sample_id in ids)
        learned += own
    dead = [letter.id for letter in run.samples.dead_letters()]
    assert sorted(learned + dead) == sorted(f"p-{number}" for number in range(num_samples))
    assert set(dead) == {f"p-{number}" for number in (corrupt | missing) if number < num_samples}
    assert run.samples.stats().unsettled == 0
