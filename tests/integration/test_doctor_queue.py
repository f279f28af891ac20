"""The doctor's look at queue servers: a real one, misconfigured in each way; and what its user may do."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import queue_servers
from commands import Shell
from doctors import found, only, worst
from eaglefeed.clock import ManualClock
from eaglefeed.ops import doctor_queue
from eaglefeed.ops.doctor import Finding
from eaglefeed.ops.doctor_queue import RIGHTS, RunSize, examine_queue
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import Lease, QueueItem
from eaglefeed.queue.connection import QueueClient, connect, open_client, read_info
from eaglefeed.queue.journal import RunJournal
from faults.access_server import RIGHTS as GRANTED
from faults.access_server import SERVERS, Server, started

pytestmark = pytest.mark.skipif(not SERVERS, reason="no server is installed")


@pytest.fixture(scope="module", params=sorted(SERVERS))
def admin(request: pytest.FixtureRequest) -> Iterator[QueueClient]:
    with queue_servers.connected(SERVERS[request.param]) as client:
        yield client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(min(SERVERS), tmp_path_factory.mktemp("server")) as running:
        yield running


@contextmanager
def configured(admin: QueueClient, **options: str) -> Iterator[None]:
    """A server with other options, until the end of the block."""
    names = {name.replace("_", "-"): value for name, value in options.items()}
    before = {name: admin.call("CONFIG", "GET", name)[1] for name in names}
    for name, value in names.items():
        admin.call("CONFIG", "SET", name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            admin.call("CONFIG", "SET", name, value)


def another(client: QueueClient) -> QueueClient:
    """A client of the same server that has judged nothing."""
    return open_client(client.address, max_wait_s=0.1)


def looked_well(findings: list[Finding]) -> bool:
    """Whether all is well but for a distributor's server, whose version does not show the fixes that were put in."""
    return all(each.status in {"ok", "skipped"} or "lacks the fix of CVE" in each.what for each in findings)


def look_at(client: QueueClient, **options: Any) -> list[Finding]:
    return list(examine_queue(lambda: another(client), "run", **{"high_count": 1000} | options))


def test_a_server_that_is_well_passes_and_no_key_is_left_on_it(admin: QueueClient) -> None:
    findings = look_at(admin)
    assert looked_well(findings), findings
    assert worst(findings, "queue.rights").status == "ok"
    assert admin.call("KEYS", "*") == []
    assert re.search(r"(valkey|redis) \d+\.\d+", worst(findings, "queue.reachable").what)


@pytest.mark.parametrize(
    ("options", "check", "status", "words"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "queue.safety", "fail", "may evict the queue"),
        ({"maxmemory_policy": "volatile-ttl"}, "queue.safety", "warn", "may then run twice"),
        ({"appendonly": "no"}, "queue.safety", "warn", "no append-only file"),
        ({"appendfsync": "no"}, "queue.persistence", "warn", "appendfsync no"),
        ({"maxmemory": "1"}, "queue.memory", "fail", "maxmemory"),
        ({"maxmemory": "1"}, "queue.rights", "fail", "out of memory"),
        ({"maxmemory": "3mb"}, "queue.memory", "warn", "queue.high_count is 1000"),
        ({"maxclients": "20"}, "queue.connections", "warn", "of 20 connections"),
        ({"replicaof": "127.0.0.1 1"}, "queue.safety", "fail", "a replica"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_each_misconfiguration_is_told_with_its_fix(
    admin: QueueClient, options: dict[str, str], check: str, status: str, words: str
) -> None:
    if "replicaof" in options:
        admin.call("REPLICAOF", *options["replicaof"].split())
        try:
            findings = look_at(admin)
        finally:
            admin.call("REPLICAOF", "NO", "ONE")
    else:
        with configured(admin, **options):
            findings = look_at(admin)
    [told] = [each for each in findings if each.check == check and words in each.what]
    assert told.status == status
    assert told.fix
    assert admin.call("KEYS", "*") == []


def test_an_append_only_file_that_cannot_be_written_fails(admin: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_queue, "read_info", lambda client: read_info(client) | {"aof_last_write_status": "err"})
    finding = worst(look_at(admin), "queue.persistence")
    assert (finding.status, "aof_last_write_status is err" in finding.what) == ("fail", True)


def test_clocks_that_differ_are_told(admin: QueueClient) -> None:
    finding = worst(look_at(admin, clock=ManualClock()), "queue.clock")
    assert (finding.status, "ahead of this machine's" in finding.what) == ("warn", True)


def test_what_was_fed_is_learned_from_the_runs_journal(admin: QueueClient) -> None:
    journal = RunJournal(admin, "run")
    journal.append("feed", {}, {"items": 3, "queued": 3, "num_bytes": 3 * 2**20})
    journal.append("feed", {}, {"items": 5, "queued": 2, "num_bytes": 5 * 2**20})  # three of them once more
    prompts = open_queue(admin, "run", "prompts")
    prompts.put([QueueItem(f"i{number}", b"") for number in range(5)])
    lease = prompts.lease(1, visibility_timeout_s=60, consumer="p", wait_s=0)
    assert isinstance(lease, Lease)
    prompts.ack(lease.token, [lease.items[0].id])
    sizes: list[RunSize] = []
    finding = worst(look_at(admin, learned=sizes.append), "queue.run")
    prompts.purge()
    journal.delete()
    assert sizes == [RunSize(5, 5 * 2**20, 4)]
    assert finding.what == "run run: 5 items were fed, whose samples take 5.0 MiB; 4 are still to be produced"


def test_nobody_who_answers_is_one_failure_with_what_to_check(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eaglefeed.cli.doctor._WAIT_S", 0.1)
    monkeypatch.setenv("EAGLEFEED_REDIS_URL", "redis://:a-password@127.0.0.1:9")
    ended = shell.run(*only("queue"))
    assert (ended.code, len(ended.document["findings"])) == (3, 1)
    finding = found(ended, "queue.reachable")
    assert "not reachable" in finding["what"]
    assert "check that the server runs" in finding["fix"]
    assert "a-password" not in ended.out + ended.err


def test_a_server_that_accepts_and_says_nothing_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eaglefeed.queue.connection._MIN_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        findings = list(examine_queue(lambda: open_client(url, max_wait_s=0.1), "run", high_count=1))
    assert [(each.check, each.status) for each in findings] == [("queue.reachable", "fail")]


def test_a_server_that_has_no_config_is_looked_at_as_far_as_it_goes(
    admin: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = QueueClient.call

    def without_config(client: QueueClient, *command: Any) -> Any:
        return call(client, *("RENAMED" if word == "CONFIG" else word for word in command))

    monkeypatch.setattr(QueueClient, "call", without_config)
    findings = look_at(admin)
    assert worst(findings, "queue.persistence").status == "skipped"
    assert looked_well(findings), findings


def test_the_rights_that_are_tried_are_those_of_the_acl_file() -> None:
    granted = {word.removeprefix("+").upper() for word in GRANTED if word.startswith("+")}
    assert granted == {*RIGHTS, "INFO", "SELECT"}


def look_as(server: Server, user: str) -> list[Finding]:
    url = server.url.replace("eaglefeed@", f"{user}@")
    return list(examine_queue(lambda: open_client(url, password="word", max_wait_s=0.5), "run", high_count=1))


def test_the_acl_files_user_has_all_rights_and_is_told_what_it_may_not_see(server: Server) -> None:
    findings = look_as(server, "eaglefeed")
    assert worst(findings, "queue.rights").status == "ok"
    assert worst(findings, "queue.persistence").status == "skipped"
    assert looked_well(findings), findings
    assert server.admin.call("KEYS", "*") == []


@pytest.mark.parametrize("missing", sorted(RIGHTS))
def test_each_right_that_is_missing_is_named_and_no_key_stays(server: Server, missing: str) -> None:
    rights = ["~eaglefeed:*", *GRANTED, f"-{missing.lower()}"]
    server.admin.call("ACL", "SETUSER", "less", "reset", "on", ">word", *rights)
    with_it = connect(server.url.replace("eaglefeed@", "less@"), password="word", max_wait_s=0.5)
    [finding] = [Finding("x", *vars(said).values()) for said in doctor_queue._rights(with_it, "run")]
    with_it.close()
    assert finding.status == "fail"
    assert f"may not run {missing} on" in finding.what
    assert "deploy/users.acl.template" in finding.fix
    keys = server.admin.call("KEYS", "*")
    assert all(server.admin.call("PTTL", key) > 0 for key in keys), "removed, or about to expire"
    for key in keys:
        server.admin.call("DEL", key)


def test_a_user_of_other_keys_is_told_so_at_once(server: Server) -> None:
    server.admin.call("ACL", "SETUSER", "less", "reset", "on", ">word", "~other:*", *GRANTED)
    finding = worst(look_as(server, "less"), "queue.rights")
    assert finding.status == "fail"
    assert "eaglefeed:*" in finding.fix


def test_a_user_that_may_not_ask_info_is_looked_at_as_far_as_it_goes(server: Server) -> None:
    server.admin.call("ACL", "SETUSER", "less", "reset", "on", ">word", "~eaglefeed:*", *GRANTED, "-info")
    findings = look_as(server, "less")
    assert worst(findings, "queue.safety").status == "warn"
    assert worst(findings, "queue.memory").status == "skipped"
    assert worst(findings, "queue.rights").status == "ok"


def test_a_wrong_password_is_told_and_not_shown(server: Server, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"redis://eaglefeed:not-it-at-all@127.0.0.1:{server.port}/0"
    monkeypatch.setenv("EAGLEFEED_REDIS_URL", url)
    ended = shell.run(*only("queue"))
    assert found(ended, "queue.reachable")["status"] == "fail"
    assert "not-it-at-all" not in ended.out + ended.err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)
