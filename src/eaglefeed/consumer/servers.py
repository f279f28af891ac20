"""Which target server a request goes to: in turn among those that are well, and when one that failed is asked again."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from eaglefeed.clock import Clock
from eaglefeed.errors import EaglefeedError, TargetMismatch, TargetUnavailable
from eaglefeed.logs import get_logger

__all__ = ["PROBE_EVERY_S", "ServerBook", "backoff_s"]

PROBE_EVERY_S = 2.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, _MOST_DOUBLINGS = 0.1, 5.0, 10

log = get_logger(__name__)


def backoff_s(attempt: int, random: Random) -> float:
    """How long to wait before attempt 1, 2, …: anything up to 0.1 s, 0.2 s, … 5 s, so that clients do not come at once.

    Source: "full jitter" of the AWS architecture blog's Exponential Backoff And Jitter.
    """
    bound_s = _FIRST_BACKOFF_S * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS)
    return random.uniform(0.0, min(_LONGEST_BACKOFF_S, bound_s))


@dataclass
class _Server:
    url: str
    num_requests: int = 0
    error: str = ""
    was_out: bool = False
    out_since_s: float = 0.0
    probe_at_s: float = 0.0


class ServerBook:
    """What is known of each server: whether it is well, and how many requests it works on.

    Args:
        urls: of the servers, at least one; everywhere else a server is its place in them.
        clock: measures how long a server is out, and when it is to be probed.
    """

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self._servers = [_Server(url) for url in urls]
        self._clock, self._lock, self._next = clock, threading.Lock(), 0

    @contextmanager
    def turn(self, tried: Collection[int]) -> Iterator[int]:
        """The server that is to have a request: a well one, not in `tried`, with the fewest requests, in turn.

        Where there is none such, one that is out or was tried: its request shows whether it has come back.
        """
        with self._lock:
            index = min(range(len(self._servers)), key=lambda index: self._rank(index, tried))
            self._next = index + 1
            self._servers[index].num_requests += 1
        try:
            yield index
        finally:
            with self._lock:
                self._servers[index].num_requests -= 1

    def _rank(self, index: int, tried: Collection[int]) -> tuple[bool, bool, int, int]:
        server = self._servers[index]
        return bool(server.error), index in tried, server.num_requests, (index - self._next) % len(self._servers)

    def failed(self, index: int, error: EaglefeedError) -> None:
        """A request or a probe found that the server does not answer: it is out until one finds that it does."""
        server, now_s = self._servers[index], self._clock.monotonic()
        said = _said(server.url, error)
        with self._lock:
            # That another target came back is news, for no waiting helps against it.
            is_news = not server.error or (isinstance(error, TargetMismatch) and server.error != said)
            was_well, server.error = not server.error, said
            if was_well:
                server.was_out, server.out_since_s, server.probe_at_s = True, now_s, now_s + PROBE_EVERY_S
        if is_news:
            log.warning("target_server_out", server=server.url, reason=said)

    def answered(self, index: int) -> None:
        """The server answered, so it is well."""
        server = self._servers[index]
        with self._lock:
            was_well, server.error = not server.error, ""
        if not was_well:
            away_s = round(self._clock.monotonic() - server.out_since_s, 3)
            log.info("target_server_back", server=server.url, away_s=away_s)

    def well(self) -> list[int]:
        """The servers that are not out."""
        with self._lock:
            return [index for index, server in enumerate(self._servers) if not server.error]

    def can_spare(self, index: int) -> bool:
        """Whether another is well, and this one was out before: what is wrong with it came later than the training."""
        return self._servers[index].was_out and any(other != index for other in self.well())

    def due(self) -> list[int]:
        """The servers that are to be probed now: those that are out, each at most every two seconds."""
        now_s = self._clock.monotonic()
        with self._lock:
            found = [index for index, server in enumerate(self._servers) if server.error and server.probe_at_s <= now_s]
            for index in found:
                self._servers[index].probe_at_s = now_s + PROBE_EVERY_S
        return found

    def outage(self) -> TargetUnavailable | None:
        """That all servers are out, and why each of them is; None while one is well."""
        with self._lock:
            if not all(server.error for server in self._servers):
                return None
            said = [server.error for server in self._servers]
        if len(said) == 1:
            return TargetUnavailable("the target server is out", got=said[0])
        return TargetUnavailable(f"all {len(said)} target servers are out", got=" | ".join(said))


def _said(url: str, error: EaglefeedError) -> str:
    """The error's text, its server named; not the error, whose traceback would keep an answer's memory."""
    return str(error) if url in str(error) else f"{url}: {error}"
