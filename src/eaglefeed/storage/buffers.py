"""Memory that samples are read into: fresh, or a ring of warm buffers that are used again."""

import contextlib
import itertools
import mmap
import threading
import weakref
from collections import deque

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import BuffersHeld, ConfigError, StorageError
from eaglefeed.logs import get_logger

__all__ = ["BufferRing", "fresh_memory", "memory_for", "refuse_in_worker"]

_HUGE_PAGE_BYTES = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_POLL_S, _TELL_S = 0.005, 5.0

log = get_logger(__name__)


def fresh_memory(num_bytes: int) -> memoryview:
    """Writable memory of the caller's own, aligned to a page; it lives as long as any view of it."""
    if num_bytes == 0:
        return memoryview(bytearray())
    return memoryview(_pages(num_bytes))


def memory_for(num_bytes: int, ring: "BufferRing | None", holder: str) -> memoryview:
    """Memory for one sample's data, out of the ring if there is one; see BufferRing.take."""
    if ring is None or num_bytes == 0:
        return fresh_memory(num_bytes)
    return ring.take(num_bytes, holder).numpy().data


def refuse_in_worker(subject: str) -> None:
    """Refuse what touches CUDA in a DataLoader's worker: a forked one cannot, and others would each take a context.

    Raises:
        ConfigError: this is one.
    """
    if get_worker_info() is not None:
        what, wanted = "CUDA and NCCL are not for a DataLoader's worker", "device=cpu and data_plane=http"
        fix = (
            "pass num_workers=0: streams and targets read ahead by themselves; or move batches in the training process"
        )
        raise ConfigError(what, subject=subject, wanted=wanted, got="a worker", fix=fix)


def _pages(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class BufferRing:
    """A bounded set of warm buffers; one is used again when the storage of the last view of it has died.

    It never is before: a slice, a view or a dict that still holds one of a sample's tensors keeps the whole buffer,
    whether the sample was acknowledged or not.

    Args:
        num_buffers: at most this many at a time; made when first needed.
        deadline_s: how long `take` waits for one when all are held.
        device: where samples go. For CUDA a buffer is page-locked when it is made; drop a sample in a thread whose
            current stream on that device is the one that copied it.
        stop: when set, `take` waits no longer.
        clock: measures the deadline.

    Raises:
        ConfigError: for CUDA, in a DataLoader's worker.
    """

    def __init__(
        self,
        num_buffers: int,
        *,
        deadline_s: float = 120.0,
        device: torch.device | None = None,
        stop: threading.Event | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._num_buffers, self._deadline_s, self._clock = num_buffers, deadline_s, clock
        self._cuda = device if device is not None and device.type == "cuda" else None
        if self._cuda is not None:
            refuse_in_worker(str(device))
        self._stop = stop or threading.Event()
        self._num_made, self._largest_bytes = 0, 0
        self._lock = threading.Lock()
        # These two change by single atomic operations, without the lock: a buffer comes back in whatever thread drops
        # the last view of it, also in a garbage collection that began while that thread held the lock.
        self._free: deque[tuple[memoryview, torch.cuda.Event | None]] = deque()
        self._holders: dict[int, str] = {}
        self._tickets = itertools.count()

    def take(self, num_bytes: int, holder: str) -> Tensor:
        """A buffer, as a uint8 tensor [num_bytes]; what stands in it is left over from its last use.

        Args:
            num_bytes: at least 1.
            holder: the sample's id, named to whoever waits in vain.

        Raises:
            BuffersHeld: none came back before the deadline.
            StorageError: stopped while it waited.
        """
        pages = self._free_or_new(num_bytes)
        view, ticket = pages[:num_bytes], next(self._tickets)
        self._holders[ticket] = holder
        weakref.finalize(view, self._give_back, ticket, pages).atexit = False
        # The storage keeps `view` itself and nothing else does, so `view` dies with the last storage.
        return torch.frombuffer(view, dtype=torch.uint8)

    def held(self) -> list[str]:
        """Who holds a buffer now."""
        return sorted(self._holders.copy().values())

    def _give_back(self, ticket: int, pages: memoryview) -> None:
        # A copy to the device may still read a pinned buffer; only torch's own allocator would know of it.
        # Of its device: the thread's current one may be another.
        copied = torch.cuda.current_stream(self._cuda).record_event() if self._cuda is not None else None
        del self._holders[ticket]
        self._free.append((pages, copied))

    def _free_or_new(self, num_bytes: int) -> memoryview:
        pages = self._wait_for_free()
        if pages is not None and len(pages) >= num_bytes:
            return pages
        del pages  # so that there are never more than num_buffers
        try:
            return self._make(num_bytes)
        except BaseException:
            with self._lock:
                self._num_made -= 1
            raise

    def _wait_for_free(self) -> memoryview | None:
        """A free buffer, or None for the right to make one."""
        started_s, is_told = self._clock.monotonic(), False
        while True:
            with contextlib.suppress(IndexError):
                pages, copied = self._free.pop()
                if copied is not None:
                    copied.synchronize()
                return pages
            with self._lock:
                if self._num_made < self._num_buffers:
                    self._num_made += 1
                    return None
            if self._stop.is_set():
                raise StorageError("stopped while it waited for a read buffer")
            waited_s = self._clock.monotonic() - started_s
            if waited_s >= self._deadline_s:
                raise BuffersHeld(self.held(), num_buffers=self._num_buffers, waited_s=self._deadline_s)
            if waited_s >= _TELL_S and not is_told:
                log.warning("waiting_for_a_read_buffer", num_buffers=self._num_buffers, held_by=self.held())
                is_told = True
            self._clock.sleep(_POLL_S)

    def _make(self, num_bytes: int) -> memoryview:
        # As large as the largest so far: samples of mixed sizes soon replace no buffer any more.
        self._largest_bytes = max(self._largest_bytes, -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
        if self._cuda is not None:
            return torch.empty(self._largest_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        pages = _pages(self._largest_bytes)
        with contextlib.suppress(OSError):  # an older kernel: the first read fills them
            pages.madvise(_MADV_POPULATE_WRITE)
        return memoryview(pages)
