"""What the user of the ACL file may do: all that the queue does, and nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eaglefeed.errors import ConfigError
from eaglefeed.queue import connect, journal, open_queue
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.connection import NotPermitted
from faults.access_server import RIGHTS, ROOT, SERVERS, TEMPLATE, Server, started
from faults.processes import wait_until

SOURCES = ROOT / "src" / "eaglefeed" / "queue"
pytestmark = pytest.mark.skipif(not SERVERS, reason="no server is installed")


@pytest.fixture(scope="module", params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("a folder with spaces") / "in it, one more"
    folder.mkdir()
    with started(request.param, folder) as running:
        yield running


def commands_of_scripts() -> set[str]:
    found = set()
    for script in (SOURCES / "lua").glob("*.lua"):
        text = re.sub(r"--.*", "", script.read_text(encoding="utf-8"))
        named = re.findall(r"\bcall\('([A-Z]+)'", text)
        assert len(named) == len(re.findall(r"call\(", text)), f"{script.name} calls what this test cannot read"
        found.update(named)
    return found


def commands_of_the_client() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.glob("*.py"))
    named = re.findall(r"\bcall\(\s*\"([A-Z]+)\"", text)
    assert len(named) == len(re.findall(r"\.call\(", text)), "a command that this test cannot read"
    return set(named)


def test_the_acl_file_lists_the_commands_of_scripts_and_client_one_by_one_and_no_other() -> None:
    default, user = TEMPLATE.splitlines()
    assert default == "user default reset off ~* &* +@all", "nobody logs in as it, and Redis reads its file as it"
    head, listed = user.split(" -@all ")
    assert head == "user eaglefeed reset on >PASSWORD ~eaglefeed:* resetchannels"
    # scripts are sent packed; and the connection itself selects a database, for an address with another one than 0
    wanted = commands_of_scripts() | commands_of_the_client() | {"EVALSHA", "SELECT"}
    rights = " ".join(f"+{command.lower()}" for command in sorted(wanted))
    assert listed == rights, f"the file's line should end with: {rights}"


@pytest.mark.parametrize("kind", sorted(SERVERS))
def test_a_server_of_these_users_reads_its_file_again(kind: str, tmp_path: Path) -> None:
    """Redis plays what scripts wrote as the default user: one without rights loses the run at every restart."""
    with started(kind, tmp_path) as killed:
        client = killed.user()
        queue = open_queue(client, "run", "prompts")
        queue.put([QueueItem(f"p{index}", b"x") for index in range(9)])
        held = lease(queue, 3)
        assert queue.ack(held.token, ["p0"]).ok == ("p0",)
        wait_until(lambda: b"aof_buffer_length:0\r" in killed.admin.call("INFO", "persistence"))
        client.close()
    with started(kind, tmp_path) as again:
        client = again.user()
        stats = open_queue(client, "run", "prompts").stats()
        assert (stats.ready, stats.leased, stats.done) == (6, 2, 1)
        client.close()
        with pytest.raises(ConfigError, match="refuses the log-in"):
            connect(again.url.replace("eaglefeed@", ""), max_wait_s=0.5)


def lease(queue: LeaseQueue, n: int = 9, **options: Any) -> Lease:
    got = queue.lease(n, visibility_timeout_s=60, consumer="c", **options)
    assert isinstance(got, Lease)
    return got


class Recorded:
    """A queue that notes which of its methods were called."""

    def __init__(self, queue: LeaseQueue, called: set[str]) -> None:
        self._queue, self._called = queue, called

    def __getattr__(self, name: str) -> Any:
        self._called.add(name)
        return getattr(self._queue, name)


def feed_and_produce(prompts: Any, samples: Any, target: LeaseQueue) -> None:
    samples.configure(QueueLimits(high_count=3, low_count=1), groups=["main", "other"])
    assert samples.groups() == ("main", "other")
    assert samples.limits().high_count == 3
    prompts.put([QueueItem(f"i{k}", b"prompt") for k in range(5)])
    prompts.beat("producer", "a")
    got = lease(prompts)
    prompts.renew(got.token, visibility_timeout_s=60)
    for k in range(2):
        prompts.handoff(got.token, f"i{k}", QueueItem(f"i{k}", b"ref", 5), target)
    prompts.handoff(got.token, "i2", QueueItem("i2", b"ref", 5), target, holder="a")
    assert prompts.held_for(target) == 1
    prompts.nack(got.token, ["i3"], reason="bad", retryable=False)
    prompts.nack(got.token, ["i4"], reason="later", delay_s=0)
    assert [letter.id for letter in prompts.dead_letters()] == ["i3"]
    assert list(prompts.dead_reasons()) == [("i3", "bad")]
    assert prompts.requeue(["i3"]) == 1
    prompts.farewell("producer", "a")
    assert prompts.recall(target) == 1
    prompts.close()
    assert not samples.has_room()
    assert not samples.wait_for_room(0.01)


def train(samples: Any) -> None:
    session = samples.restore(0)
    got = lease(samples, session=session)
    samples.ack(got.token, ["i0"], step=1, session=session)
    assert samples.commit(1, session=session) == 1
    session = samples.restore(1, seen=["i1"])
    samples.lease(1, visibility_timeout_s=60, consumer="c", wait_s=0.01, session=session)
    samples.lease(1, visibility_timeout_s=60, consumer="c", wait_s=0.01, session=session)
    assert samples.stats().done == 2


def test_the_files_user_may_do_all_that_the_queue_does(server: Server) -> None:
    called: set[str] = set()
    client = server.user()
    queues = [
        open_queue(client, "all", name, group)
        for name, group in (("prompts", "main"), ("samples", "main"), ("samples", "other"))
    ]
    prompts, samples, other = (Recorded(queue, called) for queue in queues)
    feed_and_produce(prompts, samples, queues[1])
    train(samples)
    assert len(list(samples.payloads())) == 3
    assert samples.known(["i0", "i9"]) == {"i0"}
    assert [item.stored_bytes for item in samples.find(["i0", "i9"])] == [5]
    assert samples.agree("instance", b"x") == b"x"
    assert samples.agreed() == {"instance": b"x"}
    got = lease(other)
    assert samples.leased([got.token]) == {got.token}
    other.ack(got.token, [item.id for item in got.items])
    assert sorted(item.id for item in other.released()) == ["i0", "i1"]
    other.forget(["i0", "i1"])
    assert samples.purge() == 1, "the sample whose producer is gone"
    client.close()
    assert called == LeaseQueue.__abstractmethods__


def test_the_files_user_may_do_all_that_the_journal_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_WORKERS", 1)
    monkeypatch.setattr(journal, "MAX_POINTS", 0)
    client = server.user()
    told = journal.RunJournal(client, "all")
    for worker in ("a", "b"):
        told.post("producer", worker, {"produced": 1})
    told.note("evaluation", {"acceptance_length": 2.5})
    assert told.append("feed", {"path": "x"}, {"accepted": 1}) == 1
    assert told.sample(lambda: {"x": 1})
    view = told.read()
    assert ([worker.name for worker in view.workers], sorted(view.facts)) == (["b"], ["evaluation", "feed:1"])
    assert view.bucket_s == 20
    told.delete()
    assert told.read() == journal.JournalView()
    client.close()


FORBIDDEN = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SHUTDOWN", "NOSAVE"),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "FLUSH"),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("ACL", "LIST"),
    ("REPLICAOF", "NO", "ONE"),
    ("BGREWRITEAOF",),
    ("SAVE",),
    ("MODULE", "LIST"),
    ("PUBLISH", "eaglefeed:x", "x"),
    ("SET", "eaglefeed:x", "x"),
    ("DEL", "eaglefeed:x"),
    ("HGET", "other:x", "x"),
    ("HSET", "eaglefeedx", "x", "x"),
    ("BLPOP", "other:x", "0.01"),
]


@pytest.mark.parametrize("command", FORBIDDEN, ids=" ".join)
def test_the_files_user_may_do_nothing_else(server: Server, command: tuple[str, ...]) -> None:
    client = server.user()
    with pytest.raises(NotPermitted):
        client.call(*command)
    client.close()


@pytest.mark.parametrize(
    "line", ["redis.call('KEYS', '*')", "redis.call('HSET', 'other', 'x', 'x')"], ids=["a command", "a key"]
)
def test_a_script_of_the_files_user_may_do_no_more(server: Server, line: str) -> None:
    client = server.user()
    with pytest.raises(NotPermitted):
        client.call("EVAL", line, 0)
    assert server.admin.call("HGET", "other", "x") is None
    client.close()


@pytest.mark.parametrize("missing", ["hget", "evalsha", "zcard", "hset", "time"])
def test_a_right_that_is_missing_is_told_with_the_file_that_grants_it(server: Server, missing: str) -> None:
    server.admin.call("ACL", "SETUSER", "less", "reset", "on", ">word", "~eaglefeed:*", *RIGHTS, f"-{missing}")
    client = connect(server.url.replace("eaglefeed@", "less@"), password="word", max_wait_s=2.0)
    queue = open_queue(client, "less", "prompts")
    with pytest.raises(NotPermitted, match=r"deploy/users\.acl\.template"):
        use(queue)
    client.close()


def use(queue: LeaseQueue) -> None:
    queue.has_room()
    queue.stats()
    queue.put([QueueItem("a", b"x")])
    lease(queue)


def test_who_has_no_user_may_nothing_and_is_asked_to_log_in(server: Server) -> None:
    with pytest.raises(ConfigError, match="refuses the log-in"):
        connect(f"redis://127.0.0.1:{server.port}", max_wait_s=2.0)
    told = server.admin.call("ACL", "GETUSER", "default")
    flags = dict(zip(told[::2], told[1::2], strict=True))[b"flags"]
    # with nopass, which `off` alone would leave it, the server refuses every host but its own (protected mode)
    assert {b"off"} <= set(flags) <= {b"off", b"sanitize-payload"}
