"""The reference training run: what it needs of the target, and its loop over a stream."""

import fcntl
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.checkpoint import list_checkpoints, save_checkpoint, step_of
from eaglefeed.consumer.expand import TargetHead, head_of_run
from eaglefeed.consumer.files import translated
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.trainer import DraftTrainer, StepResult
from eaglefeed.errors import ConfigError, SampleMissing, TargetError, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import ASSETS_FILE, CONTRACT_FILE, CONTRACT_RECORD, RunContract
from eaglefeed.storage.base import FeatureStore

__all__ = [
    "BatchSource",
    "RunAssets",
    "TrainingRun",
    "check_record",
    "load_run_assets",
    "only_trainer_of",
    "wait_for_run",
]

_POLL_S, _LOOK_S = 0.5, 5.0

log = get_logger(__name__)


@dataclass(frozen=True)
class RunAssets:
    """What a trainer knows of the target without loading it.

    Args:
        contract: the run's contract.
        config: the target's config.json.
        tensors: embed_tokens.weight [V, H], lm_head.weight [V, H], norm.weight [H], and t2d [V] where the run has a
            vocabulary map.
        metadata: the numbers of the target's LogitRule.
    """

    contract: RunContract
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def head(self, t2d: Tensor | None = None, *, device: torch.device | str = "cpu") -> TargetHead | None:
        """What a SampleStream makes target_probs with; None in a run whose samples hold logits or probabilities.

        Args:
            t2d: [V] bool, the draft vocabulary; the run's own map by default, or the whole vocabulary without one.
            device: where batches are trained on.

        Raises:
            ContractMismatch: the assets hold another head than the one that the samples were made for.
            SchemaError: the vocabulary map is another target's.
        """
        everything = torch.ones(self.contract.vocab_size, dtype=torch.bool)
        chosen = self.tensors.get("t2d", everything) if t2d is None else t2d
        return head_of_run(self.contract, self.tensors, self.metadata, chosen, device=device)


def load_run_assets(store: FeatureStore) -> RunAssets:
    """Read the run's contract and the target's assets.

    Raises:
        SampleMissing: no producer has written them yet.
        SchemaError: they are not what they should be.
    """
    data, assets = store.get_document(CONTRACT_FILE), store.get_assets(ASSETS_FILE)
    if data is None or assets is None:
        raise SampleMissing(CONTRACT_FILE if data is None else ASSETS_FILE, store.uri)
    tensors, metadata = assets
    return RunAssets(RunContract.from_json(data), json.loads(metadata["config"]), tensors, metadata)


def check_record(samples: LeaseQueue, contract: RunContract) -> None:
    """Check that the contract beside the shards is the one that the run's queues hold; the first to look stores it.

    Raises:
        ContractMismatch: names every field that differs: the store is another run's than the queue.
    """
    RunContract.from_json(samples.agree(CONTRACT_RECORD, contract.to_json())).require(contract, "the trainer's store")


def wait_for_run(
    store: FeatureStore,
    *,
    timeout_s: float,
    stop: threading.Event,
    look: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> RunAssets | None:
    """Wait until the first producer has written the run's contract and assets; None when `stop` is set first.

    Calls `look` first, and every _LOOK_S of the wait: it raises where the wait is for nothing.

    Raises:
        TargetUnavailable: nobody did in `timeout_s`.
    """
    look_s = started_s = clock.monotonic()
    log.info("waiting_for_the_first_sample", store=store.uri, timeout_s=timeout_s)
    while True:
        if clock.monotonic() >= look_s:
            look()
            look_s = clock.monotonic() + _LOOK_S
        if store.has_document(CONTRACT_FILE) and store.has_document(ASSETS_FILE):
            with suppress(SampleMissing):  # the producer that kept them has just ended
                return load_run_assets(store)
        if stop.is_set():
            return None
        if clock.monotonic() > started_s + timeout_s:
            fix = "start `eaglefeed produce` on the same run and store"
            what = f"no producer wrote the run's contract in {timeout_s:g} s"
            raise TargetUnavailable(what, subject=store.uri, fix=fix)
        clock.sleep(_POLL_S)


@contextmanager
def only_trainer_of(folder: Path) -> Iterator[None]:
    """Make the folder if it is not there, and hold it: two trainers would overwrite each other's checkpoints.

    Raises:
        ConfigError: another process trains into it.
    """
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "trainer.lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "pass another folder with --output, or wait for its end"
            raise ConfigError("another trainer is writing here", subject=str(folder), fix=fix) from None
        yield


class BatchSource(Protocol):
    """Where a training loop takes batches: a SampleStream or a BackendStream, which say what each of these does."""

    stats: StreamStats

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    @property
    def drained(self) -> bool:
        """Whether all that there is has come."""

    @property
    def commit_due(self) -> bool:
        """Whether somebody waits for a commit."""

    def take(self, n: int, *, wait_s: float | None = None) -> list[Eagle3TargetBatch]:
        """Up to `n` batches, or none."""

    def ack(self, step: int | None = None, /) -> int:
        """What was taken was trained on in this step."""

    def commit(self, step: int, /) -> int:
        """No checkpoint before this step can be restored any more."""

    def state_dict(self) -> dict[str, list[str]]:
        """What a checkpoint keeps as `seen`."""

    def stop(self) -> None:
        """Let nothing more come."""

    def close(self) -> None:
        """Give back what it holds."""


class TrainingRun:
    """Trains on a stream, exactly once relative to its checkpoints.

    Each step acknowledges its samples with its number, and only what the oldest kept checkpoint holds is settled for
    good. After a crash at any point, `resume` and a new TrainingRun go on as if there had been none. When the queue
    waits for a commit, as at its end, the newest checkpoint is written and committed.

    Args:
        trainer: the draft and its optimizer.
        stream: where batches come from, in the session of `resume`, or behind the place of `resume_walk`.
        folder: of the checkpoints and history.jsonl, one line a step; held by `only_trainer_of`.
        contract: id of the run's contract.
        samples_per_step: batches an optimizer step.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: how many stay.
        idle_s: after this time without a batch the newest checkpoint is written and committed, since producers may wait
            for room; None where nobody does.
        on_step: called after each step.
    """

    def __init__(
        self,
        trainer: DraftTrainer,
        stream: BatchSource,
        folder: Path,
        *,
        contract: str,
        samples_per_step: int = 1,
        checkpoint_every: int = 20,
        keep_checkpoints: int = 2,
        idle_s: float | None = 5.0,
        on_step: Callable[[StepResult], None] = lambda _: None,
    ) -> None:
        self._trainer, self._stream, self._folder, self._contract = trainer, stream, folder, contract
        self._samples_per_step, self._every, self._keep = samples_per_step, checkpoint_every, keep_checkpoints
        self._idle_s, self._on_step = idle_s, on_step
        self._unsaved = 0

    def train(self) -> int:
        """Train until the stream ends; returns the number of steps that this call made.

        Raises:
            SampleCorrupt: a loss that is not finite; names the samples.
            StaleLease: another trainer has restored the queue.
            TargetError: of a target without a queue in between; what was trained is in a checkpoint, also after:
            ConfigError: what a start did not show, such as a token that was changed.
        """
        try:
            with (self._folder / "history.jsonl").open("a", encoding="utf-8") as history:
                steps = self._train(history)
        except (TargetError, ConfigError):
            self._settle(newest=False)
            raise
        self._settle(newest=self._stream.drained)
        return steps

    def _train(self, history: TextIO) -> int:
        steps = 0
        while not self._stream.ended:
            trained = self._step(history)
            steps += trained
            # Nothing came: the queue has no room, or the store has none and producers wait for ours to go.
            if not self._stream.ended and (not trained or self._unsaved >= self._every):
                self._settle(newest=not trained)
        return steps

    def _step(self, history: TextIO) -> bool:
        """Train on what comes, and keep nothing of it; False if nothing came."""
        batches = self._stream.take(self._samples_per_step, wait_s=self._idle_s)
        if not batches:
            return False
        result = self._trainer.step(batches)
        self._unsaved += 1
        self._stream.ack(result.step)
        history.write(json.dumps(self._row(result, len(batches))) + "\n")
        history.flush()
        self._on_step(result)
        return True

    def _settle(self, *, newest: bool) -> None:
        """Write what no checkpoint holds yet, and commit: earlier checkpoints stay usable unless the queue waits."""
        if self._unsaved:
            seen = self._stream.state_dict()["seen"]
            save_checkpoint(self._folder, self._trainer, contract=self._contract, seen=seen, keep=self._keep)
            self._unsaved = 0
        kept = [step_of(path) for path in list_checkpoints(self._folder)]
        self._stream.commit(self._trainer.step_count if newest or not kept else kept[0])

    def _row(self, result: StepResult, num_samples: int) -> dict[str, Any]:
        stats = self._stream.stats
        return result._asdict() | {
            "samples": num_samples,
            "redelivered": stats.redelivered,
            "stale": stats.stale,
            "wait_s": round(stats.wait_s, 3),
        }
