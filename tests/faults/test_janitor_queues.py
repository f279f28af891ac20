"""Purges, second queues of a run and streams that retain, and what the janitor makes of them."""

from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError
from eaglefeed.producer.ledger import register
from eaglefeed.producer.rebuild import rebuild
from eaglefeed.queue.base import QueueItem
from eaglefeed.queue.memory import MemoryLeaseQueue
from eaglefeed.schema.contract import RETAIN_RECORD
from eaglefeed.storage.orphans import EVERY_KEY, introduce, note_instance
from janitor_house import THREE, House, lease


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def purge(house: House) -> None:
    house.run.prompts.purge()
    house.run.samples.purge()


def test_a_purge_costs_no_shard_until_they_are_rebuilt_or_deleted_by_hand(house: House) -> None:
    house.run.feed(*THREE)
    house.run.produce()
    before = house.keys
    purge(house)
    with pytest.raises(ConfigError, match=r"eaglefeed store rebuild.*delete the folder"):
        house.later().gc()
    assert house.keys == before
    assert rebuild(house.store, house.run.prompts, house.run.samples, "run").refs == 3
    assert house.later().gc().kept == 3
    purge(house)
    house.run.feed(*THREE)
    house.run.produce()
    with pytest.raises(ConfigError, match="eaglefeed store rebuild"):
        house.later().gc()
    assert len(house.keys) == 6


def test_after_a_purge_with_no_shards_left_the_queue_is_introduced_again(house: House) -> None:
    house.begin(*THREE)
    house.later()
    purge(house)
    for shard in list(house.store.scan()):
        house.store.delete(house.store.read_ref(shard.key))
    house.run.feed(*THREE)
    house.run.produce()
    assert house.later().gc().kept == 3


def test_of_two_queues_of_one_run_on_one_store_the_second_deletes_nothing_even_if_it_came_to_an_empty_store(
    house: House, tmp_path: Path
) -> None:
    register(house.store, house.run.samples, "run")
    other = House(tmp_path, "run", house.clock)
    with structlog.testing.capture_logs() as logs:
        register(other.store, other.run.samples, "run")
    assert [entry["event"] for entry in logs] == ["shards_from_before"]
    held, ref = house.begin()
    house.hand_off(held, ref)
    with pytest.raises(ConfigError, match="never knew these shards"):
        other.later().gc()
    assert house.gc().kept == 1
    purge(other)
    assert not introduce(other.store, other.ledger), "its purge forgot another instance than the noted one"
    note_instance(other.store, other.ledger)
    with pytest.raises(ConfigError):
        house.gc()


def test_a_stream_that_retains_holds_for_every_other_stream_and_for_what_the_janitor_asks(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.run.feed(*THREE)
    house.run.produce()
    with (
        SampleStream(house.run.samples, house.store, consumer="a", contract="") as plain,
        SampleStream(house.run.samples, house.store, consumer="b", contract="", retain=True),
    ):
        assert len(plain.take(1, wait_s=30)) == 1
        plain.ack()
    assert house.run.samples.stats().released == 0
    assert len(house.keys) == 3

    house.lose_queue()
    house.run.samples.put([QueueItem("a", b"x")])
    held = lease(house.run.samples)
    house.run.samples.ack(held.token, ["a"])
    find = MemoryLeaseQueue.find

    def find_and_retain(queue: MemoryLeaseQueue, ids: Any) -> list[QueueItem]:
        found = find(queue, ids)
        queue.agree(RETAIN_RECORD + queue.name, b"1")
        return found

    monkeypatch.setattr(MemoryLeaseQueue, "find", find_and_retain)
    assert house.ledger.kept(["a"]) == {"a": {EVERY_KEY}}
