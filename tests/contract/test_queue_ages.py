"""What every lease queue tells of waiting: how old the item is that is leased next, at the same price in any queue."""

import pytest

from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.redis import RedisLeaseQueue
from queue_servers import Bench
from queue_steps import SHORT_S, fail, filled, ids, items, learn, lease, numbered, two_groups


def age_s(queue: LeaseQueue) -> float:
    return queue.stats().oldest_ready_s


def waited(bench: Bench, at_least_s: float) -> object:
    """Equal to an age of so much: exactly where the test turns the clock, and at least so much elsewhere."""
    return pytest.approx(at_least_s, abs=0.5) if bench.is_virtual else NotBelow(at_least_s)


class NotBelow(float):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and float(self) - 0.002 <= other < float(self) + 30

    __hash__ = float.__hash__


def test_stats_tell_how_long_the_next_item_has_waited_since_it_was_put(bench: Bench) -> None:
    queue, long_s = bench.queue("samples"), 20.0 if bench.is_virtual else SHORT_S
    assert age_s(queue) == 0.0
    queue.put(items("a"))
    bench.pass_time(long_s)
    queue.put(items("b"))
    assert age_s(queue) == waited(bench, long_s)
    first = lease(queue, 1)
    bench.pass_time(long_s)
    assert age_s(queue) == waited(bench, long_s)  # b's
    second = lease(queue, 1)
    assert age_s(queue) == 0.0
    queue.nack(first.token, ["a"], reason="return", delay_s=0)
    assert age_s(queue) == waited(bench, 2 * long_s)
    queue.ack(lease(queue, 1).token, ["a"])
    queue.ack(second.token, ["b"])
    assert age_s(queue) == 0.0


def test_what_a_restore_gives_back_is_as_old_as_its_put(bench: Bench) -> None:
    queue, long_s = filled(bench, "a", "b", "c"), 600.0 if bench.is_virtual else SHORT_S
    learn(queue, 2, step=1)
    bench.pass_time(long_s)
    queue.restore(0)
    assert age_s(queue) == waited(bench, long_s)


def test_a_requeued_dead_letter_with_no_place_is_as_old_as_its_requeueing(bench: Bench) -> None:
    queue, long_s = filled(bench, "a"), 600.0 if bench.is_virtual else SHORT_S
    fail(queue, "a")
    bench.pass_time(long_s)
    queue.requeue(["a"])
    assert 0 <= age_s(queue) < 30
    bench.pass_time(long_s)
    assert age_s(queue) == waited(bench, long_s)


def test_each_group_sees_the_age_of_its_own_next_item(bench: Bench) -> None:
    a, b = two_groups(bench)
    long_s = 600.0 if bench.is_virtual else SHORT_S
    a.put(items("x"))
    bench.pass_time(long_s)
    a.put(items("y"))
    lease(a, 1)
    assert 0 <= age_s(a) < long_s + 30
    assert age_s(b) == waited(bench, long_s)
    if bench.is_virtual:
        assert age_s(a) < 1


def test_the_age_is_never_negative_when_the_servers_time_goes_back(bench: Bench) -> None:
    if not bench.is_virtual:
        pytest.skip("needs a clock that can be turned back")
    queue = filled(bench, "a")
    bench.pass_time(-3600)
    queue.put(items("b"))
    assert age_s(queue) == 0.0
    assert ids(lease(queue)) == ["a", "b"]


def test_reasons_of_dead_letters_are_those_of_the_letters(bench: Bench) -> None:
    queue = filled(bench, *numbered(5))
    fail(queue, *numbered(4)[:3], reason="SampleCorrupt: bad")
    fail(queue, *numbered(4)[3:], reason="worse")
    assert sorted(queue.dead_reasons()) == sorted((letter.id, letter.reason) for letter in queue.dead_letters())
    assert len(list(queue.dead_reasons())) == 4


def test_many_items_of_one_call_keep_their_order_and_their_time(bench: Bench) -> None:
    queue, names = bench.queue("samples"), numbered(3000)
    queue.put(items(*names))
    assert [item.id for item in queue.payloads()] == names
    while lease(queue, 1000).items[-1].id != names[-1]:
        pass
    queue.put(items("last"))
    bench.pass_time(SHORT_S)
    assert age_s(queue) == waited(bench, SHORT_S)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_stats_cost_the_server_the_same_with_ten_and_a_hundred_thousand_dead_letters(
    kind: str, clients: dict[str, QueueClient]
) -> None:
    if kind not in clients:
        pytest.skip(f"no {kind}-server is installed")
    client = clients[kind]
    queue = RedisLeaseQueue(client, "dead-many", "samples")
    queue.put(items("ready"))
    costs = []
    for count in (10, 100_000):
        names = [f"d{number}" for number in range(count)]
        for start in range(0, count, 1000):  # as bury leaves them
            chunk = names[start : start + 1000]
            pairs = [part for name in chunk for part in (name, "SampleCorrupt: bad")]
            client.call("HSET", queue.key("dead"), *pairs)
            client.call("HSET", queue.key("digest"), *pairs)
        costs.append(commands_of(client, queue))
        assert (queue.stats().dead, queue.stats().ready) == (count, 1)
    assert costs[0] == costs[1]
    queue.purge()


def commands_of(client: QueueClient, queue: RedisLeaseQueue) -> dict[str, int]:
    """Calls of each command, those inside of scripts too, that one `stats` takes."""
    queue.stats()  # the server knows the script
    client.call("CONFIG", "RESETSTAT")
    queue.stats()
    text = client.call("INFO", "commandstats").decode()
    rows = [line.partition(":") for line in text.splitlines() if line.startswith("cmdstat_")]
    return {name: int(told.split(",")[0].removeprefix("calls=")) for name, _, told in rows}
