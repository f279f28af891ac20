"""Going on after a stop or a crash: the newest checkpoint, and the queue taken back to it."""

from pathlib import Path

from eaglefeed.consumer.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, set_aside
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue

__all__ = ["resume"]

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
        ContractMismatch: the checkpoint is another run's, or a draft's of other sizes.
        StorageError: (SchemaError) there are checkpoints, and none can be read.
        QueueError: the queue has committed a later step: what that step learned cannot come again.
    """
    checkpoint, damaged = _load_newest(list_checkpoints(folder), trainer, contract)
    session = samples.restore(checkpoint.step, seen=checkpoint.seen)
    for path in damaged:
        set_aside(path)
    log.info("resumed", step=checkpoint.step, session=session, folder=str(folder))
    return session


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
