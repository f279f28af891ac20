"""Where the two sides of a pair group meet: a TCPStore of torch's beside the server.

It asks for no token, and whoever can reach its port can read what lies there, and write. So it is where the server
listens, and answers only once a client that has the token wants a pair; beyond one machine it is for networks of which
every host is trusted.
"""

import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # public, but its stub hides them

from eaglefeed.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["MeetingPlace", "store_at"]

_START = timedelta(seconds=30)
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - looked for, not bound


def store_at(host: str, port: int, key: str, timeout_s: float) -> "Store":
    """What one pair shares at a meeting place, over a connection of its own: one that waits blocks no other.

    Torch asks the DNS for the name of the other side's address: one that does not answer takes five seconds or ten. A
    port where something else listens and says nothing blocks for longer than the timeout.

    Args:
        host: without brackets.
        port: of the meeting place.
        key: the pair's.
        timeout_s: for connecting, and for each later wait.

    Raises:
        RuntimeError: nobody answers there.
    """
    timeout = timedelta(seconds=timeout_s)
    return PrefixStore(key, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))


class MeetingPlace:
    """The server's store: its port is taken at once, but nobody reads what comes there before the first `store`.

    Args:
        host: where the server listens.
        port: 0 for a free one.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = _ANY.get(host, host)
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        try:
            self._bound = _bound(host, port)
        except (OSError, OverflowError) as error:
            fix = "stop what listens there, or give another --nccl-port (0 takes a free one)"
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)[:200]
            what, subject = "cannot listen for pair groups", f"{host} port {port}"
            raise ConfigError(what, subject=subject, got=reason, fix=fix) from None
        self.port: int = self._bound.getsockname()[1]

    def store(self, key: str, timeout_s: float) -> "Store":
        """The server's own side; see `store_at`.

        Raises:
            RuntimeError: it is closed, or cannot listen.
        """
        with self._lock:
            if self._store is None:
                self._store = self._listening()
        return store_at(self._host, self.port, key, timeout_s)

    def _listening(self) -> TCPStore:
        if (fd := self._bound.detach()) < 0:
            raise RuntimeError("nobody listens for pair groups any more")
        return TCPStore(
            self._host, self.port, is_master=True, wait_for_workers=False, timeout=_START, master_listen_fd=fd
        )

    def forget(self, key: str) -> None:
        """Remove what a pair left there; a torch without list_keys leaves some hundred bytes a pair."""
        with self._lock:
            if self._store is not None and hasattr(self._store, "list_keys"):
                for name in self._store.list_keys():
                    if name.startswith(f"{key}/"):
                        self._store.delete_key(name)

    def close(self) -> None:
        """Listen no more."""
        with self._lock:
            self._store = None
            self._bound.close()


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()  # or another process could take the port too
    except BaseException:
        bound.close()
        raise
    return bound
