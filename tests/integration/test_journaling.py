"""What a run's workers and feeds write into its journal, and that it never stops or slows the work."""

import threading
from collections.abc import Iterator
from pathlib import Path

import fakeredis
import pytest
import structlog
import torch

from commands import Shell, conversation, run_server, save_tiny_target, write_rows
from eaglefeed.cli import journaling
from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.feed_note import noted
from eaglefeed.cli.journaling import add_fact, journaled
from eaglefeed.config import load_settings
from eaglefeed.errors import QueueUnavailable
from eaglefeed.ops.bottleneck import bottleneck
from eaglefeed.ops.facts import RunFacts, read_run
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import QueueItem
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.journal import JournalView, RunJournal

torch.set_num_threads(1)
NUM_ROWS = 6


def queues_of(client: QueueClient, run: str = "default") -> RunQueues:
    return RunQueues(client, run, open_queue(client, run, "prompts"), open_queue(client, run, "samples"))


# by the commands


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def queues(tmp_path: Path) -> Iterator[RunQueues]:
    """The run's server, kept running between commands."""
    with run_server(tmp_path / "runs" / "default") as client:
        yield queues_of(client)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    rows = [conversation(index) for index in range(NUM_ROWS)]
    write_rows(tmp_path / "rows.jsonl", [*rows, rows[0], "no JSON", {"id": "evil \ud800", "messages": 3}])
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=128")


def test_a_run_by_its_commands_tells_who_fed_produced_and_trained_it(
    shell: Shell, queues: RunQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaling, "_EVERY_S", 0.02)
    for words in (["feed", "rows.jsonl"], ["produce"], ["train", "train.group=main"]):
        ended = shell.run(*words)
        assert ended.code == 0, ended.err
    facts = read_run(queues)
    check_feed(facts)
    producer, trainer = facts.journal.workers
    assert (producer.role, producer.values["state"], producer.values["produced"]) == ("producer", "ended", NUM_ROWS)
    assert producer.values["num_tokens"] == facts.journal.facts["feed:1"]["tokens"]
    assert set(producer.values["versions"]) == {"eaglefeed", "python", "torch"}
    assert producer.values["started_s"] <= producer.at_s
    assert (trainer.role, trainer.values["state"], trainer.values["group"]) == ("trainer", "ended", "main")
    assert (trainer.values["step"], trainer.values["num_steps"], trainer.values["acked"]) == (NUM_ROWS,) * 3
    assert (trainer.values["world_size"], trainer.values["epoch"]) == (1, 0)
    assert trainer.values["loss"] > 0
    assert len(trainer.values["accuracies"]) == 3
    assert 0 <= trainer.values["data_wait"] <= 1
    assert facts.journal.facts["export:1"]["step"] == NUM_ROWS
    assert {"queue/prompts/main/ready", "queue/samples/main/stored_bytes"} <= set(facts.journal.series[0])
    assert facts.contract is not None
    assert facts.is_drained
    assert bottleneck(facts).kind == "drained"
    assert facts.started_s <= facts.ended_s
    assert shell.run("queue", "purge", "--yes", "--force").code == 0
    assert read_run(queues).journal == JournalView()


def check_feed(facts: RunFacts) -> None:
    fact = facts.journal.facts["feed:1"]
    told = {name: fact[name] for name in ("path", "accepted", "duplicates", "rejected", "items", "queued", "known")}
    assert told == {
        "path": "rows.jsonl",
        "accepted": NUM_ROWS,
        "duplicates": 1,
        "rejected": 2,
        "items": NUM_ROWS,
        "queued": NUM_ROWS,
        "known": 0,
    }
    assert sum(fact["reasons"].values()) == 2
    assert [row[:2] for row in fact["rejections"]] == [[NUM_ROWS + 2, ""], [NUM_ROWS + 3, "evil \\ud800"]]
    assert fact["settings"]["max_length"] == 128
    assert "refused" not in fact
    assert facts.journal.totals["feed.rejected"] == 2
    assert facts.journal.totals["feed.tokens"] == fact["tokens"] > 0


def test_a_feed_that_is_refused_on_the_way_says_so(shell: Shell, queues: RunQueues) -> None:
    assert shell.run("feed", "rows.jsonl").code == 0
    write_rows(Path("more.jsonl"), [conversation(index) for index in range(50, 53)])
    assert shell.run("feed", "more.jsonl").code != 0  # the prompts are closed
    journal = RunJournal(queues.client, queues.run).read()
    refused = journal.facts["feed:2"]
    assert refused["refused"].startswith("QueueClosed: prompts: closed")
    assert "queued" not in refused
    assert journal.totals["feed.count"] == 2
    assert journal.totals["feed.queued"] == NUM_ROWS


def test_a_feed_that_was_interrupted_is_not_told_as_one_that_came_to_its_end(fake: RunQueues) -> None:
    document = {"accepted": 3, "reasons": {}, "rejections": []}
    with pytest.raises(KeyboardInterrupt), noted(load_settings(None, []), fake, Path("rows.jsonl"), document):
        raise KeyboardInterrupt
    assert RunJournal(fake.client, fake.run).read().facts["feed:1"]["refused"] == "KeyboardInterrupt"


# the thread


@pytest.fixture
def server() -> fakeredis.FakeServer:
    return fakeredis.FakeServer()


@pytest.fixture
def fake(server: fakeredis.FakeServer, monkeypatch: pytest.MonkeyPatch) -> RunQueues:
    monkeypatch.setattr(journaling, "_EVERY_S", 0.005)
    return queues_of(QueueClient(fakeredis.FakeRedis(server=server).connection_pool, address="redis://away"))


def wait_until(holds: object) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if holds():  # type: ignore[operator]
            return
        pause.wait(0.005)
    raise AssertionError("it did not come")


def test_a_worker_is_there_at_once_and_its_end_is_told(fake: RunQueues) -> None:
    journal = RunJournal(fake.client, fake.run)
    count = iter(range(10**6))
    with journaled(fake, "producer", "w", lambda: {"count": next(count), "state": "working"}):
        wait_until(lambda: journal.read().workers)
        assert journal.read().workers[0].values["state"] == "working"
        wait_until(lambda: journal.read().workers[0].values["count"] > 2)
    values = journal.read().workers[0].values
    assert values["state"] == "ended"
    assert values["count"] == next(count) - 1
    assert len(journal.read().series) in (1, 2)  # however often it asked; two where a stretch ended meanwhile


def test_when_a_worker_began_is_told_by_the_server_s_clock_whatever_its_own_machine_s_says(fake: RunQueues) -> None:
    with journaled(fake, "producer", "w", lambda: {"started_s": 5.0}):
        pass
    (worker,) = RunJournal(fake.client, fake.run).read().workers
    assert worker.at_s - 60 < worker.values["started_s"] <= worker.at_s
    began_s = worker.values["started_s"]
    assert read_run(fake).started_s == pytest.approx(began_s, abs=1e-3)  # a point of the same moment tells milliseconds


def test_what_goes_on_in_another_state_has_no_end_in_between(fake: RunQueues) -> None:
    journal = RunJournal(fake.client, fake.run)
    with journaled(fake, "producer", "w", lambda: {"state": "loading its target"}, goes_on=True):
        wait_until(lambda: journal.read().workers)
    assert journal.read().workers[0].values["state"] == "loading its target"
    with (
        pytest.raises(ZeroDivisionError),
        journaled(fake, "producer", "w", lambda: {"state": "loading its target"}, goes_on=True),
    ):
        raise ZeroDivisionError
    assert journal.read().workers[0].values["state"] == "ended by ZeroDivisionError"


def test_a_worker_that_fails_tells_by_what(fake: RunQueues) -> None:
    with pytest.raises(ZeroDivisionError), journaled(fake, "trainer", "t", dict):
        raise ZeroDivisionError
    assert RunJournal(fake.client, fake.run).read().workers[0].values["state"] == "ended by ZeroDivisionError"


def test_without_queues_nothing_is_written_and_nobody_asked() -> None:
    def never() -> dict[str, float]:
        raise AssertionError

    with journaled(None, "trainer", "t", never):
        pass


def test_an_outage_is_told_once_and_the_journal_goes_on_when_it_is_over(
    fake: RunQueues, server: fakeredis.FakeServer
) -> None:
    calls = iter(range(10**6))
    made = []

    def snapshot() -> dict[str, int]:
        made.append(next(calls))
        return {"calls": made[-1]}

    with structlog.testing.capture_logs() as logs, journaled(fake, "producer", "w", snapshot):
        wait_until(lambda: made)
        server.connected = False
        before = len(made)
        wait_until(lambda: len(made) > before + 5)
        server.connected = True
        wait_until(lambda: RunJournal(fake.client, fake.run).read().workers[0].values["calls"] > before + 6)
        server.connected = False
        before = len(made)
        wait_until(lambda: len(made) > before + 3)
        server.connected = True
    told = [line for line in logs if line["event"] == "journal_not_written"]
    assert len(told) == 2
    assert "queue_away" not in {line["event"] for line in logs}


def test_a_snapshot_that_fails_does_not_end_the_work_nor_the_journal(fake: RunQueues) -> None:
    calls = []

    def snapshot() -> dict[str, int]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a dictionary changed its size")
        return {"calls": len(calls)}

    with structlog.testing.capture_logs() as logs, journaled(fake, "producer", "w", snapshot):
        wait_until(lambda: len(calls) > 2)
    assert [line["event"] for line in logs] == ["journal_not_written"]
    assert RunJournal(fake.client, fake.run).read().workers[0].values["calls"] > 1


def test_a_server_that_does_not_answer_holds_the_end_up_for_a_bounded_time(
    fake: RunQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaling, "_END_S", 0.05)
    release = threading.Event()

    def hang() -> dict[str, float]:
        release.wait(30)
        return {}

    with journaled(fake, "producer", "w", hang):
        pass  # and the test is here again
    assert not release.is_set()
    release.set()
    wait_until(lambda: not any(each.name == "eaglefeed-journal" for each in threading.enumerate()))


def test_a_fact_that_cannot_be_written_is_told_and_raises_nothing(
    fake: RunQueues, server: fakeredis.FakeServer
) -> None:
    server.connected = False
    with structlog.testing.capture_logs() as logs:
        add_fact(fake, "feed", {"path": "x"})
    assert [line["event"] for line in logs] == ["journal_not_written"]
    with pytest.raises(QueueUnavailable):
        fake.client.impatient().call("PING")


def test_a_journal_at_the_servers_memory_limit_is_given_up_and_work_goes_on(fake: RunQueues) -> None:
    fake.prompts.put([QueueItem("a", b"x")])
    with structlog.testing.capture_logs() as logs:
        add_fact(fake, "feed", {"text": "x" * 100_000})
        add_fact(fake, "feed", {"tokens": 2**64})  # more than msgpack can say
    assert "too large" in logs[0]["reason"]
    assert fake.prompts.stats().ready == 1
