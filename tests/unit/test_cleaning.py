"""Deleting beside the training loop: nobody waits but who closes, and nothing that was asked for is forgotten."""

import threading

import pytest
import structlog

from eaglefeed.consumer.cleaning import Cleaner
from eaglefeed.errors import StorageError

DEADLINE_S = 30.0


def test_nobody_waits_for_a_deletion_but_the_end() -> None:
    may_go, threads = threading.Event(), []

    def delete() -> None:
        assert may_go.wait(DEADLINE_S)
        threads.append(threading.current_thread())

    cleaner = Cleaner(delete)
    cleaner.ask()
    assert threads == []
    may_go.set()
    cleaner.close(DEADLINE_S)
    assert threads[0] is not threading.current_thread()
    cleaner.close(DEADLINE_S)


def test_what_is_released_during_a_deletion_is_deleted_after_it() -> None:
    begun, may_go, released, deleted = threading.Event(), threading.Event(), ["a"], []

    def delete() -> None:
        page = list(released)
        begun.set()
        assert may_go.wait(DEADLINE_S)
        deleted.append(page)

    cleaner = Cleaner(delete)
    cleaner.ask()
    assert begun.wait(DEADLINE_S)
    for name in "bcd":
        released.append(name)
        cleaner.ask()
    may_go.set()
    cleaner.close(DEADLINE_S)
    assert deleted == [["a"], ["a", "b", "c", "d"]]


@pytest.mark.parametrize("error", [StorageError("read-only file system", subject="p-1"), RuntimeError("read-only")])
def test_a_failure_is_told_and_the_next_request_is_served(error: Exception) -> None:
    failed, calls = threading.Event(), []

    def delete() -> None:
        calls.append(1)
        if len(calls) == 1:
            failed.set()
            raise error

    cleaner = Cleaner(delete)
    with structlog.testing.capture_logs() as logs:
        cleaner.ask()
        assert failed.wait(DEADLINE_S)
        cleaner.ask()
        cleaner.close(DEADLINE_S)
    assert len(calls) == 2
    assert [line["event"] for line in logs] == ["released_shards_stay"]
    assert "read-only" in logs[0]["reason"]


def test_an_end_does_not_wait_for_ever_and_the_thread_ends_when_it_can() -> None:
    begun, may_go, waits = threading.Event(), threading.Event(), []

    def delete() -> None:
        begun.set()
        may_go.wait(DEADLINE_S)

    cleaner = Cleaner(delete)
    cleaner.ask()
    assert begun.wait(DEADLINE_S)
    cleaner.ask()  # one more that waits
    assert cleaner._thread is not None
    join = cleaner._thread.join
    cleaner._thread.join = lambda timeout: waits.append(timeout)  # type: ignore[method-assign, assignment]
    with structlog.testing.capture_logs() as logs:
        cleaner.close(60)
    assert sum(waits) == 60
    assert [line["event"] for line in logs] == ["released_shards_are_deleted", "released_shards_stay"]
    assert "eaglefeed store gc" in logs[1]["fix"]
    may_go.set()
    join(DEADLINE_S)
    assert not cleaner._thread.is_alive()


def test_what_is_committed_after_the_end_is_deleted_too() -> None:
    threads: list[threading.Thread] = []
    cleaner = Cleaner(lambda: threads.append(threading.current_thread()))
    cleaner.ask()
    cleaner.close(DEADLINE_S)
    cleaner.ask()
    assert (len(threads), threads[1]) == (2, threading.current_thread())


def test_one_that_was_never_asked_has_no_thread() -> None:
    before = threading.active_count()
    Cleaner(pytest.fail).close(DEADLINE_S)
    assert threading.active_count() == before
