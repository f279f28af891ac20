"""What every lease queue promises where clocks go back, restores are interrupted and trainers die of a sample."""

import pytest

from eaglefeed.errors import QueueError
from eaglefeed.queue.base import DrainState, QueueLimits
from eaglefeed.queue.redis import RedisLeaseQueue
from queue_servers import Bench
from queue_steps import LONG_S, SHORT_S, counts, fail, filled, ids, items, learn, lease, nothing


def test_no_token_and_no_session_is_given_out_twice_when_the_servers_time_goes_back(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs a clock that can be turned back")
    queue = filled(bench, "a", "b")
    session = queue.restore(0)
    first = lease(queue, 1, session=session)
    bench.pass_time(-3600)
    second = lease(queue, 1, session=session)
    assert second.token > first.token
    assert queue.ack(first.token, ids(second), session=session).stale == ("b",)
    assert queue.restore(0) > session


@pytest.mark.parametrize("calls", [1, 2])
def test_nobody_leases_while_a_restore_is_under_way_and_the_next_one_finishes_it(
    bench: Bench, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    if not isinstance(queue, RedisLeaseQueue):
        pytest.skip("the model restores in one step")
    learn(queue, 1, step=1)
    lease(queue, 1)
    run, left = queue._client.run, iter(range(calls))
    monkeypatch.setattr(queue._client, "run", lambda *words: run(*words) if next(left, None) is not None else die())
    with pytest.raises(Death):
        queue.restore(0)
    monkeypatch.undo()
    session = queue.stats().session
    got = nothing(queue, session=session)
    assert got.state is DrainState.EMPTY
    assert got.next_ms > 0
    assert queue.stats().unsettled == 4
    newest = queue.restore(0)
    assert newest > session
    again = lease(queue, session=newest)
    assert [(item.id, item.delivery_count) for item in again.items] == [(name, 1) for name in "abcd"]


def test_a_restore_that_died_on_the_way_refuses_an_earlier_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = filled(bench, "a", "b")
    if not isinstance(queue, RedisLeaseQueue):
        pytest.skip("the model restores in one step")
    learn(queue, 1, step=4)
    run, left = queue._client.run, iter(range(2))
    monkeypatch.setattr(queue._client, "run", lambda *words: run(*words) if next(left, None) is not None else die())
    with pytest.raises(Death):
        queue.restore(4)
    monkeypatch.undo()
    assert queue.stats().done == 1
    with pytest.raises(QueueError, match="step 4 or later"):
        queue.restore(3)
    assert ids(lease(queue, session=queue.restore(4))) == ["b"]


class Death(Exception):
    """Of a client between two of its calls."""


def die() -> None:
    raise Death


def test_what_is_not_released_keeps_its_payload_and_bytes_when_somebody_forgets_it(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("dead", "delayed", "tentative", "leased", "ready", stored_bytes=2))
    fail(queue, "dead")
    queue.nack(lease(queue, 1).token, ["delayed"], reason="later", delay_s=LONG_S)
    learn(queue, 1, step=1)
    held = lease(queue, 1)
    queue.forget(["dead", "delayed", "tentative", "leased", "ready"])
    kept = items("delayed", "tentative", "leased", "ready")
    assert [item.payload for item in queue.payloads()] == [item.payload for item in kept]
    assert [dead.payload for dead in queue.dead_letters()] == [items("dead")[0].payload]
    queue.ack(held.token, ["leased"])
    assert queue.released() == items("leased", stored_bytes=2)


def test_a_sample_that_kills_a_trainer_that_restores_at_each_start_becomes_a_dead_letter(bench: Bench) -> None:
    queue = filled(bench, "poison", "good")
    queue.configure(QueueLimits(max_deliveries=2))
    for _ in range(3):
        session = queue.restore(0)
        lease(queue, 10, SHORT_S, session=session)
        bench.pass_time(SHORT_S * 2)
    session = queue.restore(0)
    assert [letter.id for letter in queue.dead_letters()] == ["poison"]
    got = lease(queue, session=session)
    assert ids(got) == ["good"]
    assert queue.ack(got.token, ["good"], session=session).ok == ("good",)


def test_a_restore_of_leases_that_have_not_run_out_counts_nothing_against_their_items(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    for _ in range(4):
        session = queue.restore(0)
        assert [(item.id, item.delivery_count) for item in lease(queue, session=session).items] == [("a", 1), ("b", 1)]


def test_an_id_that_begins_another_one_is_not_taken_for_it(bench: Bench) -> None:
    queue = filled(bench, "ab", "a", "abc")
    held = lease(queue)
    assert queue.ack(held.token, ["a"]).ok == ("a",)
    assert queue.ack(held.token, ["abc"]).ok == ("abc",)
    assert queue.ack(held.token, ["a"]).stale == ("a",)
    assert counts(queue) == (0, 0, 1, 2, 0)
    assert queue.ack(held.token, ["ab"]).ok == ("ab",)


def test_put_order_holds_over_calls_and_after_all_of_before_is_done(bench: Bench) -> None:
    queue = filled(bench, "z")
    queue.ack(lease(queue).token, ["z"])
    for name in ("c", "b", "a"):
        queue.put(items(name))
    assert [item.id for item in queue.payloads()] == ["c", "b", "a"]
    lease(queue)
    assert ids(lease(queue, session=queue.restore(0))) == ["c", "b", "a"]
