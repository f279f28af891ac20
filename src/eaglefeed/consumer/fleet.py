"""Several servers of one target, called as one: whoever answers, answers."""

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.remote_server import RemoteServer
from eaglefeed.consumer.servers import ServerBook, backoff_s
from eaglefeed.errors import EaglefeedError, SampleCorrupt, TargetError, TargetMismatch, TargetUnavailable
from eaglefeed.schema.protocol import ModelInfo
from eaglefeed.storage.control import Abort

__all__ = ["Fleet", "GiveUp"]

T = TypeVar("T")


class GiveUp:
    """Ends a call from another thread, wherever it stands: in an exchange, or between two attempts."""

    def __init__(self) -> None:
        self.abort = Abort()
        self._event = threading.Event()

    def set(self) -> None:
        """End it."""
        self._event.set()
        self.abort.set()

    @property
    def is_set(self) -> bool:
        """Whether it is to end."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> None:
        """Pause for a time.

        Raises:
            TargetError: it is to end.
        """
        if self._event.wait(timeout_s):
            raise TargetError("given up")


class Fleet:
    """Servers of one target; any number of threads may share it.

    Args:
        servers: at least one.
        max_retries: further attempts of a call, each on the next server.
    """

    def __init__(self, servers: Sequence[RemoteServer], *, max_retries: int) -> None:
        self._servers, self._max_retries = servers, max_retries
        self._book = ServerBook([server.url for server in servers], SYSTEM_CLOCK)
        self._random, self._lock = Random(), threading.Lock()  # noqa: S311  jitter, not a secret
        self._info: ModelInfo | None = None

    def call(self, operation: Callable[[RemoteServer, ModelInfo], T], given_up: GiveUp) -> T:
        """What the first server gives that succeeds.

        Args:
            operation: takes a server, and what the target of all servers is.
            given_up: ends it from another thread.

        Raises:
            TargetUnavailable: every server is out; names each with its error.
            TargetMismatch: a server has another target than the first one that answered; but one that comes back, or
                comes up later, with another is just out while any other server is well.
            EaglefeedError: what no other attempt would change; or the last attempt's, while a server is well.
        """
        tried: set[int] = set()
        attempt = 1
        while True:
            try:
                with self._book.turn(tried) as index:
                    tried.add(index)
                    return self._once(index, operation, given_up)
            except EaglefeedError as error:
                if given_up.is_set or not _may_pass(error):
                    raise
                if attempt > self._max_retries:
                    error.__traceback__ = None  # its frames would keep an answer's memory
                    raise (self._book.outage() or error) from None
            given_up.wait(backoff_s(attempt, self._random))
            attempt += 1

    def call_all(self, operation: Callable[[RemoteServer, ModelInfo], object], given_up: GiveUp) -> None:
        """Call every server that is well, and at least one.

        Raises:
            EaglefeedError: see `call`; also of one server where no other attempt would change it.
        """
        first = self.call(lambda server, info: (operation(server, info), server)[1], given_up)
        for index in self._book.well():
            if self._servers[index] is not first:
                try:
                    self._once(index, operation, given_up)
                except EaglefeedError as error:
                    if given_up.is_set or not _may_pass(error):
                        raise

    def _once(self, index: int, operation: Callable[[RemoteServer, ModelInfo], T], given_up: GiveUp) -> T:
        server = self._servers[index]
        try:
            result = operation(server, self._known(index, given_up.abort))
        except EaglefeedError as error:
            if _may_pass(error) and not given_up.is_set:
                server.forget()
                self._book.failed(index, error)
            raise
        self._book.answered(index)
        return result

    def _known(self, index: int, abort: Abort) -> ModelInfo:
        try:
            return self._info_of(self._servers[index], abort)
        except TargetMismatch as error:
            if not self._book.can_spare(index):
                raise
            wanted, got = error.wanted, error.got
            raise TargetUnavailable(error.what, subject=error.subject, wanted=wanted, got=got, fix=error.fix) from None

    def _info_of(self, server: RemoteServer, abort: Abort) -> ModelInfo:
        info = server.model_info(abort)
        with self._lock:
            self._info = self._info or info
        if info != self._info:
            self._info.require(info, server.url)
        return self._info

    def due(self) -> list[int]:
        """The servers to `probe` now."""
        return self._book.due()

    def probe(self, index: int, given_up: GiveUp) -> None:
        """Look whether a server that is out has come back, with the target that it had."""
        server = self._servers[index]
        try:
            server.check_ready(given_up.abort)
            self._info_of(server, given_up.abort)
        except EaglefeedError as error:
            server.forget()
            self._book.failed(index, error)
        else:
            self._book.answered(index)

    def well(self) -> list[RemoteServer]:
        """The servers that are not out."""
        return [self._servers[index] for index in self._book.well()]

    def close(self) -> None:
        """Hang up."""
        for server in self._servers:
            server.close()


def _may_pass(error: EaglefeedError) -> bool:
    """Whether another attempt may go well, best at another server; what is damaged here is whole where it was made."""
    return error.retryable or isinstance(error, SampleCorrupt)
