"""history.jsonl: one line for each step that the draft has learned."""

import os
import re
from pathlib import Path

from eaglefeed.consumer.files import translated

__all__ = ["HISTORY", "take_back_history"]

HISTORY = "history.jsonl"
_STEP = re.compile(rb'"step": (\d+)')


def take_back_history(path: Path, step: int) -> int:
    """Cut off the lines of steps after `step`, which are made again, and one that a kill left unfinished.

    Returns how many whole lines went.

    Raises:
        StorageError: the file cannot be read or cut.
    """
    with translated(path):
        if not path.is_file():
            return 0
        end, num_lines = _place_of(path, step)
        if end < path.stat().st_size:
            os.truncate(path, end)
    return num_lines


def _place_of(path: Path, step: int) -> tuple[int, int]:
    """Where the first line after `step` begins, or the last one without an end, and how many whole lines follow."""
    end, num_lines, is_after = 0, 0, False
    with path.open("rb") as lines:
        for line in lines:
            found = _STEP.search(line)
            is_after = is_after or (found is not None and int(found[1]) > step)
            is_whole = line.endswith(b"\n")
            num_lines += is_after and is_whole
            end += len(line) if is_whole and not is_after else 0
    return end, num_lines
