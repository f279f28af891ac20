"""Interleavings of trainers that hurt, step by step, with real processes on a real server."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eaglefeed.errors import QueueError, QueueUnavailable
from eaglefeed.queue.base import DrainState, LeaseQueue, QueueItem, QueueLimits
from faults.chaos.interleaved import Run, ids_of, learn, lease, put, state_of

# trainers and their checkpoints


def test_a_trainer_paused_over_a_restore_of_its_successor_is_refused_and_releases_nothing(run: Run) -> None:
    ids = put(run.samples, 4)
    with run.actor("caller") as paused:
        old = paused.call("restore", 0)
        held = paused.call("lease", 4, visibility_timeout_s=60, consumer="old", session=old)
        assert held["ids"] == ids
        paused.send(signal.SIGSTOP)
        new = run.samples.restore(0)
        assert learn(run.samples, 2, step=1, session=new) == ids[:2]
        mine = lease(run.samples, 2, session=new)
        before = run.samples.stats()
        paused.send(signal.SIGCONT)
        assert paused.call("ack", held["token"], ids, step=1, session=old) == "StaleLease"
        assert paused.call("commit", 9, session=old) == "StaleLease"
        assert paused.call("lease", 4, visibility_timeout_s=60, consumer="old", session=old) == "StaleLease"
        assert paused.call("renew", held["token"], visibility_timeout_s=60) == "StaleLease"
        assert paused.call("nack", held["token"], ids, reason="late", delay_s=0) == {"ok": [], "stale": ids}
    assert replace(run.samples.stats(), oldest_ready_s=0) == replace(before, oldest_ready_s=0)
    assert (before.tentative, before.leased, before.released, before.committed_step) == (2, 2, 0, 0)
    assert run.samples.ack(mine.token, ids_of(mine), step=2, session=new).ok == tuple(ids[2:])
    assert run.samples.commit(2, session=new) == 4


def test_a_crash_between_checkpoint_and_commit_repeats_nothing_and_loses_nothing(run: Run, tmp_path: Path) -> None:
    ids = put(run.samples, 6)
    run.samples.close()
    checkpoint = tmp_path / "step-2.json"
    with run.actor("caller") as trainer:
        session = trainer.call("restore", 0)
        learned = []
        for step in (1, 2, 3):
            got = trainer.call("lease", 2, visibility_timeout_s=60, consumer="t", session=session)
            trainer.call("ack", got["token"], got["ids"], step=step, session=session)
            learned += got["ids"]
            if step == 2:
                checkpoint.write_text(json.dumps(learned))
        trainer.send(signal.SIGKILL)
    model = json.loads(checkpoint.read_text())
    assert run.samples.stats().tentative == 6
    session = run.samples.restore(2, seen=model)
    model += learn(run.samples, 6, step=3, session=session)
    assert model == ids
    assert run.samples.commit(3, session=session) == 2
    assert (run.samples.stats().done, run.samples.stats().redelivered) == (6, 0)
    assert state_of(run.samples, session) is DrainState.DRAINED


def test_an_older_checkpoint_that_is_not_committed_gets_back_what_it_has_not_seen_and_nothing_else(run: Run) -> None:
    ids = put(run.samples, 10)
    session = run.samples.restore(0)
    at = {step: learn(run.samples, 2, step=step, session=session) for step in (1, 2, 3, 4)}
    assert run.samples.commit(1, session=session) == 2
    lease(run.samples, 1, session=session)  # the crash finds something leased, too
    session = run.samples.restore(2, seen=at[2])
    with pytest.raises(QueueError, match="1"):
        run.samples.restore(1)
    again = lease(run.samples, 10, session=session)
    assert ids_of(again) == ids[4:]
    assert {item.delivery_count for item in again.items} == {1}
    run.samples.ack(again.token, ids[4:], step=3, session=session)
    assert run.samples.commit(3, session=session) == 6
    assert at[1] + at[2] + ids_of(again) == ids


def test_a_restore_that_died_on_the_way_is_finished_by_the_next_and_holds_to_its_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run.samples, 6)
    session = run.samples.restore(0)
    for step in (1, 2, 3):
        learn(run.samples, 2, step=step, session=session)
    _let_restore_die_on_its_way(run.samples, monkeypatch)
    with pytest.raises(QueueUnavailable):
        run.samples.restore(2)
    monkeypatch.undo()
    with pytest.raises(QueueError, match="2"):
        run.samples.restore(1)  # what was learned at step 2 may be settled by now
    session = run.samples.restore(2)
    assert ids_of(lease(run.samples, 6, session=session)) == ["s4", "s5"]
    assert run.samples.stats().done == 4


def _let_restore_die_on_its_way(queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = iter([queue._run] * 2)  # type: ignore[attr-defined]

    def twice(*args: Any) -> Any:
        for run_script in chunks:
            return run_script(*args)
        raise QueueUnavailable("here", "killed")

    monkeypatch.setattr(queue, "_run", twice)


# poison


def test_a_poison_item_among_64_alone_becomes_a_dead_letter(run: Run) -> None:
    run.samples.configure(QueueLimits(max_deliveries=2))
    run.samples.put([QueueItem(f"s{index}", b"poison" if index == 40 else b"fine") for index in range(64)])
    run.samples.close()
    deaths = 0
    while run.samples.stats().unsettled:
        with run.actor("victim") as worker:
            deaths += worker.end() == -signal.SIGKILL
    assert deaths == 3  # once with its lease-mates, and twice alone
    stats = run.samples.stats()
    assert (stats.done, stats.dead) == (63, 1)
    (letter,) = run.samples.dead_letters()
    assert (letter.id, letter.delivery_count, letter.payload) == ("s40", 3, b"poison")
