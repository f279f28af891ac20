"""The ranks of a job as threads of this process, for what rounds are made of; gloo is tested with processes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import pipeline
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.errors import RankGone
from eaglefeed.schema.batch import Eagle3TargetBatch

PATIENCE_S = 20.0
CONTRACT = pipeline.contract(max_length=16)


class Channel:
    """Where threads meet, and each learns what all of them brought."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._brought: list[Any] = [None] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        try:
            self._barrier.wait(PATIENCE_S)
            found = list(self._brought)
            self._barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise RankGone("a meeting of threads", rank=rank, missing=(), timeout_s=PATIENCE_S) from None
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadRanks(Ranks):
    """One rank of threads that share two channels: of tensors, and of messages."""

    def __init__(self, rank: int, world_size: int, channels: tuple[Channel, Channel]) -> None:
        super().__init__(rank, world_size)
        self._tensors, self._messages = channels

    @property
    def timeout_s(self) -> float:
        return PATIENCE_S

    def sum(self, tensors: Sequence[Tensor]) -> None:
        found = self._tensors.exchange(self.rank, [tensor.clone() for tensor in tensors])
        for index, tensor in enumerate(tensors):
            tensor.zero_()
            for theirs in found:
                tensor.add_(theirs[index])

    def share(self, tensors: Sequence[Tensor]) -> None:
        found = self._tensors.exchange(self.rank, [tensor.clone() for tensor in tensors])
        for index, tensor in enumerate(tensors):
            tensor.copy_(found[0][index])

    def tell(self, message: bytes = b"") -> bytes:
        return bytes(self._messages.exchange(self.rank, message)[0])

    def hand_out(self, parts: Sequence[bytes] = ()) -> bytes:
        return bytes(self._messages.exchange(self.rank, list(parts))[0][self.rank])

    def collect(self, part: bytes) -> list[bytes]:
        found = self._messages.exchange(self.rank, part)
        return found if self.is_first else []


@dataclass
class Seen:
    """What a rank's loop saw: for each round its own ids and the round's, and how the loop ended."""

    rows: list[tuple[list[tuple[str, ...]], tuple[str, ...]]] = field(default_factory=list)
    pauses: int = 0
    error: BaseException | None = None

    @property
    def own_ids(self) -> list[str]:
        return [sample_id for row, _ in self.rows for ids in row for sample_id in ids]


@contextmanager
def streams(run: pipeline.Run, world_size: int, size: int, **options: Any) -> Iterator[list[RoundStream]]:
    """A RoundStream for each rank; closed together, as ranks that all end are."""
    channels = Channel(world_size), Channel(world_size)
    opened = [
        RoundStream(
            run.samples if rank == 0 else None,
            run.store,
            ranks=ThreadRanks(rank, world_size, channels),
            samples_per_step=size,
            contract=CONTRACT,
            draft_vocab_size=5,
            consumer="t",
            **options,
        )
        for rank in range(world_size)
    ]
    try:
        yield opened
    finally:
        together(*(stream.close for stream in opened))
        for channel in channels:
            channel.abort()


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run works at the same time, one a thread; what each returned, or raised."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def take_all(opened: list[RoundStream], size: int, *, wait_s: float | None = None) -> list[Any]:
    """The same call to `take` on every rank: batches, or an error."""
    return together(*(lambda stream=each: stream.take(size, wait_s=wait_s) for each in opened))  # type: ignore[misc]


def ids_of(batches: list[Eagle3TargetBatch]) -> list[tuple[str, ...]]:
    return [batch.sample_ids for batch in batches]


def train_all(
    opened: list[RoundStream],
    size: int,
    *,
    wait_s: float | None = None,
    before: Callable[[int, int], None] = lambda _rank, _step: None,
) -> list[Seen]:
    """A training loop on every rank until the end; `before(rank, step)` is called before each take."""

    def loop(stream: RoundStream, rank: int, seen: Seen) -> None:
        step = 0
        try:
            while not stream.ended:
                before(rank, step)
                if batches := stream.take(size, wait_s=wait_s):
                    step += 1
                    seen.rows.append((ids_of(batches), stream.round_ids))
                    stream.ack(step)
                else:
                    seen.pauses += not stream.ended
                    stream.commit(step)
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            seen.error = error

    found = [Seen() for _ in opened]
    together(
        *(lambda at=at, seen=seen: loop(at[1], at[0], seen) for at, seen in zip(enumerate(opened), found, strict=True))  # type: ignore[misc]
    )
    return found
