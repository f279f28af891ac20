"""The reference training run: what it needs of the target, and its loop over a stream."""

import errno
import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.checkpoint import list_checkpoints, save_checkpoint, step_of
from eaglefeed.consumer.expand import TargetHead, head_of_run
from eaglefeed.consumer.files import translated
from eaglefeed.consumer.history import HISTORY, take_back_history
from eaglefeed.consumer.meter import Pace, StepMeter
from eaglefeed.consumer.source import BatchSource
from eaglefeed.consumer.together import first_at_length
from eaglefeed.consumer.trainer import DraftTrainer, StepResult
from eaglefeed.consumer.waiting import Waiting
from eaglefeed.errors import ConfigError, SampleMissing, TargetError, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.collate import collate
from eaglefeed.schema.contract import ASSETS_FILE, CONTRACT_FILE, CONTRACT_RECORD, RunContract
from eaglefeed.storage.base import FeatureStore

__all__ = [
    "RunAssets",
    "TrainingRun",
    "check_record",
    "load_run_assets",
    "only_trainer_of",
    "wait_for_run",
]

_POLL_S = 0.5
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}

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
    look_s: float = 5.0,
    why: Callable[[], str] = lambda: "",
    clock: Clock = SYSTEM_CLOCK,
) -> RunAssets | None:
    """Wait until the first producer has written the run's contract and assets; None when `stop` is set first.

    Calls `look` first, and every `look_s` of the wait: it raises where the wait is for nothing. `why` tells what ended
    a producer last.

    Raises:
        TargetUnavailable: nobody did in `timeout_s`.
    """
    next_look_s = started_s = clock.monotonic()
    waiting = Waiting(clock)
    log.info("waiting_for_the_first_sample", store=store.uri, timeout_s=timeout_s)
    while True:
        if waiting.is_due():
            log.info("waiting_for_the_first_sample", store=store.uri, timeout_s=timeout_s, waited_s=waiting.waited_s)
        if clock.monotonic() >= next_look_s:
            look()
            next_look_s = clock.monotonic() + look_s
        if store.has_document(CONTRACT_FILE) and store.has_document(ASSETS_FILE):
            with suppress(SampleMissing):  # the producer that kept them has just ended
                return load_run_assets(store)
        if stop.is_set():
            return None
        if clock.monotonic() > started_s + timeout_s:
            fix = "start `eaglefeed produce` on the same run and store"
            what = f"no producer wrote the run's contract in {timeout_s:g} s"
            raise TargetUnavailable(what, subject=store.uri, got=why() or None, fix=fix)
        clock.sleep(_POLL_S)


@contextmanager
def only_trainer_of(folder: Path) -> Iterator[None]:
    """Make the folder if it is not there, and hold it: two trainers would overwrite each other's checkpoints.

    Removes what one that was killed while it wrote has left half written.

    Raises:
        ConfigError: another process trains into it, or its file system has no locks.
        StorageError: it cannot be made or locked.
    """
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "trainer.lock").open("w")
    with lock:
        with translated(folder):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "pass another folder with --output, or wait for its end"
                raise ConfigError("another trainer is writing here", subject=str(folder), fix=fix) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                fix = "pass --output with a folder whose file system has locks (Lustre: mounted with flock)"
                raise ConfigError("cannot be locked", subject=str(folder), got=error.strerror, fix=fix) from None
            for left in folder.glob(".*.tmp"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


class TrainingRun:
    """Trains on a stream, exactly once relative to its checkpoints.

    Each step acknowledges its samples with its number, and only what the oldest kept checkpoint holds is settled for
    good. After a crash at any point, `resume` and a new TrainingRun go on as if there had been none. When the queue
    waits for a commit, as at its end, the newest checkpoint is written and committed.

    On the ranks of a job, all make the same steps; the first alone writes and reports.

    Args:
        trainer: the draft and its optimizer.
        stream: where batches come from, after `resume`.
        folder: of the checkpoints and history.jsonl, one line a step; held by `only_trainer_of`. Lines of steps that
            the trainer has not made, or that it went back behind, are cut off.
        contract: id of the run's contract.
        samples_per_step: samples an optimizer step takes on each rank.
        samples_per_batch: how many of them are padded together into one forward.
        ack_policy: "step" settles each step's samples for good, and writes no checkpoints.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: how many stay.
        idle_s: after this time without a batch the newest checkpoint is written and committed, since producers may wait
            for room; None where nobody does.
        meter: measures the pace that stands in each line of history.jsonl; its windows are the caller's.
        on_step: called after each step with its line, on the first rank.
    """

    def __init__(
        self,
        trainer: DraftTrainer,
        stream: BatchSource,
        folder: Path,
        *,
        contract: str,
        samples_per_step: int = 1,
        samples_per_batch: int = 1,
        ack_policy: Literal["checkpoint", "step"] = "checkpoint",
        checkpoint_every: int = 20,
        keep_checkpoints: int = 2,
        idle_s: float | None = 5.0,
        meter: StepMeter | None = None,
        on_step: Callable[[StepResult, dict[str, Any]], None] = lambda _result, _row: None,
    ) -> None:
        self._trainer, self._stream, self._folder, self._contract = trainer, stream, folder, contract
        self._samples_per_step, self._samples_per_batch = samples_per_step, samples_per_batch
        self._saves, self._every, self._keep = ack_policy == "checkpoint", checkpoint_every, keep_checkpoints
        self._is_first, self._idle_s, self._on_step = trainer.ranks.is_first, idle_s, on_step
        self._meter = meter or StepMeter(stream.stats)
        self._unsaved = 0

    def train(self) -> int:
        """Train until the stream ends; returns the number of steps that this call made.

        Raises:
            SampleCorrupt: a loss that is not finite; names the samples.
            StaleLease: another trainer has restored the queue.
            RankGone: another rank of the job has died, or does not come.
            TargetError: of a target without a queue in between; what was trained is in a checkpoint, also after:
            ConfigError: what a start did not show, such as a token that was changed.
            StorageError: (StoreFull without room) a file of the folder cannot be written.
        """
        path = self._folder / HISTORY
        self._take_back(path)
        try:
            with translated(path):
                opened = path.open("ab", buffering=0) if self._is_first else nullcontext()
            with opened as history:
                steps = self._train(history)
        except (TargetError, ConfigError):
            self._settle(newest=False)
            raise
        self._settle(newest=self._stream.drained)
        return steps

    def _take_back(self, path: Path) -> None:
        """A start goes on from what the trainer has learned: its history says the same."""
        step = self._trainer.step_count
        num_lines = take_back_history(path, step) if self._is_first else 0
        if num_lines and not step and not self._saves:
            fix = "train.ack_policy=checkpoint goes on where a training stopped"
            log.warning(
                "training_starts_anew", earlier_steps=num_lines, reason="ack_policy=step keeps no checkpoints", fix=fix
            )
        elif num_lines:
            log.warning("steps_are_made_again", after_step=step, num_steps=num_lines, history=str(path))

    def _train(self, history: BinaryIO | None) -> int:
        steps = 0
        while not self._stream.ended:
            trained = self._step(history)
            steps += trained
            # Nothing came: the queue has no room, or the store has none and producers wait for ours to go.
            if not self._stream.ended and (not trained or self._unsaved >= self._every):
                self._settle(newest=not trained, is_between=True)
        return steps

    def _step(self, history: BinaryIO | None) -> bool:
        """Train on what comes, and keep nothing of it; False if nothing came."""
        batches = self._stream.take(self._samples_per_step, wait_s=self._idle_s)
        if not batches:
            return False
        result = self._trainer.step(self._joined(batches), self._stream.round_ids)
        self._unsaved += 1
        self._stream.ack(result.step if self._saves else None)
        if history is not None:
            row = self._row(result)
            with translated(self._folder / HISTORY):
                history.write(json.dumps(row).encode() + b"\n")
            self._on_step(result, row)
        return True

    def _joined(self, batches: list[Eagle3TargetBatch]) -> list[Eagle3TargetBatch]:
        size = self._samples_per_batch
        return [collate(batches[at : at + size]) for at in range(0, len(batches), size)]

    def _settle(self, *, newest: bool, is_between: bool = False) -> None:
        """Write what no checkpoint holds yet, and commit: earlier checkpoints stay usable unless the queue waits.

        Between two steps the other ranks wait for it, however long it takes; elsewhere they may be gone.
        """
        if not self._saves:
            return
        if self._unsaved and is_between:
            first_at_length(self._trainer.ranks, self._save)
        elif self._unsaved and self._is_first:
            self._save()
        self._unsaved = 0
        kept = [step_of(path) for path in list_checkpoints(self._folder)] if self._is_first else []
        self._stream.commit(self._trainer.step_count if newest or not kept else kept[0])

    def _save(self) -> None:
        state = self._stream.state_dict()
        save_checkpoint(self._folder, self._trainer, contract=self._contract, stream=state, keep=self._keep)

    def _row(self, result: StepResult) -> dict[str, Any]:
        stats = self._stream.stats
        return result._asdict() | {
            "samples": len(self._stream.round_ids),
            "redelivered": stats.redelivered,
            "stale": stats.stale,
            "wait_s": round(stats.wait_s, 3),
            # Every line has all columns, also where nobody looks at a queue.
            **(dict.fromkeys(Pace._fields) | self._meter.step(result.num_tokens).rounded()),
        }
