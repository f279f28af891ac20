"""The doctor's look at the queue's server: what it is, what it would lose, what this user may, how far its clock is.

It writes to throw-away keys alone, `eaglefeed:{run}:doctor-<random>:…`, and removes them.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

from redis.exceptions import NoScriptError

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import QueueError
from eaglefeed.ops.doctor import Finding, Said, fail, look, ok, skipped, warn
from eaglefeed.ops.wording import human_bytes
from eaglefeed.queue import open_queue
from eaglefeed.queue.checks import judge
from eaglefeed.queue.connection import NotPermitted, QueueClient, read_info
from eaglefeed.queue.journal import RunJournal

__all__ = ["REF_BYTES", "RIGHTS", "RunSize", "examine_queue"]

REF_BYTES = 1500
"""Server memory that a sample's ref takes until it is done, measured with refs of 1 KB."""

_NUM_PINGS = 21
_MAX_CLOCK_S = 2.0
_USED_WARN, _USED_FAIL = 0.8, 0.95
_SPARE_CONNECTIONS = 64
_LIFE_MS = "60000"
_KINDS = _HASH, _LIST, _SET, _ZSET = "hash", "list", "set", "zset"

RIGHTS: dict[str, tuple[str, ...]] = {
    "HSET": (_HASH, "f", "1"),
    "HSETNX": (_HASH, "f", "1"),
    "HINCRBY": (_HASH, "f", "1"),
    "HGET": (_HASH, "f"),
    "HMGET": (_HASH, "f"),
    "HLEN": (_HASH,),
    "HSCAN": (_HASH, "0"),
    "HDEL": (_HASH, "f"),
    "RPUSH": (_LIST, "a"),
    "LPUSH": (_LIST, "b"),
    "LLEN": (_LIST,),
    "LRANGE": (_LIST, "0", "1"),
    "LREM": (_LIST, "1", "b"),
    "LTRIM": (_LIST, "0", "9"),
    "LPOP": (_LIST, "1"),
    "BLPOP": (_LIST, "0.01"),
    "SADD": (_SET, "m"),
    "SCARD": (_SET,),
    "SISMEMBER": (_SET, "m"),
    "SMISMEMBER": (_SET, "m"),
    "SREM": (_SET, "m"),
    "ZADD": (_ZSET, "1", "m"),
    "ZCARD": (_ZSET,),
    "ZCOUNT": (_ZSET, "0", "2"),
    "ZSCORE": (_ZSET, "m"),
    "ZMSCORE": (_ZSET, "m"),
    "ZRANGE": (_ZSET, "0", "1"),
    "ZRANGEBYSCORE": (_ZSET, "0", "1"),
    "ZREM": (_ZSET, "n"),
    "ZREMRANGEBYRANK": (_ZSET, "5", "6"),
    "ZREMRANGEBYSCORE": (_ZSET, "5", "6"),
    "ZPOPMAX": (_ZSET, "1"),
    "EXISTS": (_HASH,),
    "PEXPIRE": (_HASH, _LIFE_MS),
    "PTTL": (_HASH,),
    "UNLINK": (_HASH,),
    "TIME": (),
    "EVAL": ("return 1", "0"),
    "EVALSHA": ("0" * 40, "0"),
}
"""What the queue needs of its server's user, each with arguments that do no harm; the first names a throw-away key.

INFO is looked at by itself, and SELECT is what the connection has done.
"""


class RunSize(NamedTuple):
    """What was fed to a run.

    Args:
        num_items: work items.
        num_bytes: of all their samples, as `feed` estimates them.
        num_left: items whose samples are still to be produced.
    """

    num_items: int
    num_bytes: int
    num_left: int


def examine_queue(
    opened: Callable[[], QueueClient],
    run: str,
    *,
    high_count: int,
    learned: Callable[[RunSize], None] = lambda _: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[Finding]:
    """Look at a server.

    Args:
        opened: gives a client of it that has judged nothing yet; it is closed at the end.
        run: whose keys are tried.
        high_count: how many samples the run may hold (queue.high_count).
        learned: is told the run's size, if something was fed.
        clock: this machine's.
    """
    found: list[tuple[QueueClient, dict[str, str]]] = []
    fix = "check that a Redis or Valkey server listens there"
    yield from look("queue.reachable", partial(_reach, opened, found), fix=fix)
    if not found:
        return
    client, info = found[0]
    try:
        yield from look("queue.safety", partial(_safety, info))
        yield from look("queue.persistence", partial(_persistence, client, info))
        yield from look("queue.memory", partial(_memory, info, high_count))
        yield from look("queue.connections", partial(_connections, info))
        yield from look("queue.rights", partial(_rights, client, run))
        yield from look("queue.run", partial(_run_size, client, run, learned))
        yield from look("queue.clock", partial(_clock, client, clock))
        yield from look("queue.latency", partial(_latency, client, clock))
    finally:
        client.close()


def _reach(opened: Callable[[], QueueClient], found: list[tuple[QueueClient, dict[str, str]]]) -> Iterator[Said]:
    client = opened()
    try:
        info = read_info(client)
    except BaseException:
        client.close()
        raise
    found.append((client, info))
    product = "valkey" if "valkey_version" in info else "redis"
    version = info.get(f"{product}_version")
    yield ok(f"{client.address}: {product} {version}" if version else f"{client.address} answers")


def _safety(info: dict[str, str]) -> Iterator[Said]:
    verdicts = judge(info)
    for _, what, fix, wanted, got in (verdict for verdict in verdicts if verdict.refused):
        yield fail(f"{what}, wanted {wanted}, got {got}", fix)
    yield from (warn(verdict.what, verdict.fix) for verdict in verdicts if not verdict.refused)
    if not verdicts:
        yield ok("a primary with noeviction, an append-only file and no known hole")


def _persistence(client: QueueClient, info: dict[str, str]) -> Iterator[Said]:
    broken = [
        name
        for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
        if info.get(name, "ok") != "ok"
    ]
    for name in broken:
        yield fail(
            f"{name} is {info[name]}: its disk refuses writes, and soon it will too", "free its disk, see its log"
        )
    if info.get("aof_enabled") != "1":
        yield skipped("no append-only file to look at", "see queue.safety")
        return
    try:
        policy = client.call("CONFIG", "GET", "appendfsync")[1].decode()
    except (NotPermitted, QueueError):  # a rented server may have no CONFIG for its users
        yield skipped("appendfsync: the server does not tell this user", "it should be everysec or always")
        return
    if policy == "no":
        yield warn("appendfsync no: a lost machine loses half a minute of acks", "set appendfsync everysec, or always")
    elif not broken:
        yield ok(f"append-only file, appendfsync {policy}")


def _memory(info: dict[str, str], high_count: int) -> Iterator[Said]:
    if "used_memory" not in info:
        yield skipped("this user may not ask for it")
        return
    used, bound = int(info["used_memory"]), int(info.get("maxmemory", 0))
    of = bound or int(info.get("total_system_memory", 0))
    if not of:
        yield skipped("the server does not tell how much it may take")
        return
    refs, name = max(of - used, 0) // REF_BYTES, "maxmemory" if bound else "the machine's memory"
    what = f"{used / 2**20:.0f} of {of / 2**20:.0f} MiB ({name}) in use, room for some {refs} more samples' refs"
    fix = "raise maxmemory, or lower queue.high_count" if bound else "use a larger machine, or lower queue.high_count"
    if used > _USED_FAIL * of and bound:
        yield fail(what, fix)
    elif (used > _USED_WARN * of and bound) or refs < high_count:
        yield warn(f"{what}; queue.high_count is {high_count}", fix)
    else:
        yield ok(what)


def _connections(info: dict[str, str]) -> Iterator[Said]:
    if "maxclients" not in info:
        yield skipped("the server does not tell its maxclients")
        return
    used, bound = int(info["connected_clients"]), int(info["maxclients"])
    what = f"{used} of {bound} connections in use"
    yield ok(what) if bound - used >= _SPARE_CONNECTIONS else warn(what, "raise maxclients, or stop who holds them")


def _rights(client: QueueClient, run: str) -> Iterator[Said]:
    base = f"eaglefeed:{{{run}}}:doctor-{secrets.token_hex(8)}"
    denied = list[str]()
    try:
        for command, args in RIGHTS.items():
            if not _may(client, command, args, base):
                denied.append(command)
            elif args and args[0] in _KINDS:
                _may(client, "PEXPIRE", (args[0], _LIFE_MS), base)  # should this process be killed now
    finally:
        for kind in _KINDS:
            _may(client, "UNLINK", (kind,), base)
    if not denied:
        yield ok(f"this user may run all {len(RIGHTS)} commands on the run's keys")
        return
    fix = "grant it what deploy/users.acl.template lists, on the keys eaglefeed:*"
    told = "any command" if len(denied) == len(RIGHTS) else ", ".join(denied)
    yield fail(f"this user may not run {told} on the keys of run {run}", fix)


def _may(client: QueueClient, command: str, args: tuple[str, ...], base: str) -> bool:
    first = (f"{base}:{args[0]}",) if args and args[0] in _KINDS else args[:1]
    try:
        client.call(command, *first, *args[1:])
    except NotPermitted:
        return False
    except NoScriptError:
        return True
    return True


def _run_size(client: QueueClient, run: str, learned: Callable[[RunSize], None]) -> Iterator[Said]:
    totals = RunJournal(client, run).read(last_points=0).totals
    items, queued, num_bytes = (totals.get(f"feed.{name}", 0) for name in ("items", "queued", "num_bytes"))
    if not items or not queued:
        yield ok(f"run {run}: nothing was fed yet")
        return
    left = min(open_queue(client, run, "prompts").stats().unsettled, queued)
    size = RunSize(queued, num_bytes * queued // items, left)  # what was known already was fed again
    learned(size)
    told = f"{queued} items were fed, whose samples take {human_bytes(size.num_bytes)}; {left} are still to be produced"
    yield ok(f"run {run}: {told}")


def _clock(client: QueueClient, clock: Clock) -> Iterator[Said]:
    before_s = clock.time()
    seconds, micros = client.call("TIME")
    ahead_s = int(seconds) + int(micros) / 1e6 - (before_s + clock.time()) / 2
    what = f"the server's clock is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    if abs(ahead_s) > _MAX_CLOCK_S:
        yield warn(f"{what}: reports mix times of both", "run NTP (chrony, systemd-timesyncd) on both")
    else:
        yield ok(what)


def _latency(client: QueueClient, clock: Clock) -> Iterator[Said]:
    took_s = []
    for _ in range(_NUM_PINGS):
        started_s = clock.monotonic()
        client.call("TIME")
        took_s.append(clock.monotonic() - started_s)
    yield ok(f"a command takes {median(took_s) * 1000:.2f} ms (p50 of {_NUM_PINGS}, at most {max(took_s) * 1000:.2f})")
