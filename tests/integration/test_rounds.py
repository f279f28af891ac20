"""What the ranks of a job get from RoundStreams, whatever happens to samples: ranks as threads, a queue in memory."""

import threading
from dataclasses import replace

import pytest
import torch

import pipeline
import thread_ranks
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer import gathering, leasing
from eaglefeed.consumer.materialize import Materializer
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.errors import (
    ConfigError,
    EaglefeedError,
    NoProducers,
    PeerGone,
    QueueUnavailable,
    SampleCorrupt,
    StaleLease,
    StorageError,
)
from eaglefeed.queue.base import Lease, QueueItem, QueueLimits
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from eaglefeed.storage.memory import MemoryStore
from faults.processes import wait_until
from thread_ranks import CONTRACT, ids_of, streams, take_all, train_all


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)
    monkeypatch.setattr(gathering, "_WAIT_S", 0.02)


def _run(num_samples: int, *, close: bool = True) -> pipeline.Run:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    _more(run, range(num_samples), close=close)
    return run


def _more(run: pipeline.Run, indices: range, *, close: bool = True) -> None:
    stop = threading.Event()
    run.target.before = lambda ids: stop.set() if not close and ids[0, 0] == indices[-1] + 1 else None
    run.feed(*(pipeline.prompt(index) for index in indices), close=close)
    run.worker().run(stop)


def _spoil(run: pipeline.Run, *numbers: int) -> None:
    assert isinstance(run.store, MemoryStore)
    for number in numbers:
        key = next(shard.key for shard in run.store.scan() if f"p-{number}." in shard.key)
        data, modified_s = run.store._shards[key]
        run.store._shards[key] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)


def _names(*numbers: int) -> list[str]:
    return [f"p-{number}" for number in numbers]


def test_every_rank_gets_its_share_of_each_round_in_the_queues_order() -> None:
    run = _run(8)
    with streams(run, 2, 2) as opened:
        first, second = train_all(opened, 2)
    assert first.rows[0][0] == [("p-0",), ("p-2",)]
    assert second.rows[0][0] == [("p-1",), ("p-3",)]
    assert first.own_ids == _names(0, 2, 4, 6)
    assert second.own_ids == _names(1, 3, 5, 7)
    assert [sorted(ids) for _, ids in first.rows] == [_names(0, 1, 2, 3), _names(4, 5, 6, 7)]
    assert [ids for _, ids in second.rows] == [ids for _, ids in first.rows]
    assert run.samples.stats().done == 8
    assert list(run.store.scan()) == []


def test_one_rank_alone_gets_what_a_sample_stream_gives() -> None:
    run = _run(6)
    with streams(run, 1, 3) as opened:
        (seen,) = train_all(opened, 3)
    assert seen.own_ids == _names(0, 1, 2, 3, 4, 5)
    assert run.samples.stats().done == 6


def test_a_corrupt_sample_leaves_its_rank_an_empty_place_and_the_others_as_they_were() -> None:
    run = _run(8)
    _spoil(run, 3)
    with streams(run, 2, 2) as opened:
        first, second = train_all(opened, 2)
        stats = opened[0].stats
    assert first.own_ids == _names(0, 2, 4, 6)
    assert second.rows[0][0] == [("p-1",), ()]
    assert second.own_ids == _names(1, 5, 7)
    assert sorted(first.rows[0][1]) == sorted(second.rows[0][1]) == _names(0, 1, 2)
    (letter,) = run.samples.dead_letters()
    assert letter.id == "p-3"
    assert "SampleCorrupt" in letter.reason
    assert "checksum" in letter.reason
    assert (stats.dead, stats.padded, stats.delivered, stats.acked) == (1, 1, 7, 7)
    assert run.samples.stats().done == 7


def test_a_rank_whose_every_sample_is_corrupt_gets_as_many_batches_as_the_others() -> None:
    run = _run(9)
    _spoil(run, 1, 4, 7)
    with streams(run, 3, 1) as opened:
        seen = train_all(opened, 1)
    assert [len(each.rows) for each in seen] == [3, 3, 3]
    assert seen[1].own_ids == []
    assert seen[0].own_ids == _names(0, 3, 6)
    assert run.samples.stats().dead == 3


def test_an_empty_place_is_one_token_without_supervision() -> None:
    run = _run(2)
    _spoil(run, 1)
    with streams(run, 2, 1) as opened:
        _, (batch,) = take_all(opened, 1)
    assert batch.sample_ids == ()
    assert batch.aux_hidden_states.shape == (1, 1, 12)
    assert batch.logits.shape == (1, 1, 50)
    assert not any(tensor.any() for tensor in batch.tensors().values())


def test_a_round_of_which_nothing_is_left_is_passed_over_by_all() -> None:
    run = _run(6)
    _spoil(run, 2, 3)
    with streams(run, 2, 1) as opened:
        first, second = train_all(opened, 1)
    assert first.own_ids == _names(0, 4)
    assert second.own_ids == _names(1, 5)
    assert len(first.rows) == len(second.rows) == 2
    assert opened[0].stats.padded == 0
    assert run.samples.stats().dead == 2


def test_the_last_round_is_filled_with_nothing_and_no_sample_is_lost() -> None:
    run = _run(9)
    with streams(run, 2, 4) as opened:
        first, second = train_all(opened, 4)
        assert opened[0].drained
        assert opened[1].drained
    assert first.rows[1][0] == [("p-8",), (), (), ()]
    assert second.rows[1][0] == [(), (), (), ()]
    assert run.samples.stats().done == 9
    assert opened[0].stats.padded == 7


def test_a_slow_producer_never_makes_a_round_incomplete() -> None:
    run = _run(3, close=False)
    with streams(run, 2, 2) as opened:
        for _ in range(3):
            assert take_all(opened, 2, wait_s=0.05) == [[], []]
        assert not any(stream.ended or stream.commit_due for stream in opened)
        _more(run, range(3, 5))
        first, second = train_all(opened, 2)
    assert [row for row, _ in first.rows] == [[("p-0",), ("p-2",)], [("p-4",), ()]]
    assert [row for row, _ in second.rows] == [[("p-1",), ("p-3",)], [(), ()]]


def test_the_last_round_waits_for_what_another_trainer_may_give_back() -> None:
    run = _run(4)
    other = run.samples.lease(1, visibility_timeout_s=1e6, consumer="other")
    assert isinstance(other, Lease)
    with streams(run, 2, 1) as opened:
        assert all(take_all(opened, 1))
        for _ in range(3):
            assert take_all(opened, 1, wait_s=0.05) == [[], []]
        run.samples.nack(other.token, ["p-0"], reason="", delay_s=0.0)
        first, second = train_all(opened, 1)
    assert (first.own_ids, second.own_ids) == (["p-3"], ["p-0"])


def test_all_ranks_hear_alike_that_nothing_came() -> None:
    run = _run(4, close=False)
    with streams(run, 2, 1) as opened:
        # The last pause is when all have come: one that is heard by one rank alone would have shifted what follows.
        seen = [take_all(opened, 1, wait_s=0.05) for _ in range(5)]
    assert [[bool(batches) for batches in each] for each in seen] == [[True] * 2] * 2 + [[False] * 2] * 3


def test_a_sample_that_comes_back_later_is_waited_for_and_trained_on_once() -> None:
    run = _run(5)
    store, fails = run.store, [2]
    plain = store.get

    def get(ref: SampleRef, ring: object = None) -> object:
        if ref.sample_id == "p-1" and fails[0]:
            fails[0] -= 1
            raise StorageError("the disk is away")
        return plain(ref, ring)  # type: ignore[arg-type]

    store.get = get  # type: ignore[method-assign,assignment]

    def pass_time(rank: int, _step: int) -> None:
        if rank == 0:
            run.clock.advance(30)

    with streams(run, 2, 1, visibility_timeout_s=1e6) as opened:
        first, second = train_all(opened, 1, wait_s=0.1, before=pass_time)
    assert sorted(first.own_ids + second.own_ids) == _names(0, 1, 2, 3, 4)
    assert opened[0].stats.retried == 2
    assert opened[0].stats.redelivered == 1
    assert opened[0].stats.dead == 0


def test_the_last_round_waits_for_a_sample_that_is_to_be_tried_again() -> None:
    run = _run(3)
    plain, asked = run.store.get, []

    def get(ref: SampleRef, ring: object = None) -> object:
        asked.append(ref.sample_id)
        if ref.sample_id == "p-1" and asked.count("p-1") == 1:
            raise StorageError("the disk is away")
        return plain(ref, ring)  # type: ignore[arg-type]

    run.store.get = get  # type: ignore[method-assign,assignment]
    with streams(run, 2, 1) as opened:
        assert [ids_of(batches) for batches in take_all(opened, 1)] == [[("p-0",)], [()]]
        assert [ids_of(batches) for batches in take_all(opened, 1)] == [[("p-2",)], [("p-1",)]]


def test_a_sample_that_there_was_no_time_for_comes_again_and_nothing_is_counted_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _run(4)
    with streams(run, 1, 2) as opened:
        (stream,) = opened
        with monkeypatch.context() as patch:
            patch.setattr(thread_ranks.ThreadRanks, "timeout_s", 0.0)
            assert ids_of(stream.take(2)) == [("p-0",), ()]
            assert stream.ack(1) == 1
        (rest,) = train_all(opened, 2)
    assert sorted(rest.own_ids) == _names(1, 2, 3)
    assert (stream.stats.redelivered, stream.stats.retried, stream.stats.dead) == (0, 0, 0)


def test_a_sample_whose_producer_does_not_answer_comes_again_and_nothing_is_counted_against_it() -> None:
    run = _run(4)
    plain, asked = run.store.get, []

    def get(ref: SampleRef, ring: object = None) -> object:
        asked.append(ref.sample_id)
        if asked.count("p-1") == 1 and ref.sample_id == "p-1":
            raise PeerGone("no answer", subject=ref.sample_id)
        return plain(ref, ring)  # type: ignore[arg-type]

    run.store.get = get  # type: ignore[method-assign,assignment]

    def pass_time(rank: int, _step: int) -> None:
        if rank == 0:
            run.clock.advance(10)

    with streams(run, 2, 1, visibility_timeout_s=1e6) as opened:
        first, second = train_all(opened, 1, wait_s=0.1, before=pass_time)
    assert sorted(first.own_ids + second.own_ids) == _names(0, 1, 2, 3)
    stats = opened[0].stats
    assert (stats.gone, stats.redelivered, stats.retried, stats.dead) == (1, 0, 0, 0)


def test_a_reason_that_quotes_what_is_no_text_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(4)
    plain = run.store.get

    def get(ref: SampleRef, ring: object = None) -> object:
        if ref.sample_id == "p-1":
            raise SampleCorrupt(ref.sample_id, "unknown name \ud800")
        return plain(ref, ring)  # type: ignore[arg-type]

    monkeypatch.setattr(run.store, "get", get)
    with streams(run, 2, 1) as opened:
        first, second = train_all(opened, 1)
    assert (first.own_ids, second.own_ids) == (["p-0", "p-2"], ["p-3"])
    (letter,) = run.samples.dead_letters()
    assert "unknown name \\ud800" in letter.reason


def test_a_ref_that_cannot_be_read_is_set_aside() -> None:
    run = _run(3, close=False)
    ref = decode_ref(next(iter(run.samples.payloads())).payload)
    run.samples.put([QueueItem("p-9", encode_ref(replace(ref, sample_id="p-9", contract="another")))])
    run.samples.put([QueueItem("junk", b"\xc1")])
    run.samples.close()
    with streams(run, 2, 2) as opened:
        first, second = train_all(opened, 2)
    assert sorted(first.own_ids + second.own_ids) == _names(0, 1, 2)
    reasons = {letter.id: letter.reason for letter in run.samples.dead_letters()}
    assert "ContractMismatch" in reasons["p-9"]
    assert "SchemaError" in reasons["junk"]


def test_a_commit_that_is_due_is_heard_by_all_ranks_in_the_same_take() -> None:
    run = _run(4, close=False)
    run.samples.configure(QueueLimits(high_count=4, low_count=1))
    with streams(run, 2, 2) as opened:
        assert all(take_all(opened, 2))
        for stream in opened:
            stream.ack(1)
        assert take_all(opened, 2) == [[], []]
        assert all(stream.commit_due for stream in opened)
        assert [stream.commit(1) for stream in opened] == [4, 0]
        assert not any(stream.commit_due for stream in opened)
        assert run.samples.has_room()
        _more(run, range(4, 8), close=False)
        assert [ids_of(each) for each in take_all(opened, 2)] == [[("p-4",), ("p-6",)], [("p-5",), ("p-7",)]]
        for stream in opened:
            stream.ack(2)
        assert take_all(opened, 2) == [[], []]
        assert all(stream.commit_due for stream in opened)


def test_a_queue_too_small_for_a_round_hands_out_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_STUCK_S", 0.2)
    run = _run(3, close=False)
    run.samples.configure(QueueLimits(high_count=3, low_count=0))
    with streams(run, 2, 2) as opened:
        assert [ids_of(each) for each in take_all(opened, 2)] == [[("p-0",), ("p-2",)], [("p-1",), ()]]


def test_a_full_queue_is_not_stuck_while_a_round_is_being_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_STUCK_S", 0.0)
    run = _run(3, close=False)
    run.samples.configure(QueueLimits(high_count=3, low_count=2))
    with streams(run, 2, 1) as opened:
        assert all(take_all(opened, 1))
        for _ in range(3):
            assert take_all(opened, 1, wait_s=0.05) == [[], []]


def test_a_full_queue_whose_samples_wait_for_a_commit_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_STUCK_S", 0.0)
    run = _run(5, close=False)
    run.samples.configure(QueueLimits(high_count=5, low_count=4))
    with streams(run, 2, 2) as opened:
        assert all(take_all(opened, 2))
        for stream in opened:
            stream.ack(1)
        assert take_all(opened, 2) == [[], []]  # the fifth waits for three more, which have room after the commit
        for stream in opened:
            stream.commit(1)
        _more(run, range(5, 8))
        assert all(len(ids_of(each)[1]) for each in take_all(opened, 2))


def test_a_lease_that_was_lost_is_an_empty_place_on_every_rank_and_never_acknowledged() -> None:
    run = _run(8)
    with streams(run, 2, 2, visibility_timeout_s=1.5) as opened:
        assert all(take_all(opened, 2))
        queue = opened[0]._queue
        assert queue is not None
        wait_until(lambda: run.samples.stats().leased == 8)
        run.clock.advance(10)
        taken = run.samples.lease(1, visibility_timeout_s=1000, consumer="other")
        assert isinstance(taken, Lease)
        tokens = list(queue.holdings._ids)
        wait_until(lambda: all(queue.renewer.is_lost(token) for token in tokens))
        assert [stream.ack(1) for stream in opened] == [0, 0]
        assert opened[0].stats.stale == 4
        seen = train_all(opened, 2, wait_s=0.2, before=lambda _rank, _step: _end_of(run, taken, opened))
    assert sorted(seen[0].own_ids + seen[1].own_ids + [taken.items[0].id]) == _names(*range(8))
    assert len(seen[0].rows) == len(seen[1].rows)


def _end_of(run: pipeline.Run, taken: Lease, opened: list[RoundStream]) -> None:
    """The other trainer settles what it has once ours has nothing more."""
    if run.samples.stats().ready == 0:
        run.samples.ack(taken.token, [taken.items[0].id])


def test_an_incomplete_round_does_not_outlive_its_leases_and_keeps_its_order() -> None:
    run = _run(1, close=False)
    with streams(run, 2, 2, max_lease_age_s=100.0, clock=run.clock) as opened:
        assert take_all(opened, 2, wait_s=0.05) == [[], []]
        _more(run, range(1, 3), close=False)
        queue = opened[0]._queue
        assert queue is not None
        wait_until(lambda: len(queue.holdings) == 3)
        tokens = set(queue.holdings._ids)
        assert len(tokens) > 1
        run.clock.advance(51)
        wait_until(lambda: len(queue.holdings) == 3 and not tokens & set(queue.holdings._ids))
        _more(run, range(3, 4))
        first, second = train_all(opened, 2)
        assert opened[0].stats.redelivered == 0
    assert first.own_ids == _names(0, 2)
    assert second.own_ids == _names(1, 3)


def test_a_checkpoints_state_goes_on_behind_what_it_has_seen() -> None:
    run = _run(8)
    with streams(run, 2, 1) as opened:
        for step in (1, 2, 3):
            take_all(opened, 1)
            for stream in opened:
                stream.ack(step)
            if step == 1:
                opened[0].commit(1)
            if step == 2:
                state = opened[0].state_dict()
    assert state == {"run": "run", "queue": "samples", "step": 2, "seen": _names(2, 3)}
    with streams(run, 2, 1) as opened:
        for stream in opened:
            stream.load_state_dict(state)
        first, second = train_all(opened, 1)
    assert first.own_ids == _names(4, 6)
    assert second.own_ids == _names(5, 7)


def test_a_state_comes_before_the_first_take() -> None:
    run = _run(2)
    with streams(run, 2, 1) as opened:
        state = opened[0].state_dict()
        take_all(opened, 1)
        for stream in opened:
            with pytest.raises(ConfigError, match="before the first take"):
                stream.load_state_dict(state)


def test_acks_of_chosen_samples_leave_the_others_in_hand() -> None:
    run = _run(4)
    with streams(run, 2, 1) as opened:
        take_all(opened, 1)
        first = opened[0].round_ids
        take_all(opened, 1)
        assert opened[0].ack(1, sample_ids=first) == 2
        assert opened[0].state_dict()["seen"] == _names(0, 1)
    assert run.samples.stats().ready == 2


def test_what_is_not_acknowledged_goes_back_in_order_without_counting_a_delivery() -> None:
    run = _run(9)
    with streams(run, 2, 2) as opened:
        assert all(take_all(opened, 2))
    assert opened[0].stats.returned >= 4
    with streams(run, 2, 2) as opened:
        first, second = train_all(opened, 2)
    assert first.own_ids == _names(0, 2, 4, 6, 8)
    assert second.own_ids == _names(1, 3, 5, 7)
    assert opened[0].stats.redelivered == 0


@pytest.mark.parametrize("stopper", [0, 1])
def test_a_stop_on_any_rank_ends_all_at_the_same_round(stopper: int) -> None:
    run = _run(40)
    with streams(run, 2, 1) as opened:

        def before(rank: int, step: int) -> None:
            leader = opened[0]._feeder
            if (rank, step) == (stopper, 2) and leader is not None:
                wait_until(lambda: leader._entries.qsize() == 2)
                opened[stopper].stop()
                if stopper == 1:
                    wait_until(leader.asked_to_stop.is_set)

        first, second = train_all(opened, 1, before=before)
        assert all(stream.ended and not stream.drained for stream in opened)
    # What was ready for the loops is given back too. Rank 0 may have said yes to one round before it heard of the stop.
    assert len(first.rows) == len(second.rows) in {2, 2 + stopper}
    assert (first.error, second.error) == (None, None)
    assert run.samples.stats().ready == 40 - 2 * len(first.rows)


def test_a_stop_while_nothing_comes_ends_all_ranks() -> None:
    run = _run(1, close=False)
    with streams(run, 2, 1) as opened:
        timer = threading.Timer(0.2, opened[1].stop)
        timer.start()
        assert take_all(opened, 1) == [[], []]
        assert all(stream.ended for stream in opened)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_ends_one_rank_is_raised_on_all_with_its_class_and_text(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    plain = Materializer.materialize

    def materialize(self: Materializer, payload: bytes) -> object:
        if decode_ref(payload).sample_id == f"p-{failing + 2}":
            raise ConfigError("no such head", subject="here")
        return plain(self, payload)

    monkeypatch.setattr(Materializer, "materialize", materialize)
    run = _run(8)
    with streams(run, 2, 1) as opened:
        seen = train_all(opened, 1)
    assert [len(each.rows) for each in seen] == [1, 1]
    assert all(isinstance(each.error, ConfigError) for each in seen)
    assert "here: no such head" in str(seen[0].error)
    assert str(seen[1].error).startswith(f"on rank {failing}: here: no such head")
    assert (run.samples.stats().ready, run.samples.stats().dead) == (6, 0)


def test_a_bug_on_one_rank_ends_all_instead_of_hanging_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Materializer.materialize

    def materialize(self: Materializer, payload: bytes) -> object:
        if decode_ref(payload).sample_id == "p-1":
            raise KeyError("bug")
        return plain(self, payload)

    monkeypatch.setattr(Materializer, "materialize", materialize)
    with streams(_run(4), 2, 1) as opened:
        seen = train_all(opened, 1)
    assert all("this is a bug" in str(each.error) for each in seen)


def test_a_loop_that_fails_tells_the_other_ranks_why() -> None:
    run = _run(1, close=False)
    with streams(run, 2, 1) as opened:

        def fail() -> None:
            with opened[1]:
                assert opened[1].take(1, wait_s=0.1) == []
                raise ZeroDivisionError

        other, own = thread_ranks.together(lambda: [opened[0].take(1, wait_s=0.1), opened[0].take(1)], fail)
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(other, EaglefeedError)
    assert "on rank 1: the loop failed" in str(other)
    assert "ZeroDivisionError" in str(other)


def test_a_rank_that_waits_for_one_that_failed_raises_what_that_one_said() -> None:
    run = _run(8)
    with streams(run, 2, 1) as opened:
        assert all(take_all(opened, 1))

        def fail() -> None:
            try:
                with opened[1]:
                    raise ZeroDivisionError
            finally:
                opened[1]._ranks._tensors.abort()  # type: ignore[attr-defined]  # it leaves

        def go_on() -> None:
            with opened[0]:
                opened[0].take(1)

        other, own = thread_ranks.together(go_on, fail)
    assert isinstance(own, ZeroDivisionError)
    assert "on rank 1: the loop failed, got ZeroDivisionError()" in str(other)


def test_no_producers_is_raised_on_all_ranks() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(pipeline.prompt(0))
    options = {"fail_without_producers": True, "producer_grace_s": 0.0, "prompts": run.prompts}
    with streams(run, 2, 1, clock=run.clock, **options) as opened:
        seen = train_all(opened, 1)
    assert all(isinstance(each.error, NoProducers) and "1 prompts remain" in str(each.error) for each in seen)


def test_a_newer_session_ends_all_ranks() -> None:
    run = _run(6, close=False)
    with streams(run, 2, 1) as opened:
        take_all(opened, 1)
        run.samples.restore(0)
        with pytest.raises(StaleLease):
            opened[0].ack(1)
        results = [take_all(opened, 1) for _ in range(4)][-1]
        assert all(isinstance(each, StaleLease) or each == [] for each in results)
        assert all(stream.ended for stream in opened)
        assert run.samples.stats().tentative == 0


def test_an_outage_of_the_queue_is_borne() -> None:
    run = _run(6)
    plain, failures = run.samples.lease, [3]

    def lease(n: int, **options: object) -> object:
        if failures[0]:
            failures[0] -= 1
            raise QueueUnavailable("server", "away")
        return plain(n, **options)  # type: ignore[arg-type]

    run.samples.lease = lease  # type: ignore[method-assign,assignment]
    with streams(run, 2, 1) as opened:
        first, second = train_all(opened, 1)
    assert len(first.own_ids + second.own_ids) == 6


def test_an_outage_at_the_end_is_borne_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(5)
    plain, failures = run.samples.stats, [3]

    def stats() -> object:
        if failures[0]:
            failures[0] -= 1
            raise QueueUnavailable("server", "away")
        return plain()

    monkeypatch.setattr(run.samples, "stats", stats)
    with streams(run, 2, 1) as opened:
        seen = train_all(opened, 1)
        assert opened[0].drained
    assert [each.error for each in seen] == [None, None]
    assert failures == [0]


def test_a_job_that_was_held_up_does_not_take_its_own_samples_back() -> None:
    run = _run(3, close=False)
    with streams(run, 1, 2, visibility_timeout_s=2.0) as opened:
        (stream,) = opened
        assert ids_of(stream.take(2)) == [("p-0",), ("p-1",)]
        queue = stream._queue
        assert queue is not None
        assert queue.renewer.stop()  # it renews too late: what remains are the calls for more
        wait_until(lambda: len(queue.holdings) == 3)
        SYSTEM_CLOCK.sleep(3.0)
        assert stream.ack(1) == 2
        assert run.samples.stats().redelivered == 0


def test_a_round_whose_leases_are_too_old_to_be_renewed_comes_again_before_it_is_trained_on() -> None:
    run = _run(2)
    with streams(run, 1, 2, visibility_timeout_s=1.0) as opened:
        (stream,) = opened
        stream._begin()
        queue = stream._queue
        assert queue is not None
        wait_until(lambda: len(queue.holdings) == 2)
        for lease in queue.renewer._watched.values():
            lease.too_old = True
        assert ids_of(stream.take(2)) == [("p-0",), ("p-1",)]
        assert stream.ack(1) == 2
    assert (stream.stats.stale, stream.stats.delivered) == (2, 2)


def test_rounds_that_are_leased_ahead_are_bounded() -> None:
    run = _run(60)
    with streams(run, 2, 2, prefetch=2) as opened:
        assert all(take_all(opened, 2))
        SYSTEM_CLOCK.sleep(0.3)
        assert run.samples.stats().leased == 4 + 2 * 4


def test_nothing_but_the_loop_keeps_a_round_that_was_taken() -> None:
    with streams(_run(4, close=False), 2, 2) as opened:
        assert [len(batches) for batches in take_all(opened, 2)] == [2, 2]
        wait_until(lambda: [stream._materializer._ring.held() for stream in opened] == [[], []])


def test_another_number_than_a_rounds_share_is_refused() -> None:
    with streams(_run(2), 1, 2) as opened, pytest.raises(ConfigError, match="wanted 2, got 1"):
        opened[0].take(1)


def test_ranks_that_were_not_given_the_same_are_refused_on_all_of_them() -> None:
    run = _run(6)
    with streams(run, 2, 2) as opened:
        opened[1]._setup["samples_per_step"] = "3"
        first, second = take_all(opened, 2)
        assert all(isinstance(each, ConfigError) for each in (first, second))
        assert "rank 1 has another samples_per_step than rank 0, wanted 2, got 3" in str(first)
        assert "rank 1 has another samples_per_step than rank 0, wanted 2, got 3" in str(second)


def test_rank_0_needs_the_queue() -> None:
    run = _run(1)
    options = {"contract": CONTRACT, "draft_vocab_size": 5, "consumer": "t"}
    with pytest.raises(ConfigError, match="rank 0 leases for all ranks"):
        RoundStream(None, run.store, ranks=Ranks.alone(), samples_per_step=1, **options)  # type: ignore[arg-type]
