"""Tensors on CUDA, on their way to a file: through two pinned buffers, one copied to while the other is written."""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["CHUNK_BYTES", "staged"]

CHUNK_BYTES = 4 * 2**20
"""Hashed and handed to the kernel at a time: small enough to stay in the processor's cache in between."""


def staged(flat: Tensor) -> Iterator[memoryview]:
    """The bytes of a uint8 tensor [N] on CUDA, in pieces that are valid until the next one is asked for.

    The copies run on a stream of their own that waits for the work queued so far, not for what is queued later: the
    next sample is computed meanwhile.
    """
    device = flat.device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    flat.record_stream(stream)  # its memory is not given to others before the copies are through
    parts = [flat[begin : begin + CHUNK_BYTES] for begin in range(0, len(flat), CHUNK_BYTES)]
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(min(2, len(parts)))]

    def begin(index: int) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            buffers[index % 2][: len(parts[index])].copy_(parts[index], non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
            return event

    copied = [begin(0)] if parts else []
    for index, part in enumerate(parts):
        if index + 1 < len(parts):
            copied.append(begin(index + 1))
        copied.pop(0).synchronize()
        yield buffers[index % 2].numpy().data[: len(part)]
