"""What every lease queue promises, the memory model, fakeredis and real servers alike: put, lease, renew and ack."""

import threading

import pytest

from eaglefeed.errors import ConfigError, IdConflict, InputError, QueueClosed, QueueFull, StaleLease
from eaglefeed.queue.base import AckResult, DrainState, Lease, NoLease, QueueItem, QueueLimits
from queue_servers import Bench
from queue_steps import LONG_S, SHORT_S, counts, expire, filled, finish, ids, items, lease, nothing, numbered

# put


def test_items_are_leased_in_put_order_with_their_payload(bench: Bench) -> None:
    queue = filled(bench, "b", "a", "c")
    got = lease(queue)
    assert [(i.id, i.payload, i.delivery_count) for i in got.items] == [
        ("b", b"payload of b\n\xff", 1),
        ("a", b"payload of a\n\xff", 1),
        ("c", b"payload of c\n\xff", 1),
    ]


def test_a_known_id_is_a_duplicate_whether_ready_leased_done_dead_or_in_the_same_call(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("done", "dead", "leased", "ready"))
    got = lease(queue, 3)
    queue.ack(got.token, ["done"])
    queue.nack(got.token, ["dead"], reason="bad", retryable=False)
    result = queue.put(items("done", "dead", "leased", "ready", "new", "new"))
    assert result == (1, 5, 3)
    assert counts(queue) == (2, 0, 1, 1, 1)


def test_another_payload_for_a_known_id_is_a_conflict_and_adds_nothing(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    queue.ack(lease(queue, 1).token, ["a"])
    for known in ("a", "b"):
        with pytest.raises(IdConflict) as caught:
            queue.put([*items("new"), QueueItem(known, b"other")])
        assert caught.value.item_id == known
    with pytest.raises(IdConflict):
        queue.put([QueueItem("twice", b"1"), QueueItem("twice", b"2")])
    assert counts(queue) == (1, 0, 0, 1, 0)


def test_a_closed_queue_refuses_new_ids_and_takes_known_ones(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.close()
    queue.close()
    assert queue.put(items("a")) == (0, 1, 1)
    with pytest.raises(QueueClosed):
        queue.put(items("a", "b"))
    assert queue.stats().closed


def test_a_put_over_the_hard_cap_adds_nothing_and_says_when_to_try_again(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.configure(QueueLimits(max_depth=2))
    with pytest.raises(QueueFull) as caught:
        queue.put(items("b", "c"))
    assert caught.value.retryable
    assert caught.value.retry_after_s > 0
    assert queue.put(items("b")) == (1, 0, 2)


def test_a_large_put_is_split_and_keeps_its_order(bench: Bench) -> None:
    queue = bench.queue("samples")
    names = numbered(2050)
    assert queue.put(items(*names)) == (2050, 0, 2050)
    assert queue.put(items(*names)) == (0, 2050, 2050)
    assert ids(lease(queue, 1000)) + ids(lease(queue, 1000)) + ids(lease(queue, 1000)) == names


def test_an_empty_put_only_tells_the_depth(bench: Bench) -> None:
    assert filled(bench, "a").put([]) == (0, 0, 1)


@pytest.mark.parametrize("bad", ["", "two\nlines", "x" * 257, "half \ud800"])
def test_an_id_that_cannot_be_kept_is_refused(bench: Bench, bad: str) -> None:
    with pytest.raises(InputError):
        bench.queue("samples").put([QueueItem(bad, b"")])


def test_a_name_that_would_break_the_key_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError):
        bench.queue("sam}ples")


# lease


def test_no_item_is_in_two_leases(bench: Bench) -> None:
    queue = filled(bench, *numbered(5))
    first, second = lease(queue, 3), lease(queue, 3)
    assert ids(first) + ids(second) == numbered(5)
    assert second.token > first.token


@pytest.mark.parametrize("n", [0, -1, 1001])
def test_a_batch_out_of_bounds_is_refused(bench: Bench, n: int) -> None:
    with pytest.raises(ConfigError):
        bench.queue("samples").lease(n, visibility_timeout_s=1, consumer="c")


def test_unacked_items_are_redelivered_after_the_timeout_at_the_head(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    old = expire(bench, queue, 1)
    again = lease(queue)
    assert [(i.id, i.delivery_count) for i in again.items] == [("a", 2)]
    assert again.token > old.token
    assert queue.stats().redelivered == 1


def test_an_empty_queue_is_drained_only_when_closed_and_all_is_settled(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    assert not queue.stats().drained
    queue.close()
    held = lease(queue)
    assert nothing(queue).state is DrainState.EMPTY
    queue.ack(held.token, ["a"])
    queue.nack(held.token, ["b"], reason="later", delay_s=LONG_S)
    queue.nack(held.token, ["c"], reason="bad", retryable=False)
    assert nothing(queue).state is DrainState.EMPTY
    queue.purge()
    queue.close()
    assert nothing(queue) == NoLease(DrainState.DRAINED, 0)
    assert queue.stats().drained


def test_a_waiting_lease_gets_what_is_put_meanwhile(bench: Bench) -> None:
    queue = bench.queue("samples")
    late = threading.Timer(0.05, queue.put, [items("a")])
    late.start()
    got = queue.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=30)
    late.join()
    assert isinstance(got, Lease)
    assert ids(got) == ["a"]


def test_a_waiting_lease_gets_what_falls_due_meanwhile(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.nack(lease(queue).token, ["a"], reason="later", delay_s=0.05)
    got = queue.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=30)
    assert isinstance(got, Lease)


def test_a_waiting_lease_ends_when_the_queue_is_closed(bench: Bench) -> None:
    queue = bench.queue("samples")
    late = threading.Timer(0.05, queue.close)
    late.start()
    got = queue.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=30)
    late.join()
    assert got == NoLease(DrainState.DRAINED, 0)


def test_waiting_ends_without_items(bench: Bench) -> None:
    got = bench.queue("samples").lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=0.02)
    assert got == NoLease(DrainState.EMPTY, 0)


# fencing


def test_tokens_and_sessions_follow_the_servers_time_so_that_a_server_that_forgot_them_gives_out_none_again(
    bench: Bench,
) -> None:
    queue = filled(bench, "a", "b")
    session = queue.restore(0)
    held = lease(queue, 1, session=session)
    now_ms = held.deadline_ms - int(LONG_S * 1000)
    for number in (session, held.token):
        assert (now_ms - 3_600_000) * 1000 < number < (now_ms + 3_600_000) * 1000


def test_a_late_ack_before_anybody_reclaims_succeeds(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = expire(bench, queue)
    assert queue.ack(held.token, ["a"]) == AckResult(("a",), ())
    assert counts(queue) == (0, 0, 0, 1, 0)


def test_a_lease_that_runs_out_takes_back_only_what_it_still_holds(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    first = lease(queue, 2)
    queue.nack(first.token, ["a"], reason="return", delay_s=0)
    other = lease(queue, 1)
    queue.renew(first.token, visibility_timeout_s=0)
    bench.pass_time(SHORT_S)
    assert ids(lease(queue)) == ["b"]
    assert queue.ack(other.token, ["a"]).ok == ("a",)


def test_an_ack_settles_what_the_lease_holds_and_names_the_rest(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    mine, other = lease(queue, 2), lease(queue, 1)
    assert queue.ack(mine.token, ["b", "c", "never", "b"]) == AckResult(("b",), ("c", "never", "b"))
    assert queue.ack(mine.token, []) == AckResult((), ())
    assert queue.ack(other.token, ["c"]).ok == ("c",)
    assert counts(queue) == (0, 0, 1, 2, 0)


def test_after_acks_out_of_order_exactly_the_others_come_again(bench: Bench) -> None:
    queue = filled(bench, *map(str, range(10)))
    first, second = lease(queue, 4, SHORT_S), lease(queue, 6, SHORT_S)
    queue.ack(first.token, ["3"])
    queue.ack(first.token, ["1", "0"])
    queue.ack(second.token, ["7"])
    bench.pass_time(SHORT_S * 2)
    again = []
    while counts(queue)[3] < 10:
        again += finish(queue)
    assert sorted(again) == ["2", "4", "5", "6", "8", "9"]


def test_nothing_can_be_acked_that_nobody_leased(bench: Bench) -> None:
    queue = filled(bench, "a")
    assert queue.ack(0, ["a"]) == AckResult((), ("a",))
    assert counts(queue) == (1, 0, 0, 0, 0)


def test_a_renewed_lease_outlives_its_first_deadline(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = lease(queue, 1, SHORT_S)
    assert queue.renew(held.token, visibility_timeout_s=LONG_S) >= held.deadline_ms + 1000
    bench.pass_time(SHORT_S * 2)
    assert nothing(queue).state is DrainState.EMPTY
    assert queue.ack(held.token, ["a"]).ok == ("a",)


def test_a_late_renewal_holds_until_somebody_reclaims_and_is_stale_from_then_on(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = expire(bench, queue)
    queue.renew(held.token, visibility_timeout_s=SHORT_S)
    bench.pass_time(SHORT_S * 2)
    lease(queue)
    with pytest.raises(StaleLease):
        queue.renew(held.token, visibility_timeout_s=LONG_S)


def test_a_lease_whose_items_are_all_settled_is_gone(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    held = lease(queue)
    queue.ack(held.token, ["a"])
    queue.renew(held.token, visibility_timeout_s=LONG_S)
    queue.nack(held.token, ["b"], reason="x", delay_s=0)
    with pytest.raises(StaleLease):
        queue.renew(held.token, visibility_timeout_s=LONG_S)


def test_threads_settle_everything_once(bench: Bench) -> None:
    queue = filled(bench, *numbered(120))
    queue.close()
    settled: list[str] = []

    def work(name: str) -> None:
        while isinstance(got := queue.lease(7, visibility_timeout_s=LONG_S, consumer=name, wait_s=30), Lease):
            settled.extend(queue.ack(got.token, ids(got)).ok)

    threads = [threading.Thread(target=work, args=(f"t{k}",)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(settled) == numbered(120)
    assert queue.stats().drained
