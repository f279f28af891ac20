"""Deleting the shards of released samples beside the training loop: no step waits for a store."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from eaglefeed.logs import get_logger

__all__ = ["Cleaner"]

_QUIET_S = 5.0

log = get_logger(__name__)


class Cleaner:
    """A thread that deletes what there is to delete, each time somebody asks.

    What it cannot delete stays on the queue's list of released samples, for the next time, this run's or a janitor's.

    Args:
        delete: deletes all that is released now.
    """

    def __init__(self, delete: Callable[[], object]) -> None:
        self._delete = delete
        self._requests = SimpleQueue[bool]()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def ask(self) -> None:
        """Something was released; after the end, it is deleted here and now."""
        if self._is_closed:
            self._try()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="eaglefeed-cleaner", daemon=True)
            self._thread.start()
        if self._requests.empty():  # one that waits is for this too
            self._requests.put(True)

    def close(self, timeout_s: float) -> None:
        """Wait until what was asked for is done, for `timeout_s` at most. Safe to repeat."""
        self._is_closed = True
        if self._thread is None:
            return
        self._requests.put(False)
        self._thread.join(min(timeout_s, _QUIET_S))
        if self._thread.is_alive() and timeout_s > _QUIET_S:
            log.info("released_shards_are_deleted", wait_s=timeout_s)
            self._thread.join(timeout_s - _QUIET_S)
        if self._thread.is_alive():
            log.warning("released_shards_stay", reason=f"not deleted within {timeout_s:g} s", fix="eaglefeed store gc")

    def _run(self) -> None:
        while self._requests.get():
            self._try()

    def _try(self) -> None:
        try:
            self._delete()
        except Exception as error:  # noqa: BLE001  whatever it is, the next request is served
            log.warning("released_shards_stay", reason=f"{type(error).__name__}: {error}")
