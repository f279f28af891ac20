"""What producers, trainers and janitors leave that die, stall or race, and what the janitor makes of it."""

from pathlib import Path
from typing import Any

import pytest
import structlog.testing

import pipeline
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError, StaleLease
from eaglefeed.producer.ledger import QueueLedger, register
from eaglefeed.queue.base import QueueItem
from eaglefeed.queue.memory import MemoryLeaseQueue
from eaglefeed.schema.refs import decode_ref, encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import collect
from janitor_house import ONE, THREE, House, lease


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


# producers


def test_a_dead_producers_shard_goes_only_when_its_lease_is_gone_and_the_grace_is_over(house: House) -> None:
    _, orphan = house.begin()
    assert house.gc().young == 1
    assert house.later().gc().leased == 1, "it ran out, but its holder might live, and nobody has reclaimed it"
    house.take_over()
    assert len(house.keys) == 2
    found = house.gc()
    assert (found.orphans, found.orphan_bytes, found.kept) == (1, orphan.stored_bytes, 1)
    assert house.keys == house.open_keys != {key_of(orphan)}


def test_the_shard_of_a_producer_that_is_paused_beyond_its_lease_stays_and_is_handed_off(house: House) -> None:
    held, ref = house.begin()
    for _ in range(3):
        assert house.later(1000).gc().leased == 1
    house.hand_off(held, ref)
    assert house.gc().kept == 1
    assert house.store.get(decode_ref(next(house.run.samples.payloads()).payload)).keys() == ref.feature_specs.keys()


def test_a_producer_that_wakes_after_its_prompt_was_done_finds_its_shard_gone_and_the_other_one_there(
    house: House,
) -> None:
    held, ref = house.begin()
    house.take_over()
    assert house.later().gc().orphans == 1
    with pytest.raises(StaleLease):
        house.hand_off(held, ref)
    assert not house.store.delete(ref)
    assert house.later().gc().kept == 1
    assert house.keys == house.open_keys


def test_a_shard_whose_prompt_failed_after_it_was_written_goes_with_its_lease(house: House) -> None:
    held, ref = house.begin()
    house.run.prompts.nack(held.token, [ref.sample_id], reason="no hand-off", retryable=False)
    assert house.later().gc().orphans == 1
    assert house.run.prompts.stats().dead == 1


# hand-offs that race the janitor


@pytest.mark.parametrize("when", ["before the leases are asked for", "after the leases are asked for"])
def test_a_hand_off_that_races_the_janitor_keeps_its_shard(
    house: House, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    held, ref = house.begin()
    ledger = house.later().ledger
    plain = ledger.leased

    def leased(tokens: Any) -> set[int]:
        if when.startswith("before"):
            house.hand_off(held, ref)
            return plain(tokens)
        found = plain(tokens)
        house.hand_off(held, ref)
        return found

    monkeypatch.setattr(ledger, "leased", leased)
    assert collect(house.store, ledger, clock=house.clock).kept == 1
    assert house.keys == house.open_keys == {key_of(ref)}


def test_asked_in_the_other_order_the_janitor_would_lose_a_handed_off_shard(house: House) -> None:
    """Why leases come first: here is the run of events in which refs that were asked for first are too old."""
    held, ref = house.begin()
    too_early = house.ledger.kept([ref.sample_id])
    house.hand_off(held, ref)
    assert (too_early, house.ledger.leased([held.token])) == ({}, set())


def test_after_a_lease_was_told_gone_no_hand_off_succeeds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    held, ref = house.begin()
    ledger, refused = house.later().ledger, []
    plain = ledger.leased

    def leased(tokens: Any) -> set[int]:
        lease(house.run.prompts)
        found = plain(tokens)
        with pytest.raises(StaleLease) as caught:
            house.hand_off(held, ref)
        refused.append(caught.value)
        return found

    monkeypatch.setattr(ledger, "leased", leased)
    assert collect(house.store, ledger, clock=house.clock).orphans == 1
    assert len(refused) == 1


# samples


def test_the_shard_of_a_dead_letter_stays_and_is_there_when_it_is_requeued(house: House) -> None:
    house.run.feed(ONE)
    house.run.produce()
    held = lease(house.run.samples)
    house.run.samples.nack(held.token, ["p-0"], reason="bad", retryable=False)
    assert house.later(10_000).gc().kept == 1
    house.run.samples.requeue(["p-0"])
    assert house.gc().kept == 1
    house.store.get(decode_ref(next(house.run.samples.payloads()).payload))


def test_a_sample_whose_ref_cannot_be_read_keeps_its_shard(house: House) -> None:
    held, ref = house.begin()
    house.run.prompts.handoff(held.token, "p-0", QueueItem("p-0", b"of another version", 5), house.run.samples)
    assert house.later().gc().kept == 1
    assert house.keys == {key_of(ref)}


def test_released_shards_that_a_trainer_left_go_also_when_the_janitor_is_killed_on_the_way(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.run.feed(*THREE)
    house.run.produce()
    held = lease(house.run.samples, 3)
    house.run.samples.ack(held.token, [item.id for item in held.items])  # and the trainer dies
    assert house.run.samples.stats().released == 3

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryLeaseQueue, "forget", die)
        with pytest.raises(KeyboardInterrupt):
            house.gc()
    assert (house.keys, house.run.samples.stats().released) == (set(), 3)
    assert house.gc().released == 3
    assert house.run.samples.stats().released == 0


def test_shards_that_a_stream_retains_outlive_every_janitor_and_only_orphans_go(house: House) -> None:
    house.run.feed(ONE)
    house.run.produce()
    with SampleStream(house.run.samples, house.store, consumer="t", contract="", retain=True) as stream:
        assert len(stream.take(1, wait_s=30)) == 1
        stream.ack()
    assert house.run.samples.stats().released == 0
    kept = house.keys
    house.write("never-handed-off", 5)
    found = house.later().gc()
    assert (found.kept, found.orphans, house.keys) == (1, 1, kept)


def test_an_epochs_shards_belong_to_the_run(house: House) -> None:
    prompts, samples = house.open("prompts.e1"), house.open("samples.e1")
    register(house.store, samples, "run")
    prompts.put([QueueItem("a", b"x"), QueueItem("b", b"x")])
    first, second = lease(prompts), lease(prompts)
    ref = house.write("a", first.token)
    prompts.handoff(first.token, "a", QueueItem("a", encode_ref(ref), ref.stored_bytes), samples)
    house.write("b", second.token)
    found = house.later().gc()
    assert (found.kept, found.leased, found.orphans) == (1, 1, 0)
    held = lease(samples)
    samples.ack(held.token, ["a"])
    assert house.gc().released == 1


# runs and queues


def test_of_two_runs_in_one_folder_each_collects_its_own(house: House, tmp_path: Path) -> None:
    other = House(tmp_path, "other", house.clock)
    held, ref = house.begin()
    house.hand_off(held, ref)
    theirs, their_ref = other.begin(pipeline.prompt(7))
    other.write("p-8", 3)
    found = other.later().gc()
    assert (found.foreign, found.leased, found.orphans) == (1, 1, 1)
    found = house.gc()
    assert (found.kept, found.foreign, found.orphans) == (1, 1, 0)
    other.hand_off(theirs, their_ref)
    assert house.keys == {key_of(ref), key_of(their_ref)}


def test_a_lost_queue_costs_no_shard_whatever_is_fed_and_produced_after_it(house: House) -> None:
    house.run.feed(*THREE)
    house.run.produce()
    before = house.keys
    house.lose_queue()
    with pytest.raises(ConfigError, match="eaglefeed store rebuild"):
        house.later().gc()
    with structlog.testing.capture_logs() as logs:
        house.run.feed(*THREE)
        house.run.produce()
    assert "shards_from_before" in [entry["event"] for entry in logs]
    with pytest.raises(ConfigError, match="eaglefeed store rebuild"):
        house.later().gc()
    assert before < house.keys
    assert len(house.keys) == 6


def test_a_queue_that_is_lost_in_the_middle_of_a_pass_costs_no_shard(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.run.feed(*THREE)
    house.run.produce()
    ledger = QueueLedger("run", lambda name: house.open(name))
    plain = ledger.leased

    def leased(tokens: Any) -> set[int]:
        house.lose_queue()
        ledger._run = house.open("samples")
        return plain(tokens)

    monkeypatch.setattr(ledger, "leased", leased)
    with pytest.raises(ConfigError, match="eaglefeed store rebuild"):
        collect(house.later().store, ledger, clock=house.clock)
    assert len(house.keys) == 3


def test_a_purge_under_a_working_producer_makes_its_shard_an_orphan_that_it_cannot_hand_off(house: House) -> None:
    held, ref = house.begin()
    house.run.prompts.purge()
    assert house.later().gc().orphans == 1
    with pytest.raises(StaleLease):
        house.hand_off(held, ref)
