"""What a janitor deletes and what it leaves, step by step, with a ledger that is written by hand."""

from dataclasses import replace

import pytest

import samples
from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError, StorageError
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import key_of, shard_key
from eaglefeed.storage.janitor import Collected, collect, delete_released
from eaglefeed.storage.memory import MemoryStore
from eaglefeed.storage.orphans import EVERY_KEY, introduce, name_parts, note_instance
from ledger_book import Book, keep, keys, put, release


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def book(store: MemoryStore) -> Book:
    book = Book()
    assert introduce(store, book)
    return book


def grown_old(store: MemoryStore, book: Book, clock: ManualClock, **options: bool) -> Collected:
    clock.advance(61)
    return collect(store, book, clock=clock, **options)


def test_a_shard_goes_that_no_lease_and_no_ref_stands_for(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    orphan = put(store, "a")
    found = grown_old(store, book, clock)
    assert (found.orphans, found.orphan_bytes) == (1, orphan.stored_bytes)
    assert keys(store) == set()


def test_shards_stay_that_are_leased_kept_another_runs_or_young(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    put(store, "leased", 8)
    book.standing = {8}
    keep(book, put(store, "kept"))
    put(store, "foreign", run_id="other")
    clock.advance(61)
    put(store, "young")
    before = keys(store)
    found = collect(store, book, clock=clock)
    assert (found.leased, found.kept, found.foreign, found.young) == (1, 1, 1, 1)
    assert (found.orphans, keys(store)) == (0, before)


def test_of_two_shards_of_one_prompt_the_one_goes_that_was_not_handed_off(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    first, second = put(store, "a", 7), put(store, "a", 8)
    keep(book, second)
    assert grown_old(store, book, clock).orphans == 1
    assert keys(store) == {key_of(second)} != {key_of(first)}


def test_a_shard_whose_kept_ref_cannot_be_read_stays(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    put(store, "a")
    book.refs["a"] = {EVERY_KEY}
    assert grown_old(store, book, clock).kept == 1


def test_a_hand_off_between_listing_and_the_question_for_refs_keeps_its_shard(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    """The producer may hand off just before or just after its lease is asked for: both orders are driven."""
    early, late = put(store, "early", 8), put(store, "late", 9)
    book.standing = {9}
    keep(book, early)
    book.on_leased = lambda: (book.standing.clear(), keep(book, late))[0]
    found = grown_old(store, book, clock)
    assert (found.kept, found.orphans) == (2, 0)
    assert book.asked == ["leased", "kept"]


def test_a_lease_that_ends_without_a_hand_off_gives_its_shard_up_in_the_next_pass(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    put(store, "a", 9)
    book.standing = {9}
    book.on_leased = book.standing.clear
    assert grown_old(store, book, clock).leased == 1
    assert collect(store, book, clock=clock).orphans == 1


def test_a_queue_that_the_store_does_not_know_makes_the_janitor_refuse(store: MemoryStore, clock: ManualClock) -> None:
    put(store, "a")
    stranger = Book(to_release=[release(put(store, "b"))])
    with pytest.raises(ConfigError, match="eaglefeed store rebuild"):
        grown_old(store, stranger, clock)
    assert (len(keys(store)), len(stranger.to_release)) == (2, 1)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_queue_that_loses_its_data_while_it_is_asked_costs_nothing_even_if_it_is_rebuilt_at_once(
    store: MemoryStore, book: Book, clock: ManualClock, rebuilt: bool
) -> None:
    keep(book, put(store, "a"))

    def lose() -> None:
        book.refs.clear()
        book.name = "two"
        if rebuilt:
            book.on_kept = lambda: note_instance(store, book)

    book.on_leased = lose
    with pytest.raises(ConfigError, match="eaglefeed store rebuild"):
        grown_old(store, book, clock)
    assert len(keys(store)) == 1


def test_a_queue_is_introduced_only_while_no_shard_of_its_run_lies_there(store: MemoryStore) -> None:
    put(store, "a", run_id="other")
    store._shards["3f/cut.1.safetensors"] = (bytearray(b"cut"), 0.0)
    assert introduce(store, Book())
    put(store, "b")
    assert introduce(store, Book()), "it is known already"
    assert not introduce(store, Book(name="two"))


@pytest.mark.parametrize("data", [b"", b"cut", b"\xff" * 64])
def test_an_unreadable_shard_stays_and_is_named(
    store: MemoryStore, book: Book, clock: ManualClock, data: bytes
) -> None:
    store._shards["3f/a.1.safetensors"] = (bytearray(data), clock.time())
    found = grown_old(store, book, clock)
    assert (found.unreadable, found.unreadable_keys) == (1, ["3f/a.1.safetensors"])
    assert keys(store) == {"3f/a.1.safetensors"}


def test_at_most_20_unreadable_shards_are_named(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    for number in range(25):
        store._shards[f"3f/a.{number}.safetensors"] = (bytearray(b"cut"), clock.time())
    found = grown_old(store, book, clock)
    assert (found.unreadable, len(found.unreadable_keys)) == (25, 20)


def test_a_copy_under_another_name_does_not_take_the_shard_along_that_it_was_copied_from(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    ref = put(store, "a")
    keep(book, ref)
    store._shards["3f/b.9.safetensors"] = store._shards[key_of(ref)]
    found = grown_old(store, book, clock)
    assert (found.kept, found.unreadable, found.orphans) == (1, 1, 0)
    assert key_of(ref) in keys(store)


def test_a_shard_that_is_named_after_another_sample_stays(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    tensors = samples.tensors()
    ref = samples.ref(tensors, sample_id="a")
    store.put(replace(ref, feature_keys=dict.fromkeys(ref.feature_specs, shard_key("b", 7))), tensors)
    assert grown_old(store, book, clock).unreadable == 1, "the queue knows it as a, if it does"


def test_a_shard_that_cannot_be_deleted_is_counted_and_the_others_go(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        put(store, name)
    delete = store.delete

    def fail(ref: SampleRef) -> bool:
        if ref.sample_id == "b":
            raise StorageError("cannot be deleted", subject="b")
        return delete(ref)

    monkeypatch.setattr(store, "delete", fail)
    found = grown_old(store, book, clock)
    assert (found.orphans, found.failed) == (2, 1)
    monkeypatch.undo()
    assert collect(store, book, clock=clock).orphans == 1


def test_a_dry_run_counts_and_deletes_nothing(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    put(store, "a")
    book.to_release = [release(put(store, "b"))]
    keep(book, samples.ref(sample_id="b"))
    found = grown_old(store, book, clock, dry_run=True)
    assert (found.orphans, found.kept, len(keys(store)), len(book.to_release)) == (1, 1, 2, 1)


# released samples


def test_released_shards_go_and_a_janitor_killed_before_it_said_so_is_no_harm(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    refs = [put(store, f"a{number}") for number in range(450)]
    book.to_release = [release(ref) for ref in refs]
    store.delete(refs[0])  # by the one that was killed
    assert grown_old(store, book, clock).released == 450
    assert (book.to_release, keys(store)) == ([], set())


def test_a_run_that_retains_its_shards_keeps_the_released_ones(
    store: MemoryStore, book: Book, clock: ManualClock
) -> None:
    book.to_release, book.retained = [release(put(store, "a"))], True
    book.refs["a"] = {EVERY_KEY}
    found = grown_old(store, book, clock)
    assert (found.released, found.kept, len(keys(store))) == (1, 1, 1)


def test_a_released_shard_that_cannot_be_deleted_stays_on_the_list(
    store: MemoryStore, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.to_release = [release(put(store, "a")), QueueItem("b", b"no ref", 5)]

    def fail(ref: SampleRef) -> bool:
        raise StorageError("cannot be deleted", subject=ref.sample_id)

    monkeypatch.setattr(store, "delete", fail)
    assert delete_released(book, store) == 1
    assert [item.id for item in book.to_release] == ["a"], "what names no shard is dropped"


def test_the_parts_of_a_key() -> None:
    assert name_parts("3f/a.b-1.17.safetensors") == ("a.b-1", 17)
