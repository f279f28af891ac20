"""What every lease queue tells of itself to janitors and rebuilders: kept items, standing leases, the run's record."""

import threading

from eaglefeed.queue import rules
from eaglefeed.queue.base import LeaseQueue
from queue_servers import Bench
from queue_steps import (
    expire,
    fail,
    filled,
    finish,
    hand_off,
    held_pair,
    ids,
    items,
    learn,
    lease,
    numbered,
    ref,
    released_ids,
    two_groups,
)


def found(queue: LeaseQueue, *names: str) -> list[str]:
    return sorted(item.id for item in queue.find(names))


# find and known


def test_items_are_found_with_payload_and_bytes_and_unknown_ids_are_not(bench: Bench) -> None:
    queue = bench.queue("samples")
    put = [*items("a", stored_bytes=7), *items("b")]
    queue.put(put)
    assert sorted(queue.find(["b", "nobody", "a"])) == put
    assert queue.find([]) == []
    assert queue.known(["b", "nobody", "a"]) == {"a", "b"}
    assert queue.known([]) == set()


def test_what_is_leased_tentative_delayed_or_dead_is_kept_and_what_is_done_is_known(bench: Bench) -> None:
    queue = filled(bench, "dead", "done", "delayed", "tentative", "leased", "ready")
    fail(queue, "dead")
    finish(queue, 1)
    queue.nack(lease(queue, 1).token, ["delayed"], reason="later", delay_s=60)
    learn(queue, 1, step=1)
    lease(queue, 1)
    names = ("dead", "delayed", "done", "leased", "ready", "tentative")
    assert found(queue, *names) == ["dead", "delayed", "leased", "ready", "tentative"]
    assert queue.known(names) == set(names)


def test_a_released_sample_is_found_until_it_is_forgotten(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items("a", stored_bytes=5))
    finish(queue)
    assert released_ids(queue) == found(queue, "a") == ["a"]
    queue.forget(["a"])
    assert (found(queue, "a"), queue.known(["a"])) == ([], {"a"})


def test_a_sample_that_one_group_has_done_and_another_holds_dead_is_found(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x", stored_bytes=5))
    finish(a)
    fail(b, "x")
    assert found(a, "x") == found(b, "x") == ["x"]


def test_thousands_of_ids_are_looked_for(bench: Bench) -> None:
    queue = bench.queue("samples")
    queue.put(items(*numbered(2050)))
    asked = numbered(2100)
    assert found(queue, *asked) == numbered(2050)
    assert queue.known(asked) == set(numbered(2050))
    assert queue.leased(range(1, 2100)) == set()


def test_a_handed_off_sample_is_found_at_once(bench: Bench) -> None:
    pair = bench.queue("prompts"), bench.queue("samples")
    pair[0].put(items("a"))
    assert found(pair[1], "a") == []
    hand_off(pair, "a", holder="")
    assert pair[1].find(["a"]) == [ref("a")]
    assert (found(pair[0], "a"), pair[0].known(["a"])) == ([], {"a"})


def test_a_purged_queue_keeps_and_knows_nothing(bench: Bench) -> None:
    queue = filled(bench, "a")
    queue.purge()
    assert (queue.find(["a"]), queue.known(["a"])) == ([], set())


# leased


def test_a_lease_stands_until_its_last_item_is_settled(bench: Bench) -> None:
    queue = filled(bench, "a", "b")
    held = lease(queue)
    assert queue.leased([held.token, held.token + 1, 1]) == {held.token}
    queue.ack(held.token, ["a"])
    assert queue.leased([held.token]) == {held.token}
    queue.nack(held.token, ["b"], reason="later", delay_s=0)
    assert queue.leased([held.token]) == set()
    assert queue.leased([]) == set()


def test_a_lease_that_ran_out_stands_until_somebody_reclaims_it(bench: Bench) -> None:
    queue = filled(bench, "a")
    old = expire(bench, queue)
    assert queue.leased([old.token]) == {old.token}, "its holder may still hand off"
    new = lease(queue)
    assert queue.leased([old.token, new.token]) == {new.token}


def test_a_hand_off_ends_its_lease_with_the_last_prompt(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.put(items("a", "b"))
    held = lease(prompts)
    prompts.handoff(held.token, "a", ref("a"), samples)
    assert prompts.leased([held.token]) == {held.token}
    prompts.handoff(held.token, "b", ref("b"), samples)
    assert prompts.leased([held.token]) == set()


def test_a_held_prompt_has_no_lease(bench: Bench) -> None:
    prompts, samples = held_pair(bench, "a")
    assert prompts.stats().held == 1
    assert found(samples, "a") == ["a"]
    assert prompts.leased(range(1, 100)) == set()


def test_a_lease_of_any_group_counts(bench: Bench) -> None:
    a, b = two_groups(bench)
    a.put(items("x"))
    held = lease(b)
    assert ids(held) == ["x"]
    assert a.leased([held.token]) == b.leased([held.token]) == {held.token}


def test_the_counts_of_a_group_are_no_leases(bench: Bench) -> None:
    """A lease is a field beside others, such as how many there are; only a token is one."""
    queue = filled(bench, "a")
    session = queue.restore(0)
    held = lease(queue, session=session)
    assert queue.leased([held.token, session, 0]) == {held.token}


def test_a_purge_ends_the_leases(bench: Bench) -> None:
    queue = filled(bench, "a")
    held = lease(queue)
    queue.purge()
    assert queue.leased([held.token]) == set()


# the run's record


def test_what_was_agreed_first_stands(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    assert samples.agreed() == {}
    assert samples.agree("contract", b"\x00one\n") == b"\x00one\n"
    assert prompts.agree("contract", b"two") == b"\x00one\n"
    assert samples.agree("empty", b"") == b""
    assert samples.agree("empty", b"late") == b""
    assert prompts.agreed() == samples.agreed() == {"contract": b"\x00one\n", "empty": b""}


def test_all_who_agree_at_once_get_the_same(bench: Bench) -> None:
    told: list[bytes] = []
    start = threading.Barrier(4)

    def agree(number: int) -> None:
        queue = bench.queue("samples")
        start.wait()
        told.append(queue.agree("instance", str(number).encode()))

    threads = [threading.Thread(target=agree, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 4
    assert set(told) == {bench.queue("samples").agreed()["instance"]}


def test_many_records_are_all_told(bench: Bench) -> None:
    queue = bench.queue("samples")
    for number in range(600):
        queue.agree(f"queue:{number}", b"1")
    assert len(queue.agreed()) == 600


def test_a_purge_leaves_of_the_runs_record_all_but_its_instance(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    samples.agree("contract", b"c")
    samples.agree("instance", b"x")
    prompts.purge()
    assert samples.agreed() == {"contract": b"c", "instance": b"x"}
    samples.purge()
    samples.purge()
    assert samples.agreed() == {"contract": b"c", "former:x": b"1"}
    bench.queue("samples.e1").agree("instance", b"y")
    bench.queue("samples.e1").purge()
    assert samples.agreed() == {"contract": b"c", "former:x": b"1", "former:y": b"1"}


def test_the_last_error_of_a_role_stands_in_the_runs_record_and_a_clean_end_leaves_none(bench: Bench) -> None:
    prompts, samples = bench.queue("prompts"), bench.queue("samples")
    prompts.beat("producer", "p1")
    prompts.farewell("producer", "p1")
    assert rules.last_error(samples.agreed(), "producer") == ""
    prompts.farewell("producer", "p2", error="no GPU \ud800")
    samples.farewell("trainer", "t", error="other")
    prompts.farewell("producer", "p3", error="x" * 9999)
    told = rules.last_error(samples.agreed(), "producer")
    assert told.startswith("p3: xxx")
    assert len(told) == 500
    assert rules.last_error(samples.agreed(), "trainer") == "t: other"
    assert prompts.stats().workers == {}
