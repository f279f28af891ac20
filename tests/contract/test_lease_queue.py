"""What every lease queue promises: the memory model, fakeredis and real servers alike."""

import threading
from collections.abc import Sequence

import pytest

from eaglefeed.errors import ConfigError, IdConflict, InputError, QueueClosed, QueueFull, StaleLease
from eaglefeed.queue.base import AckResult, DrainState, Lease, LeaseQueue, NoLease, QueueItem, QueueLimits
from queue_servers import Bench

SHORT_S = 0.04
LONG_S = 60.0


def items(*ids: str, stored_bytes: int = 0) -> list[QueueItem]:
    return [QueueItem(i, f"payload of {i}\n\xff".encode("latin-1"), stored_bytes) for i in ids]


def numbered(n: int) -> list[str]:
    return [f"i{k:05}" for k in range(n)]


def lease(queue: LeaseQueue, n: int = 10, timeout_s: float = LONG_S, consumer: str = "c") -> Lease:
    got = queue.lease(n, visibility_timeout_s=timeout_s, consumer=consumer)
    assert isinstance(got, Lease), got
    return got


def nothing(queue: LeaseQueue) -> NoLease:
    got = queue.lease(10, visibility_timeout_s=LONG_S, consumer="c")
    assert isinstance(got, NoLease), got
    return got


def ids(got: Lease) -> list[str]:
    return [item.id for item in got.items]


def expire(bench: Bench, queue: LeaseQueue, n: int = 10) -> Lease:
    """Lease and let the lease run out; nobody has reclaimed it yet."""
    got = lease(queue, n, SHORT_S)
    bench.pass_time(SHORT_S * 2)
    return got


def filled(bench: Bench, *names: str) -> LeaseQueue:
    queue = bench.queue("samples")
    queue.put(items(*names))
    return queue


def counts(queue: LeaseQueue) -> Sequence[int]:
    s = queue.stats()
    return s.ready, s.delayed, s.leased, s.done, s.dead


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


@pytest.mark.parametrize("bad", ["", "two\nlines", "x" * 257])
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


def test_items_are_not_delivered_twice_while_their_lease_runs(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = lease(queue)
    got = nothing(queue)
    assert (got.state, got.next_ms) == (DrainState.EMPTY, held.deadline_ms)


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


def test_a_backlog_of_expired_leases_drains_whatever_a_call_reclaims(bench: Bench) -> None:
    queue = filled(bench, *numbered(150))
    queue.configure(QueueLimits(max_deliveries=1))
    for _ in range(150):
        lease(queue, 1, SHORT_S)
    bench.pass_time(SHORT_S * 2)
    assert nothing(queue) == NoLease(DrainState.EMPTY, 0)
    assert counts(queue) == (0, 0, 0, 0, 150)


# fencing


def test_a_late_ack_before_anybody_reclaims_succeeds(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = expire(bench, queue)
    assert queue.ack(held.token, ["a"]) == AckResult(("a",), ())
    assert counts(queue) == (0, 0, 0, 1, 0)


def test_a_zombies_late_ack_is_stale_and_leaves_the_new_owner_alone(bench: Bench) -> None:
    queue = filled(bench, "a")
    zombie = expire(bench, queue)
    owner = lease(queue)
    assert queue.ack(zombie.token, ["a"]) == AckResult((), ("a",))
    assert queue.nack(zombie.token, ["a"], reason="late", retryable=False) == AckResult((), ("a",))
    assert counts(queue) == (0, 0, 1, 0, 0)
    assert queue.ack(owner.token, ["a"]) == AckResult(("a",), ())
    assert queue.ack(zombie.token, ["a"]) == AckResult((), ("a",))
    assert queue.ack(owner.token, ["a"]) == AckResult((), ("a",))
    assert counts(queue) == (0, 0, 0, 1, 0)


def test_a_lease_that_runs_out_takes_back_only_what_it_still_holds(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    first = lease(queue, 2, SHORT_S)
    queue.nack(first.token, ["a"], reason="return", delay_s=0)
    other = lease(queue, 1)
    bench.pass_time(SHORT_S * 2)
    assert ids(lease(queue)) == ["b"]
    assert queue.ack(other.token, ["a"]).ok == ("a",)


def test_an_ack_settles_what_the_lease_holds_and_names_the_rest(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    mine, other = lease(queue, 2), lease(queue, 1)
    assert queue.ack(mine.token, ["b", "c", "never", "b"]) == AckResult(("b",), ("c", "never", "b"))
    assert queue.ack(mine.token, []) == AckResult((), ())
    assert queue.ack(other.token, ["c"]).ok == ("c",)
    assert counts(queue) == (0, 0, 1, 2, 0)


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


# crashes


def test_items_whose_lease_ran_out_are_leased_alone_from_then_on(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    expire(bench, queue, 2)
    assert [ids(lease(queue)) for _ in range(3)] == [["a"], ["b"], ["c", "d"]]


def test_a_batch_stops_before_an_item_with_a_crash_behind_it(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    held = lease(queue, 1)
    expire(bench, queue, 1)
    assert nothing_ready_but(queue, "b")
    queue.nack(held.token, ["a"], reason="return", delay_s=0)
    assert [ids(lease(queue)) for _ in range(3)] == [["a"], ["b"], ["c"]]


def nothing_ready_but(queue: LeaseQueue, suspect: str) -> bool:
    """Reclaim by a lease, then give the item back to the head."""
    got = lease(queue, 1)
    queue.nack(got.token, [suspect], reason="return", delay_s=0)
    return ids(got) == [suspect]


def test_only_lone_crashes_kill_and_lease_mates_survive_a_poison_item(bench: Bench) -> None:
    queue = filled(bench, "mate", "poison")
    queue.configure(QueueLimits(max_deliveries=2))
    expire(bench, queue)
    queue.ack(lease(queue).token, ["mate"])
    assert ids(expire(bench, queue)) == ["poison"]
    assert ids(expire(bench, queue)) == ["poison"]
    assert nothing(queue) == NoLease(DrainState.EMPTY, 0)
    (dead,) = queue.dead_letters()
    assert (dead.id, dead.delivery_count, dead.payload) == ("poison", 3, b"payload of poison\n\xff")
    assert dead.reason == "its lease ran out 2 times while it was leased alone"
    assert counts(queue) == (0, 0, 0, 1, 1)


def test_a_crashed_items_dead_letter_tells_its_last_error(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.configure(QueueLimits(max_deliveries=1))
    queue.nack(lease(queue).token, ["a"], reason="out of memory", delay_s=0.001)
    bench.pass_time(0.01)
    expire(bench, queue)
    nothing(queue)
    (dead,) = queue.dead_letters()
    assert dead.reason.endswith("; last error: out of memory")


# nack


def test_a_graceful_return_goes_to_the_head_in_order_and_counts_nothing(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c", "d")
    held = lease(queue, 3)
    assert queue.nack(held.token, ["b", "c"], reason="stop", delay_s=0).ok == ("b", "c")
    again = lease(queue)
    assert [(i.id, i.delivery_count) for i in again.items] == [("b", 1), ("c", 1), ("d", 1)]
    assert queue.stats().redelivered == 0


def test_a_delayed_item_is_leased_when_its_time_has_come_and_not_before(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.nack(lease(queue).token, ["a"], reason="later", delay_s=0.1)
    assert nothing(queue).next_ms > 0
    assert counts(queue) == (0, 1, 0, 0, 0)
    bench.pass_time(0.2)
    assert [(i.id, i.delivery_count) for i in lease(queue).items] == [("a", 2)]


def test_the_backoff_doubles_with_each_delivery_up_to_its_bound(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs minutes")
    queue = filled(bench, "a")
    queue.configure(QueueLimits(backoff_base_s=10, backoff_max_s=30))
    for wanted_ms in (7_500, 15_000, 22_500, 22_500):
        held = lease(queue)
        leased_ms = held.deadline_ms - LONG_S * 1000
        queue.nack(held.token, ["a"], reason="busy")
        assert wanted_ms <= nothing(queue).next_ms - leased_ms <= wanted_ms + 2_000
        bench.pass_time(30)


def test_an_item_that_cannot_succeed_is_a_dead_letter_at_once(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    held = lease(queue)
    queue.nack(held.token, ["a"], reason="corrupt: ünïcode", retryable=False)
    (dead,) = queue.dead_letters()
    assert dead == ("a", "corrupt: ünïcode", 1, b"payload of a\n\xff")
    assert counts(queue) == (0, 0, 1, 0, 1)


def test_a_long_reason_is_cut(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.nack(lease(queue).token, ["a"], reason="x" * 10_000, retryable=False)
    (dead,) = queue.dead_letters()
    assert dead.reason == "x" * 499 + "…"


# dead letters and listings


def test_requeued_dead_letters_start_anew_also_in_a_closed_queue(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    expire(bench, queue, 1)
    queue.nack(lease(queue).token, ["a"], reason="bad", retryable=False)
    queue.close()
    assert queue.requeue(["a", "a", "b", "never"]) == 1
    assert [(i.id, i.delivery_count) for i in lease(queue).items] == [("b", 1), ("a", 1)]
    assert list(queue.dead_letters()) == []


def test_every_dead_letter_is_listed_once(bench: Bench) -> None:
    names = numbered(700)
    queue = filled(bench, *names)
    queue.nack(lease(queue, 700).token, names, reason="bad", retryable=False)
    assert sorted(dead.id for dead in queue.dead_letters()) == names


def test_payloads_are_those_of_all_unsettled_items_in_put_order(bench: Bench) -> None:
    names = numbered(450)
    queue = filled(bench, *names)
    held = lease(queue, 4)
    queue.ack(held.token, names[:1])
    queue.nack(held.token, names[1:2], reason="bad", retryable=False)
    queue.nack(held.token, names[2:3], reason="later", delay_s=LONG_S)
    found = list(queue.payloads())
    assert [item.id for item in found] == names[2:]
    assert [item.delivery_count for item in found] == [1, 1] + [0] * 446
    assert found[0].payload == b"payload of i00002\n\xff"


def test_a_purged_queue_knows_nothing_any_more(bench: Bench) -> None:
    queue = filled(bench, "a", "b", "c")
    held = lease(queue, 2)
    queue.ack(held.token, ["a"])
    assert queue.purge() == 2
    assert counts(queue) == (0, 0, 0, 0, 0)
    assert queue.put(items("a")) == (1, 0, 1)
    assert lease(queue).token > held.token
    assert queue.ack(held.token, ["a", "b"]).stale == ("a", "b")


# hand-off


def test_a_handoff_puts_the_sample_and_settles_the_prompt(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    held = lease(prompts)
    prompts.handoff(held.token, "p", QueueItem("s", b"ref", 7), samples)
    assert counts(prompts) == (0, 0, 0, 1, 0)
    assert samples.stats().stored_bytes == 7
    assert [(i.id, i.payload) for i in lease(samples).items] == [("s", b"ref")]
    with pytest.raises(StaleLease):
        prompts.renew(held.token, visibility_timeout_s=1)


def test_a_repeated_handoff_is_a_success_also_when_the_sample_is_done(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    held = lease(prompts)
    for _ in range(2):
        prompts.handoff(held.token, "p", QueueItem("s", b"ref"), samples)
    samples.ack(lease(samples).token, ["s"])
    prompts.handoff(held.token, "p", QueueItem("s", b"ref"), samples)
    assert counts(samples) == (0, 0, 0, 1, 0)


def test_a_handoff_without_the_prompts_lease_changes_nothing(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p"))
    zombie = expire(bench, prompts)
    owner = lease(prompts)
    with pytest.raises(StaleLease):
        prompts.handoff(zombie.token, "p", QueueItem("p", b"zombie's ref"), samples)
    prompts.handoff(owner.token, "p", QueueItem("p", b"owner's ref"), samples)
    with pytest.raises(StaleLease):
        prompts.handoff(zombie.token, "p", QueueItem("p", b"zombie's ref"), samples)
    assert [i.payload for i in lease(samples).items] == [b"owner's ref"]


def test_a_handoff_is_refused_neither_for_room_nor_by_a_closed_queue(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    samples.configure(QueueLimits(max_depth=0, high_count=1, low_count=0))
    samples.close()
    prompts.put(items("p", "q"))
    held = lease(prompts)
    for name in ("p", "q"):
        prompts.handoff(held.token, name, QueueItem(name, b"ref"), samples)
    assert samples.stats().full
    assert not samples.stats().drained


def test_a_sample_of_another_prompt_is_not_replaced(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("p", "q"))
    held = lease(prompts)
    prompts.handoff(held.token, "p", QueueItem("s", b"of p"), samples)
    with pytest.raises(IdConflict):
        prompts.handoff(held.token, "q", QueueItem("s", b"of q"), samples)
    assert prompts.ack(held.token, ["q"]).ok == ("q",)


# room, workers


def test_room_goes_at_the_high_mark_and_comes_back_at_the_low_one(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_count=3, low_count=1))
    seen = []
    for name in "abc":
        queue.put(items(name))
        seen.append(queue.has_room())
    held = lease(queue)
    for name in "abc":
        queue.ack(held.token, [name])
        seen.append(queue.has_room())
    assert seen == [True, True, False, False, True, True]


def test_room_is_counted_in_stored_bytes_too_and_dead_letters_take_none(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.configure(QueueLimits(high_bytes=30, low_bytes=10))
    queue.put(items("a", "b", "c", stored_bytes=10))
    assert not queue.has_room()
    assert not queue.wait_for_room(0.01)
    held = lease(queue)
    queue.ack(held.token, ["a"])
    assert not queue.has_room()
    queue.nack(held.token, ["b"], reason="bad", retryable=False)
    assert queue.wait_for_room(0.01)
    assert queue.stats().stored_bytes == 10
    queue.requeue(["b"])
    assert queue.stats().stored_bytes == 20


def test_new_limits_are_looked_at_at_once(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    queue.configure(QueueLimits(high_count=2, low_count=0))
    assert not queue.has_room()
    queue.configure(QueueLimits(high_count=9, low_count=5))
    assert queue.has_room()


def test_workers_are_counted_by_role_over_all_queues_of_the_run(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.beat("producer", "host a-1")
    prompts.beat("producer", "host b-2")
    samples.beat("trainer", "t")
    samples.beat("trainer", "t")
    assert samples.stats().workers == {"producer": 2, "trainer": 1}
    samples.farewell("producer", "host a-1")
    samples.farewell("producer", "never seen")
    assert prompts.stats().workers == {"producer": 1, "trainer": 1}


def test_a_silent_worker_does_not_live_any_more(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs half a minute")
    queue = bench.queue("samples")
    queue.beat("producer", "a")
    bench.pass_time(20)
    queue.beat("producer", "b")
    bench.pass_time(20)
    assert queue.stats().workers == {"producer": 1}


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
