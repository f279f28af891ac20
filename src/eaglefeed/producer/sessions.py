"""Trainings that share a target server, each with a draft vocabulary of its own."""

from dataclasses import dataclass

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import StorageError
from eaglefeed.logs import get_logger
from eaglefeed.producer.engine import Selected

__all__ = ["MAX_SESSIONS", "Sessions"]

MAX_SESSIONS = 1024
log = get_logger(__name__)


@dataclass
class _Session:
    selected: Selected
    used_s: float


class Sessions:
    """Session → draft vocabulary; one that is idle too long is forgotten, and the longest idle one to make room.

    A forgotten client is told so, and sends its map again. Of one thread.

    Args:
        idle_s: how long a session lives without a sign of its client.
        max_sessions: at a time.
        clock: measures it.
    """

    def __init__(self, *, idle_s: float, max_sessions: int = MAX_SESSIONS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._idle_s, self._max_sessions, self._clock = idle_s, max_sessions, clock
        self._sessions: dict[str, _Session] = {}  # the longest idle first

    def __len__(self) -> int:
        """Sessions now."""
        self._forget_idle()
        return len(self._sessions)

    def begin(self, session: str, selected: Selected) -> None:
        """Answer this session's requests over a draft vocabulary from now on."""
        self._forget_idle()
        self._sessions.pop(session, None)
        if len(self._sessions) >= self._max_sessions:
            oldest = next(iter(self._sessions))
            log.warning("session_forgotten_for_another", session=oldest, max_sessions=self._max_sessions)
            del self._sessions[oldest]
        self._sessions[session] = _Session(selected, self._clock.monotonic())

    def use(self, session: str) -> Selected:
        """The session's draft vocabulary; keeps it alive.

        Raises:
            StorageError: no such session (any more).
        """
        self._forget_idle()
        found = self._sessions.pop(session, None)
        if found is None:
            fix = "send the vocabulary map again, and repeat the request"
            raise StorageError("unknown session", subject=session, fix=fix)
        self._sessions[session] = _Session(found.selected, self._clock.monotonic())
        return found.selected

    def end(self, session: str) -> None:
        """Forget a session, if there is one."""
        self._sessions.pop(session, None)

    def _forget_idle(self) -> None:
        oldest_s = self._clock.monotonic() - self._idle_s
        for name in [name for name, session in self._sessions.items() if session.used_s < oldest_s]:
            log.info("session_forgotten", session=name, idle_s=self._idle_s)
            del self._sessions[name]
