"""Writing a sample while the target works on the next one."""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence

from eaglefeed.errors import IdConflict, SchemaError, StaleLease, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.producer.making import Made
from eaglefeed.queue.base import LeasedItem, LeaseQueue, QueueItem
from eaglefeed.schema.refs import SampleRef, encode_ref
from eaglefeed.storage.base import FeatureStore

__all__ = ["SampleWriter", "Writing"]

log = get_logger(__name__)


class Writing:
    """A sample that the writer has, and what became of it.

    No Future: that keeps its error, whose traceback leads to whoever asked for it and to the sample made meanwhile.

    Args:
        token: of the prompt's lease.
        item: the prompt.
        num_bytes: of the sample, as its ref estimates them.
    """

    def __init__(self, token: int, item: LeasedItem, num_bytes: int) -> None:
        self.token, self.item, self.num_bytes = token, item, num_bytes
        self._outcome: list[SampleRef | BaseException] = []
        self._ended = threading.Event()

    def end(self, outcome: SampleRef | BaseException) -> None:
        """It was handed off as this ref, or this went wrong."""
        self._outcome.append(outcome)
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def result(self) -> SampleRef:
        """The stored ref of a sample that ended, or its error raised; to be asked for once."""
        outcome = self._outcome.pop()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome


class SampleWriter:
    """A thread that stores samples and hands them off, in order, each only when it is whole in the store.

    The thread is a daemon, which an executor's is not: a store that hangs must not keep the process from ending.

    Args:
        prompts: the queue whose leases cover the samples.
        samples: where they are handed off to.
        store: where shards go.
        settle: called with a lease's token and an item's id right before its hand-off.
        holder: the producer that the samples' tensors stay with, if they do.
    """

    def __init__(
        self,
        prompts: LeaseQueue,
        samples: LeaseQueue,
        store: FeatureStore,
        settle: Callable[[int, Sequence[str]], None],
        holder: str = "",
    ) -> None:
        self._prompts, self._samples, self._store, self._settle = prompts, samples, store, settle
        self._holder = holder
        self._jobs: queue.SimpleQueue[tuple[Writing, Made] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="eaglefeed-writer", daemon=True)
        self._thread.start()

    def write(self, token: int, item: LeasedItem, made: Made) -> Writing:
        """Start on a sample; wait for its end before the next one, which bounds what waits here to one."""
        writing = Writing(token, item, made.ref.estimated_bytes)
        self._jobs.put((writing, made))
        return writing

    def close(self, timeout_s: float) -> None:
        """End the thread, unless it is still in the store or the queue after `timeout_s`: then it ends after that."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while job := self._jobs.get():
            writing, made = job
            del job
            outcome = self._outcome(writing, made)
            del made  # before the target is told to go on: two samples at a time, never three
            writing.end(outcome)
            del writing, outcome

    def _outcome(self, writing: Writing, made: Made) -> SampleRef | BaseException:
        try:
            return self._write(writing, made)
        except BaseException as error:  # noqa: BLE001  whoever waits for the sample raises it
            del made
            traceback.clear_frames(error.__traceback__)  # their variables keep the sample too
            return error

    def _write(self, writing: Writing, made: Made) -> SampleRef:
        ref = self._store.put(made.ref, made.tensors)
        try:
            item = QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)
            self._settle(writing.token, [writing.item.id])
            self._prompts.handoff(writing.token, writing.item.id, item, self._samples, holder=self._holder)
        except (IdConflict, SchemaError, StaleLease):
            self._take_back(ref)
            raise
        return ref

    def _take_back(self, ref: SampleRef) -> None:
        """Nobody will ever read this shard: its name holds the token of a lease that made nothing of it."""
        try:
            self._store.delete(ref)
        except StorageError as error:
            log.warning("shard_left_to_the_janitor", sample_id=ref.sample_id, reason=str(error))
