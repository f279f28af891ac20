"""The folders in which a Hugging Face Trainer keeps its checkpoints, with a stream's state in them."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

from eaglefeed.consumer.files import translated
from eaglefeed.errors import SchemaError, StorageError
from eaglefeed.logs import get_logger

__all__ = ["LAST_FILE", "STREAM_FILE", "read_json", "set_aside_later", "whole_checkpoints"]

STREAM_FILE = "eaglefeed_stream.json"
"""The stream's state, beside the Trainer's own files."""
LAST_FILE = "trainer_state.json"
"""What the Trainer writes last: without it, a checkpoint is not whole."""

_NAME = re.compile(r"checkpoint-(\d+)")

log = get_logger(__name__)


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Step → folder, of those that were written to their end with a stream's state."""
    return {step: path for step, path in _named(folder).items() if _is_whole(path)}


def set_aside_later(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps to later-checkpoint-N, whole or not: what they hold is learned anew.

    A Trainer would go on from them, and delete newer ones of an earlier step in their place.

    Raises:
        StorageError: one cannot be renamed.
    """
    for at, path in _named(folder).items():
        if at > step:
            aside = path.with_name(f"later-{path.name}")
            with translated(path):
                if aside.exists():
                    shutil.rmtree(aside)
                path.rename(aside)
            log.warning("checkpoint_set_aside", checkpoint=str(aside), reason="later")


def _named(folder: Path) -> dict[int, Path]:
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return {int(name[1]): path for name, path in found if name}


def _is_whole(checkpoint: Path) -> bool:
    with suppress(StorageError, SchemaError):
        return bool(read_json(checkpoint / STREAM_FILE) and read_json(checkpoint / LAST_FILE))
    return False


def read_json(path: Path) -> dict[str, object]:
    """A file's object.

    Raises:
        StorageError: it cannot be read.
        SchemaError: it holds something else.
    """
    try:
        with translated(path):
            found = json.loads(path.read_bytes())
    except ValueError as error:
        raise SchemaError("not JSON", subject=str(path), got=str(error)) from None
    if not isinstance(found, dict):
        raise SchemaError("not a state", subject=str(path), wanted="an object", got=type(found).__name__)
    return found
