"""A store that is out of reach costs no prompt an attempt, and a producer that ends with an error keeps no prompt."""

import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from eaglefeed.errors import ConfigError, EaglefeedError, QueueUnavailable, StorageError
from eaglefeed.producer import worker as worker_module
from eaglefeed.queue.base import Lease
from eaglefeed.schema.contract import ASSETS_FILE, CONTRACT_FILE
from watched import Watched


@pytest.fixture
def run() -> Watched:
    return Watched()


def _away_for(num_puts: float) -> Callable[[str], None]:
    left = [num_puts]

    def fail(sample_id: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise StorageError("connection refused", subject=sample_id)

    return fail


def _left(run: Watched) -> tuple[int, int, int, int]:
    stats = run.prompts.stats()
    return stats.ready + stats.delayed, stats.leased, stats.dead, len(stats.workers)


def test_an_outage_of_many_puts_makes_no_dead_letter_and_is_logged_once(run: Watched) -> None:
    run.store.during = _away_for(20)
    with capture_logs() as logs:
        stats = run.produce()
    assert (stats.produced, stats.retried, stats.dead) == (4, 2, 0)
    assert stats.paused_s == 18 * 5  # from the third on
    assert [entry["event"] for entry in logs if entry["event"] in ("store_away", "store_back")] == [
        "store_away",
        "store_back",
    ]


def test_what_an_outage_gives_back_is_not_counted(run: Watched) -> None:
    run.store.during = _away_for(1e9)
    with pytest.raises(StorageError):
        run.produce()
    run.clock.advance(3600)
    lease = run.prompts.lease(9, visibility_timeout_s=60, consumer="next")
    assert isinstance(lease, Lease)
    assert {item.id: item.delivery_count for item in lease.items} == {"p-0": 2, "p-1": 2, "p-2": 1, "p-3": 1}


def test_a_store_that_stays_away_ends_the_run_and_its_prompts_stay(run: Watched) -> None:
    run.store.during = _away_for(1e9)
    began_s = run.clock.monotonic()
    with pytest.raises(StorageError, match="connection refused"):
        run.produce(outage_s=60)
    assert 60 < run.clock.monotonic() - began_s <= 70
    assert _left(run) == (4, 0, 0, 0)


def test_one_prompt_that_always_fails_is_no_outage(run: Watched) -> None:
    def fail(sample_id: str) -> None:
        if sample_id == "p-0":
            raise StorageError("EIO", subject=sample_id)

    run.store.during = fail
    stats = run.produce()
    assert (stats.produced, stats.dead, stats.paused_s) == (3, 1, 0)


def test_a_success_between_errors_begins_the_count_anew(run: Watched) -> None:
    failing = ["p-0", "p-1", "p-3"]

    def fail(sample_id: str) -> None:
        if sample_id in failing:
            failing.remove(sample_id)
            raise StorageError("EIO", subject=sample_id)

    run.store.during = fail
    stats = run.produce()
    assert (stats.produced, stats.retried, stats.paused_s) == (4, 3, 0)


@pytest.mark.parametrize("call", ["put_document", "get_document", "has_document", "put_assets"])
def test_files_of_the_run_that_cannot_be_reached_cost_no_prompt_an_attempt(
    run: Watched, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    plain, left = getattr(run.store, call), [12]

    def fail(name: str, *rest: object) -> object:
        if left[0] and name in (CONTRACT_FILE, ASSETS_FILE):
            left[0] -= 1
            raise StorageError("connection refused", subject=name)
        return plain(name, *rest)

    monkeypatch.setattr(run.store, call, fail)
    stats = run.produce()
    waits = 11 if call == "get_document" else 12  # a look before anything is leased is not repeated
    assert (stats.produced, stats.retried, stats.dead, stats.paused_s) == (4, 0, 0, 5 * waits)


def test_a_stop_during_an_outage_ends_the_run_without_an_error(run: Watched) -> None:
    stop, fail = threading.Event(), _away_for(1e9)

    def during(sample_id: str) -> None:
        if sample_id == "p-2":
            stop.set()
        fail(sample_id)

    run.store.during = during
    stats = run.worker().run(stop)
    assert (stats.produced, stats.retried, stats.returned) == (0, 2, 2)
    assert _left(run) == (4, 0, 0, 0)


# ends with an error


@pytest.mark.parametrize(
    "error", [ConfigError("no such bucket"), EaglefeedError("any"), KeyboardInterrupt(), ZeroDivisionError()], ids=repr
)
def test_a_producer_that_ends_with_an_error_gives_everything_back_and_says_farewell(
    run: Watched, error: BaseException
) -> None:
    def fail(_sample_id: str) -> None:
        raise error

    run.store.during = fail
    with pytest.raises(type(error)) as caught:
        run.produce()
    assert caught.value is error
    assert _left(run) == (4, 0, 0, 0)


def test_a_sample_in_hand_is_handed_off_before_the_rest_is_given_back(run: Watched) -> None:
    def interrupt(ids: object) -> None:
        run.diary.wait_for("put p-0")
        raise KeyboardInterrupt

    def write_slowly(_sample_id: str) -> None:
        run.target.before = interrupt
        threading.Event().wait(0.2)  # the interrupt comes in this time

    run.store.during = write_slowly
    run.target.before = lambda _ids: setattr(run.target, "before", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.produce()
    assert [item.id for item in run.samples.payloads()] == ["p-0"]
    assert _left(run) == (3, 0, 0, 0)


def test_a_queue_that_is_away_too_does_not_hide_the_error(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_LAST_WRITE_S", 0.1)

    def gone(*_: object, **__: object) -> None:
        raise QueueUnavailable("server", "away")

    def fail(_sample_id: str) -> None:
        monkeypatch.setattr(run.prompts, "nack", gone)
        monkeypatch.setattr(run.prompts, "farewell", gone)
        raise ConfigError("no such bucket")

    run.store.during = fail
    with pytest.raises(ConfigError, match="no such bucket"):
        run.produce()
