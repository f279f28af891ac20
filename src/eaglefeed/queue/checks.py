"""What a server must be so that it loses no acknowledged work: refused where it would, warned of where it might."""

import re
from typing import NamedTuple

from eaglefeed.errors import UnsafeServer
from eaglefeed.logs import get_logger

__all__ = ["check_server"]

_log = get_logger(__name__)

_OLDEST = (6, 2)
_FIXED = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
"""The first patch of each series with the fix of CVE-2025-49844; all later series have it."""


class _Version(NamedTuple):
    product: str
    text: str
    series: tuple[int, int]
    patch: int


def check_server(address: str, info: dict[str, str]) -> None:
    """Judge a server by its INFO; what INFO does not tell cannot be verified and is warned of.

    Raises:
        UnsafeServer: it evicts keys, is a replica, or is older than 6.2.
    """
    _check_version(address, info)
    if info.get("role") == "slave":
        fix = "use the address of its primary"
        raise UnsafeServer("a replica", subject=address, wanted="a primary", got="role slave", fix=fix)
    _check_policy(address, info)
    if info.get("aof_enabled") == "0":
        _warn(address, "no append-only file: a restart of the server loses the run", "set appendonly yes")
    missing = [name for name in ("role", "maxmemory_policy", "aof_enabled", "redis_version") if name not in info]
    if missing:
        _warn(address, f"cannot verify {', '.join(missing)}", "allow INFO, or check noeviction and appendonly yourself")


def _check_policy(address: str, info: dict[str, str]) -> None:
    policy = info.get("maxmemory_policy", "noeviction")
    fix = "set maxmemory-policy noeviction"
    if policy.startswith("allkeys"):
        raise UnsafeServer("it may evict the queue", subject=address, wanted="noeviction", got=policy, fix=fix)
    if policy != "noeviction":
        what = f"maxmemory-policy {policy}: the replies that it keeps may go, a repeated call may then run twice"
        _warn(address, what, fix)


def _check_version(address: str, info: dict[str, str]) -> None:
    version = _version(info)
    if version is None:
        return
    if version.series < _OLDEST:
        wanted = "Redis 6.2 or Valkey 7.2, or later"
        raise UnsafeServer("too old", subject=address, wanted=wanted, got=version.text, fix="upgrade the server")
    fixed = _FIXED[version.product]
    if version.series > max(fixed) or version.patch >= fixed.get(version.series, version.patch + 1):
        return
    patched = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in fixed.items())
    what = f"{version.product} {version.text} lacks the fix of CVE-2025-49844, unless its distributor put it in"
    _warn(address, what, f"upgrade to {patched} or later")


def _version(info: dict[str, str]) -> _Version | None:
    """Valkey tells its own version beside a redis_version of 7.2.4, which is not what it is."""
    product = "valkey" if "valkey_version" in info else "redis"
    text = info.get(f"{product}_version", "")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return _Version(product, text, (int(match[1]), int(match[2])), int(match[3])) if match else None


def _warn(address: str, what: str, fix: str) -> None:
    _log.warning("server_may_lose_work", address=address, what=what, fix=fix)
