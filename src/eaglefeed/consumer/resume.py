"""Going on after a stop or a crash: the newest checkpoint, and the queue or the walk taken back to it."""

from pathlib import Path

from eaglefeed.consumer.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, set_aside
from eaglefeed.consumer.files import translated, write_whole
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.consumer.walk import is_place
from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.contract import CONTRACT_FILE, RunContract

__all__ = ["resume", "resume_walk"]

log = get_logger(__name__)


def resume(folder: Path, trainer: DraftTrainer, samples: LeaseQueue, *, contract: str) -> int:
    """Take over the newest checkpoint that can be read, take the queue back to it, and return the queue's session.

    Build the SampleStream afterwards, with that session. A damaged checkpoint is logged, and renamed once an earlier
    one has taken its place.

    Args:
        folder: of the checkpoints; without any, training starts anew.
        trainer: gets the checkpoint's state.
        samples: the queue.
        contract: id of the run's contract.

    Raises:
        ContractMismatch: the checkpoint is another run's, one without a queue, or a draft's of other sizes.
        StorageError: (SchemaError) there are checkpoints, and none can be read.
        QueueError: the queue has committed a later step: what that step learned cannot come again.
    """
    checkpoint, damaged = _load_newest(list_checkpoints(folder), trainer, contract)
    if is_place(checkpoint.seen):
        raise _other_kind(folder, wanted="one of a stream", got="one of a colocated or remote target")
    session = samples.restore(checkpoint.step, seen=checkpoint.seen)
    for path in damaged:
        set_aside(path)
    log.info("resumed", step=checkpoint.step, session=session, folder=str(folder))
    return session


def resume_walk(folder: Path, trainer: DraftTrainer, *, contract: RunContract) -> tuple[str, ...]:
    """Take over the newest checkpoint that can be read, and return what a BackendStream takes as `seen`.

    The contract is written beside the checkpoints, so that another target is not only refused, but named.

    Args:
        folder: of the checkpoints, which is there; without any, training starts anew.
        trainer: gets the checkpoint's state.
        contract: the run's.

    Raises:
        ContractMismatch: the checkpoints are another run's, a stream's, or a draft's of other sizes.
        StorageError: (SchemaError) there are checkpoints, and none can be read.
    """
    paths = list_checkpoints(folder)
    record = folder / CONTRACT_FILE
    if paths and record.is_file():
        with translated(record):
            stands = record.read_bytes()
        RunContract.from_json(stands).require(contract, str(folder))
    checkpoint, damaged = _load_newest(paths, trainer, contract.id)
    if paths and not is_place(checkpoint.seen):
        raise _other_kind(folder, wanted="one of a colocated or remote target", got="one of a stream")
    write_whole(record, contract.to_json())
    for path in damaged:
        set_aside(path)
    log.info("resumed", step=checkpoint.step, folder=str(folder))
    return checkpoint.seen


def _other_kind(folder: Path, *, wanted: str, got: str) -> ContractMismatch:
    fix = "go on with the train.target_backend that it was written with, or pass another --output"
    return ContractMismatch("another kind of checkpoint", subject=str(folder), wanted=wanted, got=got, fix=fix)


def _load_newest(paths: list[Path], trainer: DraftTrainer, contract: str) -> tuple[Checkpoint, list[Path]]:
    """The newest one that can be read, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in reversed(paths):
        try:
            return load_checkpoint(path, trainer, contract=contract), damaged
        except (ContractMismatch, SchemaVersionError):  # whole, but not ours
            raise
        except (SchemaError, StorageError) as error:
            log.error("checkpoint_damaged", checkpoint=str(path), reason=str(error))  # noqa: TRY400
            damaged.append(path)
            if path == paths[0]:
                raise
    return Checkpoint(0, ()), []
