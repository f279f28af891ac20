"""A clean stop on a signal."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupted_by_term", "stop_on_signals"]


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop` (drain), the second raises KeyboardInterrupt."""
    seen: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt
        sys.stderr.write("eaglefeed: finishing the item in hand; once more to stop now\n")
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_by_term() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt meanwhile, as Ctrl-C does: what was begun is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
