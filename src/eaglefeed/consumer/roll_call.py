"""Who of a job's ranks is there: each notes how far it has come, and shows a sign of life, in the job's store."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # public, but its stub hides it

from eaglefeed.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["RollCall"]

_BEAT_S, _LOOK_S = 0.5, 2.0
_LINGER_S, _POLL_S = 5.0, 0.05
_ANSWER = timedelta(seconds=10)


class RollCall:
    """A rank's notes, and what it reads in those of the others once something went wrong.

    Args:
        store: the job's; used over connections of our own, for one that waits blocks its other users.
        name: of these notes, equal on all ranks.
        rank: this one.
        world_size: how many there are.

    Raises:
        RuntimeError: the store is out of reach.
    """

    def __init__(self, store: "Store", name: str, rank: int, world_size: int) -> None:
        connections = (store.clone() for _ in range(2))  # type: ignore[attr-defined] # public, but not in its stub
        self._notes, self._beats = (PrefixStore(name, connection) for connection in connections)
        self._notes.set_timeout(_ANSWER)
        self._rank, self._world_size = rank, world_size
        self._counts = [0, 0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rank-beat", daemon=True)
        self._missing: tuple[int, ...] = ()
        for key in ("0", "1", "beat", "left"):
            self._notes.set(f"{key}/{rank}", "0")

    def start(self) -> None:
        """Show signs of life from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Leave. The store may live in rank 0: that waits a little for those that still want to read in it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_LOOK_S)
        with contextlib.suppress(RuntimeError):
            self._notes.set(f"left/{self._rank}", "1")
            if self._rank == 0:
                self._linger()

    def _linger(self) -> None:
        others = set(self._others()) - set(self._missing)
        deadline_s = SYSTEM_CLOCK.monotonic() + _LINGER_S
        while not all(self._read("left", others).values()) and SYSTEM_CLOCK.monotonic() < deadline_s:
            SYSTEM_CLOCK.sleep(_POLL_S)

    def note(self, *, is_message: bool) -> None:
        """This rank comes to the next call of this kind. A store that is gone is seen by the call itself."""
        self._counts[is_message] += 1
        with contextlib.suppress(RuntimeError):
            self._notes.set(f"{int(is_message)}/{self._rank}", str(self._counts[is_message]))

    def missing(self, *, is_message: bool, was_late: bool) -> tuple[int, ...]:
        """Which ranks did not come to the last call of this kind; the first rank that asks decides it for all.

        Args:
            is_message: the kind.
            was_late: somebody did not come in time; else a connection broke.
        """
        try:
            late = self._behind(is_message)
            if not (late and was_late):
                # It broke: of those behind, who died? Nobody is behind: it died, or stands still, in the call itself.
                late = self._silent(late or self._others()) or late
            if not late:
                return ()
            told = self._notes.compare_set("missing", "", ",".join(map(str, late)))
        except RuntimeError:  # it lives in rank 0, or in the launcher on its machine
            return () if self._rank == 0 else (0,)
        self._missing = tuple(int(rank) for rank in told.decode().split(",") if rank)
        return self._missing

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        before = self._read("beat", ranks)
        SYSTEM_CLOCK.sleep(_LOOK_S)
        after = self._read("beat", ranks)
        return [rank for rank in ranks if before[rank] == after[rank]]

    def _behind(self, is_message: bool) -> list[int]:
        found = self._read(str(int(is_message)), self._others())
        return [rank for rank, count in found.items() if count < self._counts[is_message]]

    def _read(self, key: str, ranks: Iterable[int]) -> dict[int, int]:
        return {rank: int(self._notes.get(f"{key}/{rank}")) for rank in ranks}

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(_BEAT_S):
            count += 1
            try:
                self._beats.set(f"beat/{self._rank}", str(count))
            except RuntimeError:  # rank 0 has ended
                return
