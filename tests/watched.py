"""A run whose producer keeps a diary, for tests of what happens while what else does."""

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

import pipeline
from eaglefeed.queue.base import LeaseQueue, QueueItem
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.memory import MemoryStore

PATIENCE_S = 20.0


class Diary:
    """What happened, in order; a thread can wait until something has."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def write(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait_for(self, line: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: line in self.lines, PATIENCE_S), line

    def is_before(self, one: str, other: str) -> bool:
        return self.lines.index(one) < self.lines.index(other)


class WatchedStore(MemoryStore):
    """Calls `during(sample_id)` in the middle of each put."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self._diary = diary
        self.during: Callable[[str], None] = lambda _sample_id: None

    def put(self, ref: SampleRef, tensors: Mapping[str, Tensor]) -> SampleRef:
        self._diary.write(f"put {ref.sample_id}")
        self.during(ref.sample_id)
        stored = super().put(ref, tensors)
        self._diary.write(f"stored {ref.sample_id}")
        return stored


class Watched(pipeline.Run):
    """A run of four prompts whose producer keeps a diary: make, put, stored, handed off."""

    store: WatchedStore

    def __init__(self) -> None:
        self.diary = Diary()
        super().__init__(store=WatchedStore(self.diary))
        self.target.before = lambda ids: self.diary.write(f"make {id_of(ids)}")
        handoff = self.prompts.handoff

        def watched(token: int, prompt_id: str, item: QueueItem, samples: LeaseQueue, *, holder: str) -> None:
            self.diary.write(f"handing off {prompt_id}")
            handoff(token, prompt_id, item, samples, holder=holder)

        self.prompts.handoff = watched  # type: ignore[method-assign,assignment]
        self.feed(*(pipeline.prompt(index) for index in range(4)))


def id_of(ids: Tensor) -> str:
    return f"p-{int(ids[0, 0]) - 1}"
