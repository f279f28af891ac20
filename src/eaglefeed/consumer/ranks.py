"""What one process of a training job knows of the others, and what they do together.

Tensors are summed and shared by the main threads, short messages by one other thread of each: two groups, since the
calls of one group must come in the same order on every rank. No object is pickled. Every call has a deadline.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.roll_call import RollCall
from eaglefeed.errors import ConfigError, RankGone

__all__ = ["Ranks"]

_POLL = timedelta(seconds=0.5)
_CUDA_POLL_S = 0.0002
_BUCKET_BYTES = 2**25
_SPARE_S, _WATCHDOG_S, _LATE_S = 1.0, 60.0, 10.0
_START_FIX = (
    "see that every rank was started, that MASTER_ADDR and MASTER_PORT are rank 0's, free there and reached from here, "
    "and that GLOO_SOCKET_IFNAME names the interface between machines"
)
_NOTHING = torch.empty(0, dtype=torch.uint8)
_jobs = itertools.count()

T = TypeVar("T")


class Ranks:
    """The ranks of a job, from 0; by itself, the only rank of one, which touches no torch.distributed.

    `sum` and `share` are for the main thread of each rank, `tell`, `hand_out` and `collect` for one thread of each. All
    ranks make the same calls in the same order; each raises RankGone where another rank does not come in time or has
    died, and names it. Nothing can be done together afterwards.

    Args:
        rank: this process's.
        world_size: how many there are.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @classmethod
    def alone(cls) -> "Ranks":
        """The only rank of a job."""
        return cls()

    @staticmethod
    def of_job(*, timeout_s: float = 600.0, device: torch.device | str = "cpu") -> "Ranks":
        """Join the others, under torchrun or whatever sets its variables; uses torch's group if there is one already.

        Args:
            timeout_s: how long a rank may keep the others waiting.
            device: of the tensors; over NCCL on CUDA, else over gloo.

        Raises:
            ConfigError: the launcher's variables are missing or wrong.
            RankGone: not all ranks came.
        """
        return _JobRanks(timeout_s, torch.device(device))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does what is done once."""
        return self.rank == 0

    @property
    def timeout_s(self) -> float:
        """How long a rank may keep the others waiting."""
        return float("inf")

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors over all ranks, in place: always in the same order, so that a repeated run gives equal sums."""

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give rank 0's values to all, in place."""

    def tell(self, message: bytes = b"") -> bytes:
        """Rank 0's message, on every rank."""
        return message

    def hand_out(self, parts: Sequence[bytes] = ()) -> bytes:
        """The part that rank 0 has for this rank."""
        return parts[self.rank]

    def collect(self, part: bytes) -> list[bytes]:
        """Every rank's part, by rank, on rank 0; nothing elsewhere."""
        return [part]

    def close(self) -> None:
        """Leave the others. Safe to repeat; not while another thread is in a call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _JobRanks(Ranks):
    """Ranks over torch.distributed."""

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        self._timeout_s = timeout_s
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # Torch ends a process whose NCCL call is late: our own deadline comes first.
        tensor_timeout = timedelta(seconds=timeout_s + (_WATCHDOG_S if device.type == "cuda" else 0.0))
        self._is_ours = not dist.is_initialized()
        try:
            if self._is_ours:
                _in_time(lambda: dist.init_process_group(backend, timeout=tensor_timeout), timeout_s + _LATE_S)
            super().__init__(dist.get_rank(), dist.get_world_size())
            store = dist.distributed_c10d._get_default_store()  # torch has no public way to it
            self._roll = RollCall(store, f"eaglefeed-{next(_jobs)}", self.rank, self.world_size)
            self._tensors: Any = dist.new_group(backend=backend, timeout=tensor_timeout)
            self._messages: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except ValueError as error:
            fix = "start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            raise ConfigError("no job to join", got=str(error)[:300], fix=fix) from None
        except RuntimeError as error:
            reason = _reason(error)
            raise RankGone(
                "the start", rank=None, missing=(), timeout_s=timeout_s, reason=reason, fix=_START_FIX
            ) from None
        self._roll.start()
        self.tell()

    @property
    def timeout_s(self) -> float:
        """How long a rank may keep the others waiting."""
        return self._timeout_s

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors over all ranks, in place."""
        self._together("the sum of tensors", lambda: self._sum(tensors))

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give rank 0's values to all, in place."""
        self._together("the sharing of tensors", lambda: self._share(tensors))

    def tell(self, message: bytes = b"") -> bytes:
        """Rank 0's message, on every rank."""
        return self._together("a message to all", lambda: self._tell(message), is_message=True)

    def hand_out(self, parts: Sequence[bytes] = ()) -> bytes:
        """The part that rank 0 has for this rank."""
        return self._together("the hand-out of messages", lambda: self._hand_out(parts), is_message=True)

    def collect(self, part: bytes) -> list[bytes]:
        """Every rank's part, by rank, on rank 0; nothing elsewhere."""
        return self._together("the collection of messages", lambda: self._collect(part), is_message=True)

    def close(self) -> None:
        """Leave the others."""
        if self._tensors is None:
            return
        # First, and keeping no reference: those that wait for this rank see it leave.
        dist.destroy_process_group(self._tensors)
        dist.destroy_process_group(self._messages)
        self._tensors = self._messages = None
        self._roll.stop()
        if self._is_ours:
            dist.destroy_process_group()

    def _together(self, doing: str, call: Callable[[], T], *, is_message: bool = False) -> T:
        self._roll.note(is_message=is_message)
        try:
            return call()
        except (RuntimeError, TimeoutError) as error:
            reason = _reason(error)
            missing = self._roll.missing(is_message=is_message, was_late=_is_late(error))
        raise RankGone(doing, rank=self.rank, missing=missing, timeout_s=self._timeout_s, reason=reason)

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = bucket[0] if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
            whole = flat.contiguous()
            self._wait(dist.all_reduce(whole, group=self._tensors, async_op=True), whole)
            _spread(whole, bucket)

    def _share(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            self._wait(dist.broadcast(whole, 0, group=self._tensors, async_op=True), whole)
            _spread(whole, [tensor])

    def _wait(self, work: Any, tensor: Tensor) -> None:
        """Wait in the main thread, where signals are heard between two waits."""
        deadline_s = SYSTEM_CLOCK.monotonic() + self._timeout_s + _SPARE_S
        while not work.is_completed():
            if SYSTEM_CLOCK.monotonic() > deadline_s:
                raise TimeoutError("late")
            if tensor.is_cuda:
                SYSTEM_CLOCK.sleep(_CUDA_POLL_S)
                continue
            try:
                work.wait(_POLL)
            except RuntimeError:
                if work.is_completed():
                    raise
        work.wait()  # says what went wrong

    def _tell(self, message: bytes) -> bytes:
        (size,) = self._sizes([len(message)])
        data = _as_tensor(message, size)
        if size:
            dist.broadcast(data, 0, group=self._messages)
        return data.numpy().tobytes()

    def _hand_out(self, parts: Sequence[bytes]) -> bytes:
        sizes = self._sizes([len(part) for part in parts] if self.is_first else [0] * self.world_size)
        mine = torch.empty(max(sizes), dtype=torch.uint8)
        padded = [_as_tensor(part, max(sizes)) for part in parts] if self.is_first else None
        if max(sizes):
            dist.scatter(mine, padded, 0, group=self._messages)
        return mine[: sizes[self.rank]].numpy().tobytes()

    def _collect(self, part: bytes) -> list[bytes]:
        found = torch.zeros(self.world_size, dtype=torch.int64)
        found[self.rank] = len(part)
        dist.all_reduce(found, group=self._messages)
        sizes: list[int] = found.tolist()
        if not max(sizes):
            return [b""] * self.world_size if self.is_first else []
        rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if self.is_first else None
        dist.gather(_as_tensor(part, max(sizes)), rows, 0, group=self._messages)
        return [row[:size].numpy().tobytes() for row, size in zip(rows or [], sizes, strict=False)]

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        """Rank 0's, on every rank."""
        found = torch.tensor(sizes, dtype=torch.int64)
        dist.broadcast(found, 0, group=self._messages)
        return [int(size) for size in found]


def _in_time(join: Callable[[], None], timeout_s: float) -> None:
    """Join in a thread of its own: torch waits without end where something else listens at the job's address.

    Raises:
        RuntimeError: it is late; the thread ends with the process.
    """
    joined: Future[None] = Future()

    def run() -> None:
        try:
            join()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            joined.set_exception(error)
        else:
            joined.set_result(None)

    threading.Thread(target=run, name="rank-join", daemon=True).start()
    if not wait([joined], timeout_s).done:
        raise RuntimeError("what listens at MASTER_ADDR and MASTER_PORT does not answer as a job does")
    joined.result()


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one kind that are small enough to be sent together."""
    buckets: list[list[Tensor]] = []
    room, kind = 0, None
    for tensor in tensors:
        if tensor.nbytes > room or (tensor.dtype, tensor.device) != kind:
            buckets.append([])
            room, kind = _BUCKET_BYTES, (tensor.dtype, tensor.device)
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets


def _spread(whole: Tensor, bucket: Sequence[Tensor]) -> None:
    """Put what stands in one tensor into those that it was made of."""
    parts = torch.split(whole.reshape(-1), [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        if tensor.data_ptr() != part.data_ptr():
            tensor.copy_(part.view(tensor.shape))


def _as_tensor(message: bytes, size: int) -> Tensor:
    """[size] uint8, with zeros behind the message."""
    return torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8) if size else _NOTHING


def _is_late(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or "imed out" in str(error)


def _reason(error: Exception) -> str:
    """What torch says, without where in its sources, and advice."""
    return str(error).splitlines()[0].split("] ", 1)[-1].split(". This is")[0][:300] or type(error).__name__
