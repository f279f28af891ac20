"""What a process answers a scrape: its own accounts, and what the queue says of the whole run."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError
from eaglefeed.metrics import Reading, build_reading, families

__all__ = ["BoundedLook", "Shown"]

T = TypeVar("T")

_KEEP_S, _WAIT_S = 1.0, 2.0


class BoundedLook(Generic[T]):
    """Looks at what may be away, in a thread of its own: at most once at a time, and its result is kept for a while.

    Args:
        look: may raise EaglefeedError, and take as long as it likes.
        keep_s: a result that is younger is given again.
        wait_s: for how long `get` waits.
        clock: measures the age.
    """

    def __init__(
        self, look: Callable[[], T], *, keep_s: float = _KEEP_S, wait_s: float = _WAIT_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._look, self._keep_s, self._wait_s, self._clock = look, keep_s, wait_s, clock
        self._lock = threading.Lock()
        self._future: Future[T] | None = None
        self._ended_s = 0.0

    def get(self) -> T | None:
        """What it found; None where it found nothing in time."""
        with self._lock:
            if self._future is None or self._is_old(self._future):
                future = Future[T]()
                threading.Thread(target=self._run, args=(future,), name="metrics-look", daemon=True).start()
                self._future = future
            future = self._future
        try:
            return future.result(self._wait_s)
        except (TimeoutError, EaglefeedError):
            return None

    def _is_old(self, future: "Future[T]") -> bool:
        return future.done() and self._clock.monotonic() - self._ended_s > self._keep_s

    def _run(self, future: "Future[T]") -> None:
        try:
            found = self._look()
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            self._ended_s = self._clock.monotonic()
            future.set_exception(error)
        else:
            self._ended_s = self._clock.monotonic()
            future.set_result(found)


class Shown(Collector):
    """What a process shows: who it is at first, and what it is given as it comes to have it.

    Args:
        role: producer or trainer.
        run: the run's id.
    """

    def __init__(self, role: str, run: str) -> None:
        self._role, self._run = role, run
        self._own: list[Callable[[], Iterable[Reading]]] = []
        self._families: list[Callable[[], Iterable[Family]]] = []
        self._look: BoundedLook[list[Reading]] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, readings: Callable[[], Iterable[Reading]]) -> None:
        """Show these too, read at each scrape: nothing is counted twice, and nothing in the work's own way."""
        self._own.append(readings)

    def add_families(self, collected: Callable[[], Iterable[Family]]) -> None:
        """Likewise, for what the client library keeps itself."""
        self._families.append(collected)

    @contextmanager
    def of_run(self, look: Callable[[], list[Reading]]) -> Iterator[None]:
        """Meanwhile also show what the queue says of the run, as long as it answers in time."""
        self._look = BoundedLook(look)
        try:
            yield
        finally:
            self._look = None

    def text(self) -> bytes:
        """All of it, in Prometheus' text form."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Prometheus' own interface."""
        yield from families([build_reading(self._role)])
        look = self._look
        if look is not None:
            found = look.get()
            yield from families([Reading("eaglefeed_queue_up", float(found is not None), (self._run,)), *(found or ())])
        for readings in self._own:
            yield from families(readings())
        for collected in self._families:
            yield from collected()
