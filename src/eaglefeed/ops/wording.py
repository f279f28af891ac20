"""Numbers, times and strange texts as people read them."""

import math
from datetime import UTC, datetime

__all__ = ["count", "duration", "human_bytes", "percent", "plain", "rate", "roughly", "significant", "timestamp"]

_KIB = 1024
_HUGE = 1e15
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def count(value: float) -> str:
    """A whole number with its thousands set apart."""
    return f"{value:,.0f}" if abs(value) < _HUGE else f"{value:.2e}"


def human_bytes(num_bytes: float) -> str:
    """A size, such as 1.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < _KIB:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= _KIB
    return f"{significant(num_bytes)} TiB" if num_bytes >= _KIB else f"{num_bytes:.1f} TiB"


def percent(share: float) -> str:
    """A share from 0 to 1; what is neither nothing nor all is never told as if it were."""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{count(share * 100)} %"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent unless it is huge; "not finite" where it is not."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= _HUGE:
        return f"{value:.2e}"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def rate(per_s: float, unit: str = "") -> str:
    """So many a second."""
    return f"{significant(per_s)}{f' {unit}' if unit else ''}/s"


def duration(seconds: float) -> str:
    """How long, in its two largest units."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for unit_s, unit, next_s, following in (
        (_DAY_S, "d", _HOUR_S, "h"),
        (_HOUR_S, "h", _MINUTE_S, "min"),
        (_MINUTE_S, "min", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // next_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {following}" if rest else "")
    return f"{whole} s"


def roughly(seconds: float) -> str:
    """An estimate of how long: to 10 s, and from ten minutes on to the minute."""
    grain_s = 10 if seconds < 10 * _MINUTE_S else _MINUTE_S
    return duration(max(grain_s, round(seconds / grain_s) * grain_s))


def timestamp(at_s: float) -> str:
    """A moment in UTC, to the second."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def plain(text: object, limit: int = 300) -> str:
    """A text from data: what does not print, or would turn its surroundings around, is spelled out; long ones are cut.

    Args:
        text: whatever came.
        limit: most characters of it.
    """
    letters = str(text)
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in letters[:limit])
    return shown if len(letters) <= limit else f"{shown}… ({count(len(letters))} characters)"
