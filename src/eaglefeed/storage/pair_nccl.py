"""A pair over NCCL. It needs two GPUs: NCCL refuses a pair of processes on the same one."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from eaglefeed.storage.pair_group import PairGroup
from eaglefeed.storage.wire import Deadline

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["NcclPair", "nccl_group"]

_POLL_S, _ABORT_S = 0.0002, 5.0
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()


def nccl_group(store: "Store", rank: int) -> "dist.ProcessGroupNCCL":
    """A group of torch's, which connects when it is first used.

    Its calls do not block: a blocked one could not be aborted, and the first one of a communicator waits for the peer.

    Raises:
        RuntimeError: no GPU, or NCCL does not work.
        ImportError: a torch without NCCL.
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options.config.blocking = 0
    with _spared_process():
        return ProcessGroupNCCL(store, rank, 2, options)


@contextmanager
def _spared_process() -> Iterator[None]:
    """Have the group that is made in the block leave errors to us.

    Else torch ends the process when the peer dies. It takes this from the environment alone, when a group is made; the
    user's own groups are not to be changed by it, so it stands there for no longer than that.
    """
    with _environment:
        before = os.environ.get(_ERROR_HANDLING)  # noqa: TID251 - torch's, not ours
        os.environ[_ERROR_HANDLING] = "0"  # noqa: TID251 - see above
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]  # noqa: TID251 - see above
            else:
                os.environ[_ERROR_HANDLING] = before  # noqa: TID251 - see above


class NcclPair(PairGroup):
    """One send a tensor, in order on NCCL's stream, behind what the caller's current stream holds.

    The death of the other process shows at once where NCCL uses sockets or InfiniBand; between GPUs of one machine it
    shows only when the deadline passes.
    """

    def _send(self, tensors: Sequence[Tensor], guard: Tensor, deadline: Deadline) -> None:
        with self._aborted_at(deadline):
            works = [self._group.send([tensor], self._peer, 0) for tensor in (guard, *tensors)]
            self._finish([*works, self._group.recv([self._mark.clone()], self._peer, 0)], deadline)

    def _receive(
        self, memories: Sequence[Tensor], guard: Tensor, arrived: Callable[[int], object], deadline: Deadline
    ) -> None:
        with self._aborted_at(deadline):
            found = torch.empty_like(guard)
            self._finish([self._group.recv([found], self._peer, 0)], deadline)
            self._require(found, guard)
            self._finish([self._group.recv([memory], self._peer, 0) for memory in memories], deadline)
            arrived(sum(memory.numel() for memory in memories))
            self._finish([self._group.send([self._mark], self._peer, 0)], deadline)

    def _drop(self, last: list[Any]) -> None:
        # In a thread of its own, since an abort is known to hang now and then.
        thread = threading.Thread(target=lambda: last.pop().abort(), name="nccl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    @contextmanager
    def _aborted_at(self, deadline: Deadline) -> Iterator[None]:
        """Abort the group if the block still runs then: a call in it may block, the first one above all."""
        timer = threading.Timer(deadline.left(), self._group.abort)
        timer.daemon = True
        timer.start()
        try:
            with torch.cuda.device(self._device):
                yield
            deadline.left()  # aborted work may look complete
        finally:
            timer.cancel()

    def _finish(self, works: "list[dist.Work]", deadline: Deadline) -> None:
        for work in works:
            while not work.is_completed():
                deadline.left()
                self._clock.sleep(_POLL_S)
            work.wait()  # says what went wrong
