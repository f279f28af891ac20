"""Producers that keep samples and do not answer: how long refs to them wait, and who is told."""

from dataclasses import dataclass

from eaglefeed.clock import Clock
from eaglefeed.errors import PeerGone
from eaglefeed.logs import get_logger

__all__ = ["GoneProducers"]

_MAX_DELAY_S, _TELL_S = 60.0, 60.0
_FORGET_S = 5 * _MAX_DELAY_S

log = get_logger(__name__)


@dataclass
class _Silence:
    error: PeerGone
    since_s: float
    last_s: float
    told_s: float


class GoneProducers:
    """Since when each producer has not answered.

    One that died is soon out of sight, for its refs are parked. One that shows signs of life and cannot be reached from
    here would have its refs go round for ever: they wait longer and longer, and after the grace it is told.

    Args:
        grace_s: how long a producer may be silent.
        fails: whether that is an error then; else it is logged once a minute.
        clock: measures the silence.
    """

    def __init__(self, *, grace_s: float, fails: bool, clock: Clock) -> None:
        self._grace_s, self._fails, self._clock = grace_s, fails, clock
        self._silent: dict[str, _Silence] = {}

    def note(self, uri: str, error: PeerGone, delay_s: float) -> float:
        """It did not answer; returns how long the ref is to wait: at least `delay_s`, and a quarter of the silence."""
        now_s = self._clock.monotonic()
        self._silent = {at: each for at, each in self._silent.items() if now_s - each.last_s < _FORGET_S}
        if uri not in self._silent:  # once, not for each of its refs
            log.warning("peer_gone", producer=uri, reason=str(error))
            self._silent[uri] = _Silence(error, now_s, now_s, now_s - _TELL_S)
        silence = self._silent[uri]
        silence.last_s = now_s
        return max(delay_s, min((now_s - silence.since_s) / 4, _MAX_DELAY_S))

    def answered(self, uri: str) -> None:
        """It did answer."""
        self._silent.pop(uri, None)

    def tell(self, uri: str) -> None:
        """Once its ref is given back.

        Raises:
            PeerGone: it has been silent for the grace, and that is an error.
        """
        now_s, silence = self._clock.monotonic(), self._silent[uri]
        silent_s = now_s - silence.since_s
        if silent_s < self._grace_s or now_s - silence.told_s < _TELL_S:
            return
        silence.told_s = now_s
        fix = "a dead producer's samples are made again, so this one lives: check that its host, port and, for pair "
        fix += "groups, port + 100 can be reached from here, and the host in its --store"
        told = PeerGone(f"no answer for {silent_s:.0f} s", subject=uri, got=silence.error.what, fix=fix)
        if self._fails:
            raise told
        log.error("producer_unreachable", reason=str(told))
