"""Threads that carry out tasks in their order."""

import queue
import threading
import weakref
from collections.abc import Callable

from eaglefeed.clock import SYSTEM_CLOCK

__all__ = ["Workers"]

_Tasks = queue.SimpleQueue[Callable[[], None] | None]


class Workers:
    """At most `num_threads` threads, one started with each of the first tasks; dropping the object ends them.

    Not those of concurrent.futures: a process that ends by an error would wait there for every task that is left.
    """

    def __init__(self, num_threads: int) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_threads, self._lock = num_threads, threading.Lock()
        self._end = weakref.finalize(self, _end, self._tasks, num_threads)
        self._end.atexit = False

    def submit(self, task: Callable[[], None]) -> None:
        """Have a task carried out, which raises nothing."""
        self._tasks.put(task)
        with self._lock:
            if len(self._threads) < self._num_threads:
                name = f"eaglefeed-remote-{len(self._threads) + 1}"
                self._threads.append(threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True))
                self._threads[-1].start()

    def close(self, timeout_s: float) -> bool:
        """End the threads after the tasks so far, and wait for that; whether it came in time."""
        self._end()
        deadline_s = SYSTEM_CLOCK.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - SYSTEM_CLOCK.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or an idle thread would keep what its last task held


def _end(tasks: _Tasks, num_threads: int) -> None:
    for _ in range(num_threads):
        tasks.put(None)
