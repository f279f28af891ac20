"""Metrics of the commands: shown from early on, each on a port of its own, also where there is no queue."""

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest
import structlog

from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.cli.common import RunQueues, open_queues
from eaglefeed.cli.demo_processes import DemoProcesses
from eaglefeed.cli.showing import run_shown, showing
from eaglefeed.config import load_settings
from eaglefeed.errors import TargetUnavailable
from eaglefeed.ops.bottleneck import bottleneck
from eaglefeed.ops.collector import Shown
from eaglefeed.ops.facts import RunFacts, read_run
from eaglefeed.producer import opening
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import QueueItem
from ports import free_port
from queue_servers import real_servers, running

NUM_ROWS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM_ROWS)])
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.num_threads=1", "target.num_threads=1"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


@contextmanager
def asking(url: str) -> Iterator[Callable[[], list[str]]]:
    """Ask again and again meanwhile, and keep every answer."""
    answers: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.02):
            try:
                with urllib.request.urlopen(url, timeout=5) as reply:
                    answers.append(reply.read().decode())
            except (URLError, ConnectionError):
                continue

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield lambda: answers
    finally:
        stop.set()
        thread.join()


def test_a_port_in_use_ends_the_command_before_it_leases_anything(shell: Shell) -> None:
    assert shell.run("feed", "rows.jsonl").code == 0
    with showing(load_settings(None, [f"metrics.port={(port := free_port())}"]), "producer"):
        ended = shell.run("produce", f"metrics.port={port}")
    assert ended.code == 2
    assert "cannot listen" in ended.err
    assert "metrics.port" in ended.err
    assert shell.run("queue", "stats", "--json").document["prompts"]["ready"] == NUM_ROWS


@pytest.mark.parametrize("command", ["produce", "train"])
def test_no_command_listens_beyond_loopback_without_a_token(shell: Shell, command: str) -> None:
    ended = shell.run(command, "metrics.host=0.0.0.0", "metrics.port=0")
    assert (ended.code, "without a token" in ended.err) == (2, True)


def test_a_trainer_that_waits_for_its_run_is_healthy_and_shows_it_and_says_so(shell: Shell) -> None:
    address = f"http://127.0.0.1:{(port := free_port())}"
    assert shell.run("feed", "rows.jsonl").code == 0
    with asking(f"{address}/health") as healthy, asking(f"{address}/metrics") as scraped:
        ended = shell.run("train", f"metrics.port={port}", "train.start_timeout_s=1")
    assert ended.code == 4
    assert set(healthy()) == {"alive\n"}
    assert f'queue="prompts",run="default",state="ready"}} {NUM_ROWS}.0' in scraped()[-1]
    (worker,) = shell.run("queue", "top", "--once", "--json").document["journal"]["workers"]
    assert (worker["role"], worker["values"]["state"]) == ("trainer", "ended by TargetUnavailable")


def test_a_producer_whose_target_loads_says_so(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunFacts] = []

    def load(*_args: object, **_options: object) -> None:
        with open_queues(load_settings()) as queues:
            while not told or not told[-1].journal.workers:
                told.append(read_run(queues))
        raise TargetUnavailable("cannot be loaded", subject="it")

    assert shell.run("feed", "rows.jsonl").code == 0
    monkeypatch.setattr(opening, "open_target", load)
    assert shell.run("produce").code == 4
    assert told[-1].journal.workers[0].values["state"] == "loading its target"
    assert bottleneck(told[-1]).kind == "starting"


def test_without_a_queue_a_trainer_shows_its_own_numbers(shell: Shell) -> None:
    port = free_port()
    with asking(f"http://127.0.0.1:{port}/metrics") as answers:
        ended = shell.run("train", "rows.jsonl", "--target-backend", "colocated", f"metrics.port={port}")
    assert ended.code == 0, ended.err
    labels = '{group="main",queue="",run="default"}'
    last = answers()[-1]
    assert f"eaglefeed_trainer_step{labels}" in last
    assert "eaglefeed_queue_up" not in last
    assert 'role="trainer"' in last


def test_the_ranks_of_a_machine_listen_on_ports_in_a_row() -> None:
    port = free_port()
    settings = load_settings(None, [f"metrics.port={port}"])
    with showing(settings, "trainer", local_rank=0), showing(settings, "trainer", local_rank=1):
        for rank in (0, 1):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/health", timeout=5) as reply:
                assert reply.read() == b"alive\n"


def test_nobody_listens_without_a_port() -> None:
    with structlog.testing.capture_logs() as logs, showing(load_settings(), "producer"):
        assert logs == []
        assert not [thread for thread in threading.enumerate() if thread.name == "metrics-server"]


def test_the_commands_of_a_demo_take_free_ports() -> None:
    processes = DemoProcesses(load_settings(None, ["metrics.port=9464", "run.id=d"]), threading.Event())
    words = processes._command("produce")
    assert [word for word in words if word.startswith("metrics.")] == ["metrics.port=0"]


def test_the_commands_of_a_demo_show_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = DemoProcesses(load_settings(None, ["redis_url=redis://user@h:1"]), threading.Event())._command("train")
    assert shown[-1] == "redis_url=redis://user@h:1"
    monkeypatch.setenv("EAGLEFEED_REDIS_URL", "redis://user:hunter2@h:1")
    words = DemoProcesses(load_settings(None, ["run.id=d"]), threading.Event())._command("train")
    assert words[-2:] == ["train", "run.id=d"]  # what they inherit says the rest


def test_a_queue_that_goes_away_is_shown_as_down_and_comes_back(tmp_path: Path) -> None:
    binary = next(iter(real_servers().values()))
    shown = Shown("producer", "r")
    with running(binary) as server:
        client = connect(server.url, max_wait_s=20.0)
        queues = RunQueues(client, "r", open_queue(client, "r", "prompts"), open_queue(client, "r", "samples"))
        queues.prompts.put([QueueItem("a", b"x")])
        with run_shown(shown, queues):
            assert 'eaglefeed_queue_up{run="r"} 1.0' in shown.text().decode()
            assert 'eaglefeed_items{group="main",queue="prompts",run="r",state="ready"} 1.0' in shown.text().decode()
        url = server.url
        server.close()
        with run_shown(shown, queues):
            gone = shown.text().decode()
            assert 'eaglefeed_queue_up{run="r"} 0.0' in gone
            assert "eaglefeed_items{" not in gone
            server.start()
            assert server.url == url
        with run_shown(shown, queues):
            assert 'eaglefeed_queue_up{run="r"} 1.0' in shown.text().decode()
        client.close()
