"""What a process holds of the items that it leased."""

import threading
from collections import defaultdict
from collections.abc import Iterable

from eaglefeed.queue.renewal import LeaseRenewer

__all__ = ["Holdings"]


class Holdings:
    """The ids that this process holds, by lease; a lease is renewed as long as it holds one."""

    def __init__(self, renewer: LeaseRenewer) -> None:
        self._renewer = renewer
        self._ids: dict[int, dict[str, None]] = defaultdict(dict)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many items are held."""
        with self._lock:
            return sum(map(len, self._ids.values()))

    def keep_up(self) -> bool:
        """See LeaseRenewer: before the next lease."""
        return self._renewer.keep_up()

    def add(self, token: int, ids: Iterable[str]) -> None:
        """Hold these items of a lease from now on."""
        with self._lock:
            self._ids[token].update(dict.fromkeys(ids))
            self._renewer.add(token)

    def settle(self, token: int, ids: Iterable[str]) -> None:
        """These are no longer held. Call it before the call that settles them, for the last one ends the lease."""
        with self._lock:
            for item_id in ids:
                self._ids[token].pop(item_id, None)
            if not self._ids[token]:
                del self._ids[token]
                self._renewer.forget(token)

    def drain(self) -> dict[int, list[str]]:
        """Stop holding anything; returns what was held, in the order in which it was leased."""
        with self._lock:
            held = {token: list(ids) for token, ids in self._ids.items()}
            self._ids.clear()
            for token in held:
                self._renewer.forget(token)
        return held
