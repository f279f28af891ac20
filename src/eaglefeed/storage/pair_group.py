"""Tensors that go from one process (rank 0) to another (rank 1) over torch.distributed, each call with a deadline.

A transfer begins with a digest of what it is and of its sizes, so that the two sides cannot speak of different ones,
and ends with the receiver's word that all is there. Whatever goes wrong, the group is broken for good: a transfer that
stopped half-way would shift every later one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import PeerGone
from eaglefeed.storage.wire import Deadline

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["RECEIVER", "SENDER", "Backend", "PairGroup", "join_pair", "pair_backends"]

Backend = Literal["gloo", "nccl"]
SENDER, RECEIVER = 0, 1
_PIECE_BYTES = 4 * 2**20
_GUARD_BYTES = 16
_HELLO = b"hello"
_MIN_WAIT = timedelta(milliseconds=1)  # 0 would be no timeout


def pair_backends(device: torch.device) -> tuple[Backend, ...]:
    """What a pair group can run over here, for tensors on this device."""
    if not dist.is_available():
        return ()
    gloo: tuple[Backend, ...] = ("gloo",) if dist.is_gloo_available() else ()
    return (*gloo, "nccl") if device.type == "cuda" and dist.is_nccl_available() else gloo


class PairGroup(ABC):
    """A pair that has been joined; one call at a time.

    Args:
        group: torch's.
        rank: SENDER or RECEIVER.
        device: of the tensors.
        clock: measures the deadlines.
    """

    def __init__(self, group: Any, rank: int, device: torch.device, clock: Clock) -> None:
        self._group, self._peer, self._device, self._clock = group, 1 - rank, device, clock
        self._mark = torch.zeros(1, dtype=torch.uint8, device=device)
        self.broken = False

    def send(self, tensors: Sequence[Tensor], *, label: bytes, timeout_s: float) -> None:
        """Hand tensors over; they must not change until it returns.

        Args:
            tensors: uint8 [n], n > 0, on the group's device.
            label: what they are; `receive` must be called with the same.
            timeout_s: for all of it.

        Raises:
            PeerGone: not everything arrived, or nobody said so in time. The group is broken.
        """
        guard = self._guard(label, tensors)
        self._transfer(lambda deadline: self._send(tensors, guard, deadline), timeout_s)

    def receive(
        self,
        memories: Sequence[Tensor],
        *,
        label: bytes,
        timeout_s: float,
        arrived: Callable[[int], object] = lambda _done: None,
    ) -> None:
        """Fill memories with what the other side sends.

        Args:
            memories: as the tensors of `send`, and of the same sizes.
            label: see `send`.
            timeout_s: for all of it.
            arrived: told again and again how many bytes of all are there.

        Raises:
            PeerGone: not everything came in time, or the other side sends something else. The group is broken.
        """
        guard = self._guard(label, memories)
        self._transfer(lambda deadline: self._receive(memories, guard, arrived, deadline), timeout_s)

    def close(self) -> None:
        """Hang up. Not while another thread is in `send` or `receive`."""
        self.broken = True
        if self._group is not None:
            last, self._group = [self._group], None
            self._drop(last)

    def _drop(self, last: list[Any]) -> None:
        """Let go of torch's group, the only item: its threads and sockets end with it."""
        last.clear()

    @abstractmethod
    def _send(self, tensors: Sequence[Tensor], guard: Tensor, deadline: Deadline) -> None: ...

    @abstractmethod
    def _receive(
        self, memories: Sequence[Tensor], guard: Tensor, arrived: Callable[[int], object], deadline: Deadline
    ) -> None: ...

    def _guard(self, label: bytes, tensors: Sequence[Tensor]) -> Tensor:
        sizes = ",".join(str(tensor.numel()) for tensor in tensors)
        digest = xxhash.xxh3_128_digest(b"%d:%s:%s" % (len(label), label, sizes.encode()))
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._device)

    def _require(self, found: Tensor, guard: Tensor) -> None:
        if not torch.equal(found, guard):
            raise RuntimeError("the other side speaks of another transfer")

    def _transfer(self, transfer: Callable[[Deadline], None], timeout_s: float) -> None:
        if self.broken:
            raise PeerGone("the pair group is broken", fix="open another")
        try:
            transfer(Deadline(self._clock, timeout_s))
        except (RuntimeError, ValueError, TimeoutError) as error:
            # Works hold the tensors and keep torch's group alive; the frames of the error hold the works.
            error.__traceback__ = None
            self.close()
            raise _gone("a transfer between two processes broke off", error, timeout_s) from None
        except BaseException:
            self.broken = True
            raise


class _GlooPair(PairGroup):
    """Over gloo, in pieces with a mark of one byte behind each.

    Gloo tells a *pending* receive at once when the other process dies; of the one that is under way it does not, and of
    sends neither: those wait until the deadline, and no other thread can wake them. So the receiver waits for the mark
    behind the piece that comes, and the sender for the receiver's last word. What neither can see is a process that
    stands still, or a machine that vanished: then the whole deadline passes.
    """

    def _send(self, tensors: Sequence[Tensor], guard: Tensor, deadline: Deadline) -> None:
        last_word = self._group.recv([self._mark.clone()], self._peer, 0)
        works = [self._group.send([guard], self._peer, 0)]
        for piece in _pieces(tensors):
            works += [self._group.send([each], self._peer, 0) for each in (piece, self._mark)]
        for work in [last_word, *works]:
            _wait(work, deadline)

    def _receive(
        self, memories: Sequence[Tensor], guard: Tensor, arrived: Callable[[int], object], deadline: Deadline
    ) -> None:
        found = torch.empty_like(guard)
        _wait(self._group.recv([found], self._peer, 0), deadline)
        self._require(found, guard)  # or a send might be longer than its receive: then gloo ends the process
        marks = self._mark.clone()
        pieces = list(_pieces(memories))
        works = [[self._group.recv([each], self._peer, 0) for each in (piece, marks)] for piece in pieces]
        done = 0
        for piece, (whole, mark) in zip(pieces, works, strict=True):
            _wait(mark, deadline)
            _wait(whole, deadline)
            done += piece.numel()
            arrived(done)
        _wait(self._group.send([self._mark], self._peer, 0), deadline)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        for begin in range(0, tensor.numel(), _PIECE_BYTES):
            yield tensor[begin : begin + _PIECE_BYTES]


def _wait(work: dist.Work, deadline: Deadline) -> None:
    work.wait(max(timedelta(seconds=deadline.left()), _MIN_WAIT))


def join_pair(
    store: "Store",
    *,
    backend: Backend,
    rank: int,
    timeout_s: float,
    device: torch.device | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> PairGroup:
    """Meet the other process in a store, and exchange a first word with it.

    Args:
        store: of this pair alone, for instance a PrefixStore. Nothing else may use its connection meanwhile.
        backend: gloo or nccl.
        rank: SENDER or RECEIVER.
        timeout_s: for all of it.
        device: of the tensors; a CUDA device for nccl.
        clock: measures the deadline.

    Raises:
        PeerGone: it did not come, or the backend does not work here.
    """
    device = device or torch.device("cpu")
    try:
        pair = _joined(store, backend, rank, timeout_s, device, clock)
    except (RuntimeError, ValueError, ImportError) as error:
        error.__traceback__ = None
        raise _gone(f"no {backend} pair group came about", error, timeout_s) from None
    word = torch.zeros(1, dtype=torch.uint8, device=device)
    if rank == SENDER:
        pair.send([word], label=_HELLO, timeout_s=timeout_s)
    else:
        pair.receive([word], label=_HELLO, timeout_s=timeout_s)
    return pair


def _joined(
    store: "Store", backend: Backend, rank: int, timeout_s: float, device: torch.device, clock: Clock
) -> PairGroup:
    if backend == "nccl":
        from eaglefeed.storage.pair_nccl import NcclPair, nccl_group

        return NcclPair(nccl_group(store, rank), rank, device, clock)
    from torch.distributed import ProcessGroupGloo

    return _GlooPair(ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s)), rank, torch.device("cpu"), clock)


def _gone(what: str, error: Exception, timeout_s: float) -> PeerGone:
    got = f"nothing whole within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)[:200]
    return PeerGone(what, got=got, fix="it is tried again in a new group, or over HTTP")
