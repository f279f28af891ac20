"""What happens ahead of the training loop: leasing refs, and materializing them into a bounded buffer."""

import queue
import threading
from typing import NamedTuple

from eaglefeed.consumer.holdings import Sample
from eaglefeed.consumer.leasing import Leaser, reason_of
from eaglefeed.consumer.materialize import Materializer
from eaglefeed.errors import BuffersHeld, ConfigError, EaglefeedError, PeerGone
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import DrainState, Lease, LeasedItem
from eaglefeed.storage.away import is_of_store

__all__ = ["End", "Prefetcher"]

_WAIT_S = 0.5

log = get_logger(__name__)


class End(NamedTuple):
    """Nothing more will come: the queue is drained, or this error stopped it."""

    error: EaglefeedError | None


class Prefetcher:
    """A thread that fills a bounded buffer with materialized samples. SampleStream explains the arguments."""

    def __init__(
        self, leaser: Leaser, materializer: Materializer, *, lease_batch: int, prefetch: int, stop: threading.Event
    ) -> None:
        self.commit_due = threading.Event()
        self._leaser, self._materializer, self._lease_batch, self._stop = leaser, materializer, lease_batch, stop
        self._ready: queue.Queue[Sample | End] = queue.Queue(maxsize=prefetch)
        self._thread = threading.Thread(target=self._run, name="eaglefeed-prefetch", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Sample | End | None:
        """The next sample, the end, or None after `timeout_s`."""
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def join(self, timeout_s: float) -> None:
        """Wait for the item in hand, once `stop` is set."""
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        end = End(None)
        try:
            while not self._stop.is_set() and self._lease_once():
                pass
        except EaglefeedError as error:
            end = End(error)
        except BaseException as error:
            log.exception("prefetch_failed")
            end = End(EaglefeedError("the stream's background thread failed, this is a bug", got=repr(error)))
            raise
        finally:
            self._offer(end)

    def _offer(self, entry: Sample | End) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(entry, timeout=_WAIT_S)
            except queue.Full:
                continue
            return

    def _lease_once(self) -> bool:
        lease = self._leaser.ask(self._lease_batch)
        if isinstance(lease, Lease):
            self.commit_due.clear()  # whosever commit it was
            for item in lease.items:
                if self._stop.is_set():
                    return False
                self._pass_on(lease.token, item)
            return True
        if lease is DrainState.COMMIT_DUE:
            self.commit_due.set()
            self._leaser.pause()
        return lease is not DrainState.DRAINED or not self._leaser.is_over()

    def _pass_on(self, token: int, item: LeasedItem) -> None:
        """Materialize an item for the loop; nothing here keeps it then."""
        try:
            ref, batch = self._materializer.materialize(item.payload)
        except (BuffersHeld, ConfigError):
            raise  # no fault of this sample's: the stream ends, and gives it back
        except PeerGone as error:
            self._leaser.give_back(token, item, error)
        except EaglefeedError as error:
            if not self._stop.is_set():  # else the wait for a buffer may have ended early: it is given back
                kind = {"retryable": error.retryable, "may_be_store": is_of_store(error)}
                self._leaser.refuse(token, item, reason=reason_of(error), **kind)
        else:
            self._leaser.answered(ref.store_uri)
            self._offer(Sample(token, ref, batch, item.delivery_count))
