"""What a server must be so that it loses no acknowledged work: refused where it would, warned of where it might."""

import re
from typing import NamedTuple

from eaglefeed.errors import UnsafeServer
from eaglefeed.logs import get_logger

__all__ = ["Verdict", "check_server", "judge", "refuses_writes"]

_log = get_logger(__name__)

_NEARLY_ALL = 0.98
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


class Verdict(NamedTuple):
    """Something that a server loses work by, for certain (refused) or perhaps."""

    refused: bool
    what: str
    fix: str
    wanted: str | None = None
    got: str | None = None


def check_server(address: str, info: dict[str, str]) -> None:
    """Judge a server by its INFO; what INFO does not tell cannot be verified and is warned of.

    Raises:
        UnsafeServer: it evicts keys, is a replica, or is older than 6.2.
    """
    verdicts = judge(info)
    for verdict in verdicts:
        if verdict.refused:
            _, what, fix, wanted, got = verdict
            raise UnsafeServer(what, subject=address, wanted=wanted, got=got, fix=fix)
    for verdict in verdicts:
        _log.warning("server_may_lose_work", address=address, what=verdict.what, fix=verdict.fix)


def judge(info: dict[str, str]) -> list[Verdict]:
    """All that a server's INFO says against it."""
    verdicts = [_judge_mode(info), _judge_version(info), _judge_role(info), _judge_policy(info)]
    if info.get("aof_enabled") == "0":
        verdicts.append(_warning("no append-only file: a restart of the server loses the run", "set appendonly yes"))
    missing = [name for name in ("role", "maxmemory_policy", "aof_enabled", "redis_version") if name not in info]
    if missing:
        fix = "allow INFO, or check noeviction and appendonly yourself"
        verdicts.append(_warning(f"cannot verify {', '.join(missing)}", fix))
    return [verdict for verdict in verdicts if verdict is not None]


def refuses_writes(info: dict[str, str]) -> str:
    """Why a server refuses to keep anything, or may, and what to do; "" where its INFO says nothing of that."""
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if most and used - int(info.get("mem_not_counted_for_evict", 0)) >= _NEARLY_ALL * most:
        return "its memory is full: raise its maxmemory, or let trainers catch up"
    if info.get("aof_enabled") == "1" and info.get("aof_last_write_status", "ok") != "ok":
        return "it cannot write its append-only file: free space on its disk"
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return "its last snapshot failed, and it may refuse writes: free space on its disk, or see its log"
    return ""


def _judge_mode(info: dict[str, str]) -> Verdict | None:
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        fix = "use the address of the primary that it watches"
        return Verdict(True, "a Sentinel, which keeps nothing", fix, wanted="a primary", got="a Sentinel")
    if info.get("cluster_enabled") == "1":
        what = "a node of a cluster: it serves the run only while it keeps the slot of the run's keys"
        return _warning(what, "use a server outside of a cluster")
    return None


def _judge_role(info: dict[str, str]) -> Verdict | None:
    if info.get("role") != "slave":
        return None
    return Verdict(True, "a replica", "use the address of its primary", wanted="a primary", got="role slave")


def _judge_policy(info: dict[str, str]) -> Verdict | None:
    policy = info.get("maxmemory_policy", "noeviction")
    fix = "set maxmemory-policy noeviction"
    if policy.startswith("allkeys"):
        return Verdict(True, "it may evict the queue", fix, wanted="noeviction", got=policy)
    if policy == "noeviction":
        return None
    return _warning(
        f"maxmemory-policy {policy}: the replies that it keeps may go, a repeated call may then run twice", fix
    )


def _judge_version(info: dict[str, str]) -> Verdict | None:
    version = _version(info)
    if version is None:
        return None
    if version.series < _OLDEST:
        wanted = "Redis 6.2 or Valkey 7.2, or later"
        return Verdict(True, "too old", "upgrade the server", wanted=wanted, got=version.text)
    fixed = _FIXED[version.product]
    if version.series > max(fixed) or version.patch >= fixed.get(version.series, version.patch + 1):
        return None
    patched = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in fixed.items())
    what = f"{version.product} {version.text} lacks the fix of CVE-2025-49844, unless its distributor put it in"
    return _warning(what, f"upgrade to {patched} or later")


def _warning(what: str, fix: str) -> Verdict:
    return Verdict(False, what, fix)


def _version(info: dict[str, str]) -> _Version | None:
    """Valkey tells its own version beside a redis_version of 7.2.4, which is not what it is."""
    product = "valkey" if "valkey_version" in info else "redis"
    text = info.get(f"{product}_version", "")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return _Version(product, text, (int(match[1]), int(match[2])), int(match[3])) if match else None
