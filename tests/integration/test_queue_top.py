"""`eaglefeed queue top` on a run's own server: once, in lines, in JSON, and in a terminal that changes its size."""

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from commands import Shell, run_server
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.queue import EmbeddedServer, open_queue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.journal import RunJournal
from eaglefeed.queue.server_process import is_alive
from queue_steps import ids, items, learn, lease, numbered

PATIENCE_S = 60.0
_STYLE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[QueueClient]:
    """A run of 20 prompts, of which 8 are made, 3 of those learned and one is a dead letter."""
    with run_server(tmp_path / "runs" / "default") as opened:
        fill(opened)
        yield opened


def fill(client: QueueClient) -> None:
    prompts, samples = (open_queue(client, "default", name) for name in ("prompts", "samples"))
    prompts.put(items(*numbered(20)))
    held = lease(prompts, 8)
    for name in ids(held):
        prompts.handoff(held.token, name, items(name, stored_bytes=2**20)[0], samples)
    learn(samples, 3, step=1)
    bad = lease(samples, 1)
    samples.nack(bad.token, ids(bad), reason="SampleCorrupt: its checksum differs", retryable=False)
    for role, name in (("producer", "p-1"), ("trainer", "t-1")):
        samples.beat(role, name)
    journal = RunJournal(client, "default")
    journal.post("producer", "p-1", {"host": "left", "state": "working", "produced": 8, "started_s": 5.0})
    journal.append("feed", {"reasons": {"no messages": 2}}, {"rejected": 2})


def test_once_prints_all_there_is_to_know(shell: Shell, client: QueueClient) -> None:
    ended = shell.run("queue", "top", "--once")
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[0][:2] == ["run", "default"]
    rows = {line[0]: line for line in lines if line}
    assert (rows["fed"][1], rows["produced"][1], rows["trained"][1]) == ("20", "8", "3")
    assert rows["prompts"][1:7] == ["open", "12", "0", "0", "8", "0"]
    assert ["samples", "SampleCorrupt", "1"] in lines
    assert ["no", "messages", "2"] in lines
    assert [line for line in lines if line[:3] == ["producer", "p-1", "left"]] != []
    assert ["trainer", "1", "more", "alive", "tells", "nothing", "of", "itself"] in lines


def test_once_in_json_are_the_facts_for_a_program(shell: Shell, client: QueueClient) -> None:
    RunJournal(client, "default").sample(lambda: {"a": 1.0})
    document = shell.run("queue", "top", "--once", "--json").document
    assert document["queues"]["prompts"]["groups"]["main"]["ready"] == 12
    assert [speed["total"] for speed in document["speeds"]] == [20, 8, 3]
    assert document["bottleneck"]["kind"] == "balanced"
    assert [point["a"] for point in document["journal"]["series"]] == [1.0]
    assert document["journal"]["totals"]["feed.rejected"] == 2


def interrupt_after(monkeypatch: pytest.MonkeyPatch, looks: int, between: Any = lambda: None) -> None:
    """Press Ctrl-C in the pause after so many looks; `between` happens in each pause."""
    left = [looks]

    class Event:
        def wait(self, _seconds: float) -> bool:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGINT)
                SYSTEM_CLOCK.sleep(PATIENCE_S)
            between()
            return False

    monkeypatch.setattr("eaglefeed.cli.top.threading.Event", Event)


def test_without_a_terminal_each_look_is_a_line_and_an_interrupt_is_its_end(
    shell: Shell, client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = open_queue(client, "default", "samples")
    interrupt_after(monkeypatch, 3, lambda: learn(samples, 1, step=2))
    ended = shell.run("queue", "top", "--every", "0.1")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert len(lines) == 3
    assert [line.split("trained ")[1].split()[0] for line in lines] == ["3", "4", "5"]
    assert all("1 producer, 1 trainer" in line for line in lines)


def test_a_server_that_is_killed_is_told_and_looked_at_again_when_it_is_back(
    shell: Shell, client: QueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "default" / "queue"
    client.call("CONFIG", "SET", "appendfsync", "always")
    learn(open_queue(client, "default", "samples"), 1, step=2)

    def kill() -> None:
        os.kill(int((folder / "server.pid").read_text()), signal.SIGKILL)
        while is_alive(folder):
            SYSTEM_CLOCK.sleep(0.01)

    again = EmbeddedServer(folder)
    pauses = [kill, lambda: None, again.start]
    interrupt_after(monkeypatch, 4, lambda: pauses.pop(0)())
    try:
        ended = shell.run("queue", "top", "--json")
    finally:
        again.close()
    documents = [json.loads(line) for line in ended.out.splitlines()]
    assert (ended.code, ended.err) == (0, "")
    assert ["queue_away_s" in each for each in documents] == [False, True, True, False]
    assert documents[3]["speeds"][2]["total"] == 4


def test_in_json_each_look_is_a_line_without_the_points(
    shell: Shell, client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunJournal(client, "default").sample(lambda: {"a": 1.0})
    interrupt_after(monkeypatch, 2)
    ended = shell.run("queue", "top", "--json")
    documents = [json.loads(line) for line in ended.out.splitlines()]
    assert (ended.code, len(documents)) == (0, 2)
    assert all("series" not in each["journal"] and each["run"] == "default" for each in documents)


def test_a_run_that_is_not_there_is_one_line_and_is_not_made(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eaglefeed.cli.top._OUTAGE_S", 0.2)
    ended = shell.run("queue", "top")
    assert (ended.code, list(tmp_path.iterdir())) == (2, [])
    assert "no such run here" in ended.err
    away = shell.run("queue", "top", "--redis", f"unix://{tmp_path}/nobody.sock", "--once")
    assert (away.code, "not reachable" in away.err) == (4, True)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(140, 40)
        command = [sys.executable, "-m", "eaglefeed", *words]
        size = ("COLUMNS", "LINES")  # would stand above the terminal's own
        environment = {name: value for name, value in os.environ.items() if name not in size} | {"TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def resize(self, width: int, height: int) -> None:
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read_until(self, wanted: str) -> str:
        """What it writes from now on, until that comes."""
        seen, end_s = "", SYSTEM_CLOCK.monotonic() + PATIENCE_S
        while wanted not in _STYLE.sub("", seen):
            assert SYSTEM_CLOCK.monotonic() < end_s, seen[-2000:]
            if select.select([self._master], [], [], 1.0)[0]:
                seen += os.read(self._master, 65536).decode(errors="replace")
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_terminal_is_filled_anew_when_its_size_changes_and_left_as_it_was(shell: Shell, client: QueueClient) -> None:
    terminal = Terminal("queue", "top", "--every", "0.2")
    try:
        wide = terminal.read_until("╯")
        assert "\x1b[?1049h" in wide  # the terminal's other screen
        assert "SampleCorrupt" in wide
        assert "prompts, state open" not in wide
        terminal.resize(50, 40)
        terminal.read_until("prompts, state open, ready 12")  # a paragraph where a row has no room
        terminal.resize(140, 40)
        terminal.read_until("oldest ready  to do")
        terminal.process.send_signal(signal.SIGINT)
        assert "\x1b[?1049l" in terminal.read_until("run default at ")  # back, and the last look stays
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()
