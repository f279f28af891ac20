"""Checkpoints of a trainer: one safetensors file a step, whole or not there."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eaglefeed.consumer.files import read_safetensors, translated, write_safetensors
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError, StorageError

__all__ = [
    "CHECKPOINT_FORMAT",
    "Checkpoint",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "set_aside",
    "step_of",
]

CHECKPOINT_FORMAT = "eaglefeed-checkpoint-1"
_NAME = re.compile(r"step-(\d{9})\.safetensors")


class Checkpoint(NamedTuple):
    """Where a checkpoint stands: its step, and the samples learned since the queue's last commit."""

    step: int
    seen: tuple[str, ...]


def save_checkpoint(
    folder: Path, trainer: DraftTrainer, *, contract: str, seen: Sequence[str] = (), keep: int = 3
) -> Path:
    """Write the trainer's state and remove all but the newest `keep` checkpoints.

    Args:
        folder: made if it is not there.
        trainer: its weights, AdamW's moments and step are saved.
        contract: id of the run's contract.
        seen: the stream's `state_dict()["seen"]`.
        keep: how many stay, at least 1.

    Raises:
        StorageError: (StoreFull without room) earlier checkpoints are as they were.
    """
    metadata = {
        "format": CHECKPOINT_FORMAT,
        "step": str(trainer.step_count),
        "config": trainer.draft.config.to_json(),
        "contract": contract,
        "seen": json.dumps(list(seen)),
    }
    path = folder / f"step-{trainer.step_count:09d}.safetensors"
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, trainer.state_tensors(), metadata)
    _prune(folder, path, keep)
    return path


def load_checkpoint(path: Path, trainer: DraftTrainer, *, contract: str) -> Checkpoint:
    """Bring a trainer to a checkpoint's state.

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
    return Checkpoint(int(step), _read_seen(path, metadata.get("seen", "[]")))


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run takes it for one any more; returns where it is now.

    Raises:
        StorageError: it cannot be renamed.
    """
    with translated(path):
        return path.rename(path.with_name(f"damaged-{path.name}"))


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


def _read_seen(path: Path, text: str) -> tuple[str, ...]:
    try:
        seen = json.loads(text)
    except ValueError:
        seen = None
    if not isinstance(seen, list) or not all(isinstance(sample_id, str) for sample_id in seen):
        raise SchemaError("not a list of sample ids", subject=str(path), got=text[:100])
    return tuple(seen)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Keep what was just written, also beside higher steps of a run that was taken back."""
    others = [path for path in list_checkpoints(folder) if path != newest]
    with translated(folder):
        for path in others[: len(others) - (keep - 1)] if keep <= len(others) else []:
            path.unlink(missing_ok=True)
