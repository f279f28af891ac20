"""Going on after a stop or a crash: the newest checkpoint, and the stream taken back to it."""

from pathlib import Path

from eaglefeed.consumer.checkpoint import list_checkpoints, load_checkpoint, set_aside, step_of
from eaglefeed.consumer.files import translated, write_whole
from eaglefeed.consumer.source import BatchSource
from eaglefeed.consumer.state import StreamState
from eaglefeed.consumer.together import first_alone
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import ConfigError, ContractMismatch, SchemaError, SchemaVersionError, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.schema.contract import CONTRACT_FILE, RunContract

__all__ = ["resume"]

log = get_logger(__name__)


def resume(
    folder: Path,
    trainer: DraftTrainer,
    stream: BatchSource,
    *,
    contract: RunContract | str,
    from_step: int | None = None,
) -> None:
    """Take over the newest checkpoint that can be read, and take the stream back to it, before its first take.

    A damaged checkpoint is logged, and renamed once an earlier one has taken its place. Of a job's ranks the first
    alone needs the folder; the others take its state over.

    Args:
        folder: of the checkpoints; without any, training starts anew.
        trainer: gets the checkpoint's state.
        stream: has handed out nothing yet.
        contract: the run's; it is then written beside the checkpoints, so that another one is not only refused, but
            named. Or its id.
        from_step: go back to the checkpoint of this step; later ones are renamed.

    Raises:
        ContractMismatch: the checkpoint is another run's, another kind of training's, or a draft's of other sizes.
        StorageError: (SchemaError) there are checkpoints, and none can be read.
        ConfigError: no checkpoint of `from_step`, or one of a later epoch.
        QueueError: the queue has committed a later step: what that step learned cannot come again.
        RankGone: another rank did not come.
    """

    def call() -> bytes:
        _resume(folder, trainer, stream, contract, from_step)
        return b""

    first_alone(trainer.ranks, call)
    trainer.share_state()
    if trainer.ranks.is_first and trainer.step_count:
        log.info("resumed", step=trainer.step_count, folder=str(folder))


def _resume(
    folder: Path, trainer: DraftTrainer, stream: BatchSource, contract: RunContract | str, from_step: int | None
) -> None:
    paths, contract_id = list_checkpoints(folder), contract
    if isinstance(contract, RunContract):
        _require_contract(folder, contract, has_checkpoints=bool(paths))
        contract_id = contract.id
    later = [path for path in paths if from_step is not None and step_of(path) > from_step]
    state, damaged = _load(_up_to(folder, paths, from_step), trainer, str(contract_id))
    stream.load_state_dict(state or stream.state_dict())
    for path, why in [*((path, "damaged") for path in damaged), *((path, "later") for path in later)]:
        log.warning("checkpoint_set_aside", checkpoint=str(set_aside(path, why)), reason=why)
    if isinstance(contract, RunContract):
        with translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONTRACT_FILE, contract.to_json())


def _require_contract(folder: Path, contract: RunContract, *, has_checkpoints: bool) -> None:
    record = folder / CONTRACT_FILE
    if has_checkpoints and record.is_file():
        with translated(record):
            stands = record.read_bytes()
        RunContract.from_json(stands).require(contract, str(folder))


def _up_to(folder: Path, paths: list[Path], from_step: int | None) -> list[Path]:
    """All of them, or the one to go back to."""
    if from_step is None:
        return paths
    chosen = [path for path in paths if step_of(path) == from_step]
    if not chosen:
        kept = ", ".join(str(step_of(path)) for path in paths) or "none"
        fix = "pass the step of a checkpoint that is kept; train.keep_checkpoints says how many are"
        raise ConfigError("no such checkpoint", subject=str(folder), wanted=f"step {from_step}", got=kept, fix=fix)
    return chosen


def _load(paths: list[Path], trainer: DraftTrainer, contract: str) -> tuple[StreamState | None, list[Path]]:
    """Where the newest one that can be read stands, and the damaged ones that are newer; None without any."""
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
    return None, []
