"""A janitor beside other work: when it looks, how much it does at a time, and what it makes of a store that fails."""

from collections.abc import Iterator

import pytest
import structlog.testing

from eaglefeed.clock import ManualClock
from eaglefeed.errors import StorageError
from eaglefeed.storage.base import StoredShard
from eaglefeed.storage.janitor import Collected, Janitor, collect
from eaglefeed.storage.memory import MemoryStore
from eaglefeed.storage.orphans import introduce
from ledger_book import Book, keep, keys, put


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


def janitor(store: MemoryStore, book: Book, clock: ManualClock) -> Janitor:
    return Janitor(store, book, interval_s=600, clock=clock, jitter=lambda: 0.5)


def pages(store: MemoryStore, num_shards: int) -> Iterator[StoredShard]:
    return iter([StoredShard(f"3f/a{number}.1.safetensors", 1, 0.0) for number in range(num_shards)])


def test_nothing_is_asked_before_the_interval_is_over(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    put(store, "a")
    periodic = janitor(store, book, clock)
    clock.advance(599)
    periodic.maybe_run()
    assert book.asked == []
    clock.advance(1)
    periodic.maybe_run()
    assert (book.asked, keys(store)) == (["leased", "kept"], set())
    periodic.maybe_run()
    clock.advance(599)
    put(store, "b")
    periodic.maybe_run()
    assert book.asked == ["leased", "kept"], "and again only after another interval"


def test_a_call_looks_at_a_bounded_number_of_shards(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "scan", lambda: pages(store, 2500))
    sizes: list[int] = []
    monkeypatch.setattr(book, "leased", lambda tokens: set())
    monkeypatch.setattr(book, "kept", lambda ids: sizes.append(len(ids)) or {})
    periodic = janitor(store, book, clock)
    clock.advance(600)
    for calls in (1, 2, 3):
        periodic.maybe_run()
        assert len(sizes) == calls
    periodic.maybe_run()
    assert sizes == [1000, 1000, 500]


def test_a_store_of_another_queue_is_told_once_and_left_alone(store: MemoryStore, clock: ManualClock) -> None:
    put(store, "a")
    periodic = janitor(store, Book(), clock)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            clock.advance(600)
            periodic.maybe_run()
    assert [entry["event"] for entry in logs] == ["store_not_collected"]
    assert len(keys(store)) == 1


def test_a_store_that_fails_in_the_middle_is_told_and_tried_again(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a")

    def scan() -> Iterator[StoredShard]:
        raise StorageError("cannot be read", subject="store")
        yield

    periodic = janitor(store, book, clock)
    clock.advance(600)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(store, "scan", scan)
        periodic.maybe_run()
        periodic.maybe_run()
    assert [entry["event"] for entry in logs] == ["store_not_collected"]
    clock.advance(600)
    periodic.maybe_run()
    assert keys(store) == set()


def test_two_janitors_at_once_delete_each_orphan_once(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    for number in range(5):
        put(store, f"a{number}")
    keep(book, put(store, "kept"))
    others: list[Collected] = []

    def overtake() -> None:
        book.on_kept = lambda: None
        others.append(collect(store, book, clock=clock))

    book.on_kept = overtake
    clock.advance(61)
    found = collect(store, book, clock=clock)
    assert (found.orphans + others[0].orphans, found.kept, others[0].kept) == (5, 1, 1)
    assert len(keys(store)) == 1
