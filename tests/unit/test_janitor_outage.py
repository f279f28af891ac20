"""A store that is away or slow holds neither a janitor nor the producer that it works beside."""

from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing

from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError, StorageError
from eaglefeed.storage.janitor import Janitor, collect, delete_released
from eaglefeed.storage.memory import MemoryStore
from eaglefeed.storage.orphans import introduce, note_instance
from ledger_book import Book, keys, put, release

NUM = 10


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


def slow(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore, clock: ManualClock, name: str, took_s: float
) -> list[Any]:
    """Make a call of the store take this long; returns what it was called with."""
    return wrap(monkeypatch, store, name, lambda: clock.advance(took_s))


def away(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore, clock: ManualClock, name: str, took_s: float
) -> list[Any]:
    """Make a call of the store fail after this long."""

    def fail() -> None:
        clock.advance(took_s)
        raise StorageError("no answer", subject="store")

    return wrap(monkeypatch, store, name, fail)


def wrap(monkeypatch: pytest.MonkeyPatch, store: MemoryStore, name: str, before: Callable[[], None]) -> list[Any]:
    plain, asked = getattr(store, name), list[Any]()

    def call(what: Any) -> Any:
        asked.append(what)
        before()
        return plain(what)

    monkeypatch.setattr(store, name, call)
    return asked


def fill(store: MemoryStore, book: Book, clock: ManualClock, *, run_id: str = "run", released: bool = False) -> None:
    refs = [put(store, f"a{number}", run_id=run_id) for number in range(NUM)]
    book.to_release = [release(ref) for ref in refs] if released else []
    clock.advance(601)


def started(store: MemoryStore, book: Book, clock: ManualClock) -> Janitor:
    janitor = Janitor(store, book, interval_s=600, clock=clock, jitter=lambda: 0.5)
    clock.advance(600)
    return janitor


def test_released_shards_of_a_store_that_is_away_are_left_after_three_and_told_once(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, book, clock, released=True)
    asked = away(monkeypatch, store, clock, "delete", 240)
    with structlog.testing.capture_logs() as logs:
        assert delete_released(book, store, clock=clock) == 0
    assert (len(asked), len(book.to_release)) == (3, NUM)
    assert [(entry["event"], entry["count"]) for entry in logs] == [("released_shards_stay", NUM)]


def test_shards_that_fail_at_once_keep_nobody_from_the_others(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, book, clock, released=True)
    away(monkeypatch, store, clock, "delete", 0.001)
    asked = store.delete
    monkeypatch.setattr(store, "delete", lambda ref: ref.sample_id > "a4" or asked(ref))
    assert delete_released(book, store, clock=clock) == NUM - 5
    assert len(book.to_release) == 5


@pytest.mark.parametrize("call", ["read_ref", "delete"])
def test_a_store_that_goes_away_ends_a_pass_after_three_calls(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fill(store, book, clock)
    with monkeypatch.context() as patch:
        asked = away(patch, store, clock, call, 240)
        with pytest.raises(StorageError, match="no answer"):
            collect(store, book, clock=clock)
    assert len(asked) == 3
    assert collect(store, book, clock=clock).orphans == NUM


@pytest.mark.parametrize("run_id", ["run", "other"])
def test_a_slow_store_gets_some_seconds_at_a_time_beside_a_producer(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    fill(store, book, clock, run_id=run_id)
    janitor = started(store, book, clock)
    asked = slow(monkeypatch, store, clock, "read_ref", 2)
    janitor.maybe_run()
    assert len(asked) == 3, "6 s"
    with structlog.testing.capture_logs() as logs:
        while not logs:
            before_s = clock.monotonic()
            janitor.maybe_run()
            assert clock.monotonic() - before_s <= 6
    assert len(asked) == NUM
    assert (logs[0]["orphans"], logs[0]["foreign"]) == ((NUM, 0) if run_id == "run" else (0, NUM))


def test_slow_deletes_of_released_shards_are_spread_over_rounds_too(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, book, clock, released=True)
    janitor = started(store, book, clock)
    asked = slow(monkeypatch, store, clock, "delete", 2)
    for wanted in (3, 6, 9, 10):
        janitor.maybe_run()
        assert (len(asked), len(book.to_release)) == (wanted, NUM - wanted)


@pytest.mark.parametrize("released", [False, True])
def test_a_queue_that_is_lost_and_rebuilt_between_two_steps_loses_no_more_shards(
    store: MemoryStore, book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    fill(store, book, clock, released=released)
    janitor = started(store, book, clock)
    slow(monkeypatch, store, clock, "delete", 10)
    janitor.maybe_run()
    assert len(keys(store)) == NUM - 1
    book.name = "two"
    note_instance(store, book)
    with structlog.testing.capture_logs() as logs:
        janitor.maybe_run()
    assert [entry["event"] for entry in logs] == ["store_not_collected"]
    assert len(keys(store)) == NUM - 1


def test_a_note_that_is_missing_or_damaged_is_nobodys(store: MemoryStore, book: Book, clock: ManualClock) -> None:
    (name,) = store._documents
    put(store, "a")
    for data in (None, b"", b"[]"):
        store.delete_document(name)
        if data is not None:
            store.put_document(name, data)
        assert not introduce(store, book)
        with pytest.raises(ConfigError):
            collect(store, book, clock=clock)
    note_instance(store, book)
    assert collect(store, book, clock=clock).young == 1
