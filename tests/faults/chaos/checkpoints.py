"""A trainer's checkpoints: a model is the ids that it learned, by step. One process at a time owns the folder.

A process that was paused for long finds that it is not the owner any more, before it can write over its successor's
files. The queue alone cannot know that: it fences the queue's calls, not the folder.
"""

import fcntl
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


class NotTheOwner(Exception):
    """A successor has the folder."""


@dataclass(frozen=True)
class Checkpoint:
    """A model after `step`, written by `session`."""

    step: int = 0
    session: int = 0
    steps: dict[int, list[str]] = field(default_factory=dict)

    def since(self, step: int) -> list[str]:
        """What it has learned after `step`."""
        return [item_id for at, ids in self.steps.items() if at > step for item_id in ids]

    @property
    def ids(self) -> tuple[str, ...]:
        """All that it has learned."""
        return tuple(item_id for ids in self.steps.values() for item_id in ids)


class Checkpoints:
    """The checkpoints in `folder`, as the process with the given number sees them; numbers grow."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        folder.mkdir(exist_ok=True)

    @contextmanager
    def owned(self, *, claim: bool = False) -> Iterator[None]:
        """Nobody else reads or writes the folder meanwhile; `claim` makes this process its owner from now on."""
        owner = self._folder / "owner"
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = int(owner.read_text()) if owner.exists() else 0
            if newest > self._number or (newest < self._number and not claim):
                raise NotTheOwner
            self._write(owner, str(self._number))
            yield

    def save(self, session: int, step: int, steps: dict[int, list[str]], *, keep: int) -> int:
        """Write a checkpoint, drop all but the newest `keep`, and return the step of the oldest that is left."""
        self._write(self._path(step), json.dumps({"session": session, "steps": steps}))
        for old in self.steps()[:-keep]:
            self._path(old).unlink()
        return self.steps()[0]

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return sorted(int(path.stem) for path in self._folder.glob("*.json"))

    def choose(self, dice: random.Random, committed: int) -> Checkpoint:
        """One of the two newest, nothing before the committed step; what is newer than it is dropped for good."""
        kept = [step for step in self.steps()[-2:] if step >= committed]
        if not kept:
            return Checkpoint()
        chosen = dice.choice(kept)
        for newer in self.steps():
            if newer > chosen:
                self._path(newer).unlink()
        return self.read(chosen)

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of `step`."""
        found = json.loads(self._path(step).read_text())
        return Checkpoint(step, found["session"], {int(at): ids for at, ids in found["steps"].items()})

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.json"

    def _write(self, path: Path, text: str) -> None:
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)
