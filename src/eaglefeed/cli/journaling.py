"""What a worker of a run writes into the run's journal, beside its work and never in its way."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from eaglefeed.cli.common import RunQueues
from eaglefeed.errors import EaglefeedError
from eaglefeed.logs import get_logger
from eaglefeed.ops.facts import read_stats
from eaglefeed.ops.series import series_point
from eaglefeed.queue.journal import RunJournal

__all__ = ["add_fact", "journaled"]

_EVERY_S, _END_S = 10.0, 2.0

log = get_logger(__name__)

Snapshot = Callable[[], Mapping[str, Any]]


@contextmanager
def journaled(
    queues: RunQueues | None, role: str, name: str, snapshot: Snapshot, *, goes_on: bool = False
) -> Iterator[None]:
    """Meanwhile post what the worker tells of itself, and make the run's points: every 10 s, and at the end.

    An outage of the queue is told once and raises nothing. The end waits for at most 2 s.

    Args:
        queues: of the run; None where there are none, and so no journal.
        role: producer or trainer.
        name: the worker's, unique in the run.
        snapshot: makes plain values by name; called on another thread. "started_s", unix s of the server, is added.
        goes_on: what comes next tells of itself: its end is not told, unless it is an error.
    """
    if queues is None:
        yield
        return
    writer = _Writer(queues, role, name, snapshot)
    writer.start()
    state = "" if goes_on else "ended"
    try:
        yield
    except BaseException as error:
        state = f"ended by {type(error).__name__}"
        raise
    finally:
        writer.end(state)


def add_fact(queues: RunQueues, kind: str, value: Mapping[str, Any], totals: Mapping[str, int] | None = None) -> None:
    """Append a fact to the run's journal; what keeps it from that is told, and raises nothing."""
    try:
        RunJournal(queues.client.impatient(), queues.run).append(kind, value, totals)
    except Exception as error:  # noqa: BLE001  whatever it is, what it tells of is done
        _tell(error)


def _tell(error: Exception) -> None:
    log.warning("journal_not_written", reason=EaglefeedError.text_of(error)[:300])


class _Writer:
    """The thread, over connections of its own that repeat no call."""

    def __init__(self, queues: RunQueues, role: str, name: str, snapshot: Snapshot) -> None:
        self._queues = replace(queues, client=queues.client.impatient())
        self._journal = RunJournal(self._queues.client, queues.run)
        self._role, self._name, self._snapshot = role, name, snapshot
        self._stop, self._state, self._is_told = threading.Event(), "", False
        self._started_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="eaglefeed-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, state: str) -> None:
        self._state = state
        self._stop.set()
        self._thread.join(_END_S)

    def _work(self) -> None:
        self._write()
        while not self._stop.wait(_EVERY_S):
            self._write()
        if self._state:
            self._write()

    def _write(self) -> None:
        try:
            if self._started_s is None:
                self._started_s = self._now_s()
            told = {**self._snapshot(), "started_s": self._started_s, **self._ending()}
            self._journal.post(self._role, self._name, told)
            self._journal.sample(self._point)
        except Exception as error:  # noqa: BLE001  whatever it is, the work itself goes on
            if not self._is_told:
                _tell(error)
            self._is_told = True
        else:
            self._is_told = False

    def _ending(self) -> dict[str, str]:
        return {"state": self._state} if self._state else {}

    def _point(self) -> dict[str, float]:
        workers = self._journal.read(last_points=0).workers
        return series_point(read_stats(self._queues), workers, now_s=self._now_s())

    def _now_s(self) -> float:
        """By the clock that all of the journal is told by; this machine's may be another."""
        seconds, micros = self._queues.client.call("TIME")
        return int(seconds) + int(micros) / 1e6
