"""A ledger that is written by hand, over a store in memory."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import samples
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.refs import SampleRef, encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.memory import MemoryStore


@dataclass
class Book:
    """A ledger by hand; `asked` notes the order of the questions."""

    run_id: str = "run"
    name: str = "one"
    standing: set[int] = field(default_factory=set)
    refs: dict[str, set[str]] = field(default_factory=dict)
    retained: bool = False
    forgotten: set[str] = field(default_factory=set)
    to_release: list[QueueItem] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    on_leased: Callable[[], None] = lambda: None
    on_kept: Callable[[], None] = lambda: None

    def instance(self) -> str:
        return self.name

    def former(self) -> set[str]:
        return self.forgotten

    def retains(self, queue: str) -> bool:
        return self.retained

    def leased(self, tokens: Collection[int]) -> set[int]:
        self.asked.append("leased")
        found = self.standing & set(tokens)
        self.on_leased()
        return found

    def kept(self, ids: Collection[str]) -> dict[str, set[str]]:
        self.asked.append("kept")
        found = {item_id: set(self.refs[item_id]) for item_id in ids if item_id in self.refs}
        self.on_kept()
        return found

    def releases(self) -> list["Book"]:
        return [self]

    def released(self, n: int) -> list[QueueItem]:
        return self.to_release[:n]

    def forget(self, ids: Sequence[str]) -> None:
        self.to_release = [item for item in self.to_release if item.id not in ids]


def put(store: MemoryStore, sample_id: str, token: int = 7, run_id: str = "run") -> SampleRef:
    tensors = samples.tensors()
    return store.put(samples.ref(tensors, sample_id=sample_id, token=token, run_id=run_id), tensors)


def keep(book: Book, *refs: SampleRef) -> None:
    for ref in refs:
        book.refs.setdefault(ref.sample_id, set()).add(key_of(ref))


def keys(store: MemoryStore) -> set[str]:
    return {shard.key for shard in store.scan()}


def release(ref: SampleRef) -> QueueItem:
    return QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)
