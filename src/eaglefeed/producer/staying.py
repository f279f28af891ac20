"""How long producers live on for the sake of the samples that they keep."""

import secrets

from eaglefeed.clock import Clock
from eaglefeed.errors import StorageError
from eaglefeed.logs import get_logger
from eaglefeed.producer.ledger import register
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.storage.base import FeatureStore

__all__ = ["Keeper"]

_TELL_S = 60.0
_STOP_NOTE = "a second signal drops them: others make them again"

log = get_logger(__name__)


class Keeper:
    """Knows whether samples die with this process, and whether anybody needs it.

    Args:
        name: the producer's. It has another one after each start, where its death must not go unnoticed.
        store: where the producer puts samples.
        prompts: the queue it leases from.
        samples: the queue it hands them off to.
        run_id: the run.
        clock: measures how often it is told that the producer stays.
    """

    def __init__(
        self, name: str, store: FeatureStore, prompts: LeaseQueue, samples: LeaseQueue, run_id: str, clock: Clock
    ) -> None:
        self.name = f"{name}-{secrets.token_hex(4)}" if store.stays_with_producer else name
        self.holder = self.name if store.stays_with_producer else ""
        """Whom its prompts are held for, "" if they are not."""
        self._store, self._prompts, self._samples = store, prompts, samples
        self._run_id, self._clock = run_id, clock
        self._told_s: float | None = None
        self._stop_told = False
        self._waits_told_s: float | None = None
        self._useless_s: float | None = None

    def begin(self) -> None:
        """Before anything: an own store that is new would be taken for another queue's until the first sample comes."""
        if self._store.stays_with_producer:
            register(self._store, self._samples, self._run_id)

    def is_needed(self, *, stopping: bool = False) -> bool:
        """Whether some group has still to do a sample that a producer keeps: this one, or one that may die.

        Dead letters keep nobody alive. One that is stopping makes no samples again, and stays for its own alone.
        """
        if not self._store.stays_with_producer:
            return False
        count = self._prompts.held_for(self._samples, producer=self.name if stopping else "")
        now_s, is_news = self._clock.monotonic(), stopping and not self._stop_told
        if count and (is_news or self._told_s is None or now_s - self._told_s >= _TELL_S):
            told = {"note": _STOP_NOTE} if stopping else {}
            log.info("producer_stays_for_samples", count=count, queue=self._samples.name, **told)
            self._told_s, self._stop_told = now_s, stopping
        return count > 0

    def tell_wait(self) -> None:
        """There is no room: said once a wait and once a minute, with what fills the store if it is the store."""
        now_s = self._clock.monotonic()
        if self._waits_told_s is not None and now_s - self._waits_told_s < _TELL_S:
            return
        self._waits_told_s, full = now_s, {}
        if not self._store.wait_for_room(0):
            free, total = self._store.health()
            full = {"held_bytes": total - free, "bound_bytes": total}
        log.info("producer_waits_for_room", queue=self._samples.name, store=self._store.uri, **full)

    def end_wait(self) -> None:
        """There is room."""
        self._waits_told_s = None

    def check_room(self, patience_s: float) -> None:
        """Called when there was no room.

        Raises:
            StorageError: there was none for so long, and nobody has to do a sample that is kept: no commit frees any.
        """
        if self._store.wait_for_room(0) or self._prompts.held_for(self._samples, producer=self.name):
            self._useless_s = None
            return
        now_s = self._clock.monotonic()
        self._useless_s = now_s if self._useless_s is None else self._useless_s
        if now_s - self._useless_s > patience_s:
            what = "no room, and nobody has to do any sample that it keeps"
            fix = "see `eaglefeed queue dead ls`: tensors of dead letters, and of a queue that was purged, stay until "
            fix += "their producer ends; start it again"
            raise StorageError(what, subject=self._store.uri, fix=fix)
