"""Deleting the shards of released samples beside the training loop: no step waits for a store."""

import contextlib
import threading
from collections.abc import Callable
from queue import Full, Queue

from eaglefeed.errors import EaglefeedError
from eaglefeed.logs import get_logger

__all__ = ["Cleaner"]

log = get_logger(__name__)


class Cleaner:
    """A thread that deletes what there is to delete, each time somebody asks.

    What it cannot delete stays on the queue's list of released samples, for the next time, this run's or a janitor's.

    Args:
        delete: deletes all that is released now.
    """

    def __init__(self, delete: Callable[[], object]) -> None:
        self._delete = delete
        self._requests: Queue[bool] = Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Something was released."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="eaglefeed-cleaner", daemon=True)
            self._thread.start()
        with contextlib.suppress(Full):  # one that waits is for this too
            self._requests.put_nowait(True)

    def close(self, timeout_s: float) -> None:
        """Wait until what was asked for is done, for about `timeout_s` at most. Safe to repeat."""
        if self._thread is None or not self._thread.is_alive():
            return
        with contextlib.suppress(Full):
            self._requests.put(False, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("released_shards_stay", reason=f"not deleted within {timeout_s:g} s", fix="eaglefeed store gc")

    def _run(self) -> None:
        while self._requests.get():
            try:
                self._delete()
            except EaglefeedError as error:
                log.warning("released_shards_stay", reason=str(error))
