"""What `eaglefeed train` is on a run: its store, its queues, and a SampleStream over them."""

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from eaglefeed.cli.common import RunQueues, open_queues, opened_store, stop_on_signals, worker_name
from eaglefeed.cli.peers import RefWatch, trainer_options
from eaglefeed.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eaglefeed.consumer.run import BatchSource, RunAssets
    from eaglefeed.consumer.stream import SampleStream
    from eaglefeed.consumer.trainer import DraftTrainer
    from eaglefeed.queue.base import LeaseQueue
    from eaglefeed.storage.base import FeatureStore

__all__ = ["RunSource", "run_source"]

_LEASE_BATCH = 4


@contextmanager
def run_source(settings: Settings, stop: threading.Event) -> "Iterator[RunSource | None]":
    """The run's samples; None when `stop` is set before there are any.

    Raises:
        TargetUnavailable: no producer came in train.start_timeout_s.
        ContractMismatch: the store is another run's than the queue.
        ConfigError: the queue's samples lie in another kind of store.
    """
    from eaglefeed.consumer.run import check_record, wait_for_run

    def samples() -> "LeaseQueue":
        group = queues.named("samples").groups()[0]  # ours may not be declared yet
        return queues.named("samples", group)

    with (
        opened_store(settings, peer=trainer_options(settings, lambda: samples().payloads())) as store,
        open_queues(settings, group=settings.train.group) as queues,
    ):
        with stop_on_signals(stop.set):
            look = RefWatch(store, samples).look
            assets = wait_for_run(store, timeout_s=settings.train.start_timeout_s, stop=stop, look=look)
        if assets is None:
            yield None
            return
        check_record(queues.samples, assets.contract)
        yield RunSource(settings, queues, store, assets)


class RunSource:
    """A TrainSource on a run's samples."""

    idle_s: float | None = 5.0

    def __init__(self, settings: Settings, queues: RunQueues, store: "FeatureStore", assets: "RunAssets") -> None:
        self.assets, self._settings, self._queues, self._store = assets, settings, queues, store

    @contextmanager
    def stream(self, trainer: "DraftTrainer") -> "Iterator[SampleStream]":
        """A SampleStream in the session of the newest checkpoint."""
        from eaglefeed.consumer.resume import resume
        from eaglefeed.consumer.room import check_room

        train = self._settings.train
        check_room(
            self._queues.samples,
            consumer=worker_name(),
            lease_batch=_LEASE_BATCH,
            prefetch=train.prefetch,
            samples_per_step=train.samples_per_step,
        )
        output, contract = self._settings.train_output, self.assets.contract.id
        session = resume(output, trainer, self._queues.samples, contract=contract)
        with self._opened(trainer, session) as stream:
            yield stream

    def drained(self, stream: "BatchSource") -> bool:  # noqa: ARG002  others may still hold samples of its queue
        """Whether the queue is drained."""
        return self._queues.samples.stats().drained

    def report(self) -> tuple[dict[str, Any], list[str]]:
        """Nothing more than the stream's own counts."""
        return {}, []

    def _opened(self, trainer: "DraftTrainer", session: int) -> "SampleStream":
        from eaglefeed.consumer.stream import SampleStream

        settings, queue, train = self._settings, self._settings.queue, self._settings.train
        return SampleStream(
            self._queues.samples,
            self._store,
            consumer=worker_name(),
            session=session,
            contract=self.assets.contract,
            prompts=self._queues.prompts,
            visibility_timeout_s=queue.visibility_timeout_s,
            stall_timeout_s=queue.stall_timeout_s,
            max_lease_age_s=queue.max_lease_age_s,
            lease_batch=_LEASE_BATCH,
            prefetch=train.prefetch,
            held=2 * train.samples_per_step,
            max_attempts=queue.max_deliveries,
            values=settings.store.values,
            fail_without_producers=train.no_producers == "fail",
            producer_grace_s=train.producer_grace_s,
            device=train.device,
            head=self.assets.head(trainer.draft.t2d, device=train.device),
        )
