"""Checkpoints of a trainer: one safetensors file a step, whole or not there."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from eaglefeed.consumer.files import read_safetensors, translated, write_safetensors
from eaglefeed.consumer.state import StreamState
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.consumer.walk import is_place
from eaglefeed.errors import ContractMismatch, SchemaError, SchemaVersionError, StorageError
from eaglefeed.queue.rules import epoch_queue

__all__ = [
    "CHECKPOINT_FORMAT",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "set_aside",
    "step_of",
]

CHECKPOINT_FORMAT = "eaglefeed-checkpoint-1"
_NAME = re.compile(r"step-(\d{9})\.safetensors")


def save_checkpoint(
    folder: Path, trainer: DraftTrainer, *, contract: str, stream: StreamState | None = None, keep: int = 3
) -> Path:
    """Write the trainer's state and remove all but the newest `keep` checkpoints.

    Args:
        folder: made if it is not there.
        trainer: its weights, AdamW's moments and step are saved.
        contract: id of the run's contract.
        stream: its `state_dict()`; None of one that has seen nothing since its last commit.
        keep: how many stay, at least 1.

    Raises:
        StorageError: (StoreFull without room) earlier checkpoints are as they were.
    """
    metadata = {
        "format": CHECKPOINT_FORMAT,
        "step": str(trainer.step_count),
        "config": trainer.draft.config.to_json(),
        "vocab": trainer.vocab_digest,
        "contract": contract,
        "run": stream["run"] if stream else "",
        "queue": stream["queue"] if stream else epoch_queue(0),
        "seen": json.dumps(stream["seen"] if stream else []),
    }
    path = folder / f"step-{trainer.step_count:09d}.safetensors"
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, trainer.state_tensors(), metadata)
    _prune(folder, path, keep)
    return path


def load_checkpoint(path: Path, trainer: DraftTrainer, *, contract: str) -> StreamState:
    """Bring a trainer to a checkpoint's state, and return where its stream stood, at the checkpoint's step.

    Raises:
        StorageError: not there, or cut short.
        SchemaVersionError: not a checkpoint of this version.
        ContractMismatch: of another run, of a draft with other sizes or another vocabulary map, or without the
            optimizer's state; nothing was changed.
        SchemaError: its step or what it has seen cannot be read.
    """
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != CHECKPOINT_FORMAT:
        raise SchemaVersionError(
            "not a checkpoint", subject=str(path), wanted=CHECKPOINT_FORMAT, got=metadata.get("format")
        )
    _check_metadata(path, metadata, trainer, contract)
    step, seen = metadata.get("step", ""), _read_seen(path, metadata.get("seen", "[]"))
    if not step.isdecimal():
        raise SchemaError("checkpoint without a step", subject=str(path), got=step)
    try:
        trainer.load_state_tensors(tensors, int(step))
    except SchemaError as error:
        what = f"checkpoint does not fit: {error.what} {error.subject}".rstrip()
        fix = "a checkpoint holds a draft and its optimizer's state: pass the --output that this trainer wrote to"
        raise ContractMismatch(what, subject=str(path), wanted=error.wanted, got=error.got, fix=fix) from None
    queue = metadata.get("queue", "" if is_place(seen) else epoch_queue(0))  # older ones do not say
    return StreamState(run=metadata.get("run", ""), queue=queue, step=int(step), seen=seen)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to `<why>-step-…`, so that no run takes it for one any more; returns where it is now.

    Raises:
        StorageError: it cannot be renamed.
    """
    with translated(path):
        return path.rename(path.with_name(f"{why}-{path.name}"))


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


def _check_metadata(path: Path, metadata: Mapping[str, str], trainer: DraftTrainer, contract: str) -> None:
    if metadata.get("contract") != contract:
        what = "checkpoint of another run's contract"
        raise ContractMismatch(what, subject=str(path), wanted=contract, got=metadata.get("contract"))
    own, theirs = trainer.draft.config.to_json(), metadata.get("config", "{}")
    fix = "use the settings it was trained with, or pass another --output"
    if own != theirs:
        what = "checkpoint of a draft with other sizes"
        wanted, got = _differences(own, theirs)
        raise ContractMismatch(what, subject=str(path), wanted=wanted, got=got, fix=fix)
    vocab = trainer.vocab_digest
    if metadata.get("vocab", vocab) != vocab:
        what = "checkpoint of a draft with another vocabulary map of the same size"
        raise ContractMismatch(what, subject=str(path), wanted=vocab, got=metadata["vocab"], fix=fix)


def _differences(own: str, theirs: str) -> tuple[str, str]:
    """The fields of two configurations that are not equal, as both have them."""
    try:
        one, other = json.loads(own), json.loads(theirs)
        names = [name for name in one | other if one.get(name) != other.get(name)]
    except (ValueError, TypeError):
        return own, theirs
    return tuple(json.dumps({name: each.get(name) for name in names}) for each in (one, other))  # type: ignore[return-value]


def _read_seen(path: Path, text: str) -> list[str]:
    try:
        seen = json.loads(text)
    except ValueError:
        seen = None
    if not isinstance(seen, list) or not all(isinstance(sample_id, str) for sample_id in seen):
        raise SchemaError("not a list of sample ids", subject=str(path), got=text[:100])
    return seen


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Keep what was just written, also beside higher steps of a run that was taken back."""
    others = [path for path in list_checkpoints(folder) if path != newest]
    with translated(folder):
        for path in others[: len(others) - (keep - 1)] if keep <= len(others) else []:
            path.unlink(missing_ok=True)
