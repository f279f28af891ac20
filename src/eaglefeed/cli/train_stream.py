"""What `eaglefeed train` is on a run: its store, its queues, and a RoundStream over them."""

import threading
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from eaglefeed.cli.common import RunQueues, is_with_producers, open_queues, opened_store, stop_on_signals, worker_name
from eaglefeed.cli.journaling import journaled
from eaglefeed.cli.peers import RefWatch, trainer_options
from eaglefeed.cli.replay import check_replayed
from eaglefeed.cli.showing import run_shown
from eaglefeed.cli.snapshots import starting_snapshot
from eaglefeed.cli.targets import compare_target
from eaglefeed.config import Settings
from eaglefeed.queue.rules import epoch_queue, last_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from eaglefeed.consumer.ranks import Ranks
    from eaglefeed.consumer.rounds import RoundStream
    from eaglefeed.consumer.run import RunAssets
    from eaglefeed.consumer.source import BatchSource
    from eaglefeed.consumer.trainer import DraftTrainer
    from eaglefeed.ops.collector import Shown
    from eaglefeed.queue.base import LeaseQueue
    from eaglefeed.storage.base import FeatureStore

__all__ = ["RunSource", "run_source"]

_LOOK_S = 5.0
_PRODUCE_FIX = "start a new run, and produce with {}"


@contextmanager
def run_source(
    settings: Settings, ranks: "Ranks", stop: threading.Event, shown: "Shown"
) -> "Iterator[RunSource | None]":
    """The run's samples; None when `stop` is set before there are any. What the run is at is shown all the while.

    Raises:
        TargetUnavailable: no producer came in train.start_timeout_s.
        ContractMismatch: the store is another run's than the queue.
        ConfigError: the queue's samples lie in another kind of store, or are of another dtype or of other layers than
            the settings say.
        RankGone: a rank of the job did not come.
    """
    from eaglefeed.consumer.run import load_run_assets
    from eaglefeed.consumer.together import first_alone

    with (
        opened_store(settings, peer=trainer_options(settings, lambda: _samples(queues, settings).payloads())) as store,
        _queues(settings, ranks) as queues,
        ExitStack() as stack,
    ):
        led, waiting = queues if ranks.is_first else None, partial(starting_snapshot, settings, "trainer")
        stack.enter_context(run_shown(shown, led))
        with stop_on_signals(stop.set), journaled(led, "trainer", worker_name(), waiting, goes_on=True):
            is_there = first_alone(ranks, lambda: _wait(settings, queues, store, ranks, stop))
        if is_there:
            assets = load_run_assets(store)
            compare_target(settings, assets.contract, "the run's samples have another value", _PRODUCE_FIX)
            yield RunSource(settings, ranks, queues, store, assets)
        else:
            yield None


def _queues(settings: Settings, ranks: "Ranks") -> "AbstractContextManager[RunQueues]":
    """The first rank alone leases; others only ask where the producers are that keep samples."""
    if ranks.is_first or is_with_producers(settings):
        return open_queues(settings)
    return nullcontext()  # type: ignore[return-value]  # nobody asks


def _samples(queues: RunQueues, settings: Settings) -> "LeaseQueue":
    """The samples of the epoch, as some group sees them: ours may not be declared yet."""
    name = epoch_queue(settings.train.epoch)
    return queues.named(name, queues.named(name).groups()[0])


def _wait(settings: Settings, queues: RunQueues, store: "FeatureStore", ranks: "Ranks", stop: threading.Event) -> bytes:
    """On the first rank: wait until the run is there; says whether it is."""
    from eaglefeed.consumer.run import check_record, wait_for_run
    from eaglefeed.consumer.together import keep_waiting

    check_replayed(queues, settings.train.epoch)
    watch = RefWatch(store, lambda: _samples(queues, settings))

    def look() -> None:
        watch.look()
        keep_waiting(ranks)

    def why() -> str:
        return last_error(queues.samples.agreed(), "producer")

    timeout_s, look_s = settings.train.start_timeout_s, min(_LOOK_S, ranks.timeout_s / 4)
    assets = wait_for_run(store, timeout_s=timeout_s, stop=stop, look=look, look_s=look_s, why=why)
    if assets is None:
        return b""
    check_record(queues.samples, assets.contract)
    return b"there"


class RunSource:
    """A TrainSource on a run's samples."""

    idle_s: float | None = 5.0

    def __init__(
        self, settings: Settings, ranks: "Ranks", queues: RunQueues, store: "FeatureStore", assets: "RunAssets"
    ) -> None:
        self.assets, self._settings, self._ranks, self._store = assets, settings, ranks, store
        train = settings.train
        self.queues = queues if ranks.is_first else None
        self._samples = queues.named(epoch_queue(train.epoch), train.group) if ranks.is_first else None
        # Nobody produces a later epoch.
        self._prompts = queues.prompts if ranks.is_first and not train.epoch else None
        self.has_room = self._samples.has_room if self._samples is not None and not train.epoch else None

    @contextmanager
    def stream(self, trainer: "DraftTrainer") -> "Iterator[RoundStream]":
        """A RoundStream that goes on from the newest checkpoint."""
        from eaglefeed.consumer.resume import resume
        from eaglefeed.consumer.together import first_alone

        first_alone(self._ranks, self._check_room)
        with self._opened(trainer) as stream:
            train, contract = self._settings.train, self.assets.contract
            resume(self._settings.train_output, trainer, stream, contract=contract, from_step=train.from_step)
            yield stream

    def drained(self, stream: "BatchSource") -> bool:  # noqa: ARG002  others may still hold samples of its queue
        """Whether the queue is drained, on the first rank."""
        return self._samples is not None and self._samples.stats().drained

    def report(self) -> tuple[dict[str, Any], list[str]]:
        """Nothing more than the stream's own counts."""
        return {}, []

    @property
    def _prefetch(self) -> int:
        """Rounds ahead, for the samples ahead of each rank that are asked for."""
        return max(1, -(-self._settings.train.prefetch // self._settings.train.samples_per_step))

    def _check_room(self) -> bytes:
        from eaglefeed.consumer.room import check_room
        from eaglefeed.consumer.together import keep_waiting

        round_size = self._ranks.world_size * self._settings.train.samples_per_step
        if self._samples is not None:
            consumer, look = worker_name(), partial(keep_waiting, self._ranks)
            check_room(self._samples, consumer=consumer, round_size=round_size, prefetch=self._prefetch, look=look)
        return b""

    def _opened(self, trainer: "DraftTrainer") -> "RoundStream":
        from eaglefeed.consumer.rounds import RoundStream

        settings, queue, train = self._settings, self._settings.queue, self._settings.train
        return RoundStream(
            self._samples,
            self._store,
            ranks=self._ranks,
            samples_per_step=train.samples_per_step,
            contract=self.assets.contract,
            draft_vocab_size=trainer.draft.config.draft_vocab_size,
            consumer=worker_name(),
            prompts=self._prompts,
            visibility_timeout_s=queue.visibility_timeout_s,
            stall_timeout_s=queue.stall_timeout_s,
            max_lease_age_s=queue.max_lease_age_s,
            prefetch=self._prefetch,
            max_attempts=queue.max_deliveries,
            values=settings.store.values,
            retain=train.retain,
            fail_without_producers=train.no_producers == "fail",
            producer_grace_s=train.producer_grace_s,
            device=train.device,
            head=self.assets.head(trainer.draft.t2d, device=train.device),
        )
