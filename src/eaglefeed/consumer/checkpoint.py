"""Checkpoints of a trainer: one safetensors file a step, whole or not there."""

import re
from pathlib import Path

from eaglefeed.consumer.files import read_safetensors, translated, write_safetensors
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError, StorageError

__all__ = ["CHECKPOINT_FORMAT", "latest_checkpoint", "list_checkpoints", "load_checkpoint", "save_checkpoint"]

CHECKPOINT_FORMAT = "eaglefeed-checkpoint-1"
_NAME = re.compile(r"step-(\d{9})\.safetensors")


def save_checkpoint(folder: Path, trainer: DraftTrainer, *, contract: str, keep: int = 3) -> Path:
    """Write the trainer's state and remove all but the newest `keep` checkpoints.

    Args:
        folder: made if it is not there.
        trainer: its weights, AdamW's moments and step are saved.
        contract: id of the run's contract.
        keep: how many stay, at least 1.

    Raises:
        StorageError: (StoreFull without room) earlier checkpoints are as they were.
    """
    metadata = {
        "format": CHECKPOINT_FORMAT,
        "step": str(trainer.step_count),
        "config": trainer.draft.config.to_json(),
        "contract": contract,
    }
    path = folder / f"step-{trainer.step_count:09d}.safetensors"
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, trainer.state_tensors(), metadata)
    _prune(folder, path, keep)
    return path


def load_checkpoint(path: Path, trainer: DraftTrainer, *, contract: str) -> int:
    """Bring a trainer to a checkpoint's state; returns its step.

    Raises:
        StorageError: not there, or cut short.
        SchemaVersionError: not a checkpoint of this version.
        ContractMismatch: of another run, or of a draft with other sizes.
        SchemaError: tensors are missing, or have other shapes.
    """
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != CHECKPOINT_FORMAT:
        raise SchemaVersionError(
            "not a checkpoint", subject=str(path), wanted=CHECKPOINT_FORMAT, got=metadata.get("format")
        )
    if metadata.get("contract") != contract:
        what = "checkpoint of another run's contract"
        raise ContractMismatch(what, subject=str(path), wanted=contract, got=metadata.get("contract"))
    if metadata.get("config") != trainer.draft.config.to_json():
        what, fix = "checkpoint of a draft with other sizes", "use the settings it was trained with"
        wanted = trainer.draft.config.to_json()
        raise ContractMismatch(what, subject=str(path), wanted=wanted, got=metadata.get("config"), fix=fix)
    step = metadata.get("step", "")
    if not step.isdecimal():
        raise SchemaError("checkpoint without a step", subject=str(path), got=step)
    try:
        trainer.load_state_tensors(tensors, int(step))
    except SchemaError as error:
        what = f"checkpoint does not fit: {error.what} {error.subject}".rstrip()
        raise SchemaError(what, subject=str(path), wanted=error.wanted, got=error.got) from None
    return int(step)


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest step first; empty where there is no folder.

    Raises:
        StorageError: the folder cannot be read.
    """
    with translated(folder):
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint of the highest step.

    Raises:
        StorageError: there is none.
    """
    paths = list_checkpoints(folder)
    if not paths:
        raise StorageError("no checkpoint", subject=str(folder), fix="train first, or pass another folder")
    return paths[-1]


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Keep what was just written, also beside higher steps of a run that was taken back."""
    others = [path for path in list_checkpoints(folder) if path != newest]
    with translated(folder):
        for path in others[: len(others) - (keep - 1)] if keep <= len(others) else []:
            path.unlink(missing_ok=True)
