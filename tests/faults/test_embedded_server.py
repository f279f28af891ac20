"""The server in a run's folder: shared, found again after a crash, and clear about why it cannot be started."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import queue_servers
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import QueueItem
from faults.processes import in_thread, is_up, kill, spawned

pytestmark = pytest.mark.skipif(not queue_servers.real_servers(), reason="no server is installed")

MEMBER = """
import json, sys
from eaglefeed.queue import EmbeddedServer, connect
with EmbeddedServer(sys.argv[1]) as server:
    client = connect(server.url)
    run_id = [l for l in client.call("INFO").decode().splitlines() if l.startswith("run_id")][0]
    print(json.dumps(run_id), flush=True)
    sys.stdin.readline()
"""


def test_processes_that_race_start_one_server_and_the_last_one_stops_it(tmp_path: Path) -> None:
    with spawned(*[(MEMBER, tmp_path)] * 3) as members:
        found = {json.loads(member.stdout.readline()) for member in members if member.stdout}
        assert len(found) == 1
        members[0].kill()
        members[1].communicate("\n")
        mine = EmbeddedServer(tmp_path)
        assert is_up(mine)
        members[2].communicate("\n")
        assert not is_up(mine)
        assert not (tmp_path / "server.sock").exists()


def test_a_stale_socket_is_cleaned_up(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        client = connect(server.url)
        kill(server, client)
        client.close()
        assert (tmp_path / "server.sock").exists()
    with EmbeddedServer(tmp_path) as server:
        connect(server.url).close()
    assert not (tmp_path / "server.sock").exists()


@contextmanager
def who_resets(path: Path, *, times: int) -> Iterator[None]:
    """Somebody who resets that many connections, and then listens no more."""

    def reset() -> None:
        with suppress(OSError), other:
            for _ in range(times):
                with other.accept()[0] as caller:
                    caller.recv(1)

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        thread = in_thread(reset)
        yield
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_socket_that_is_somebody_elses_is_one_clear_error(tmp_path: Path) -> None:
    with (
        who_resets(tmp_path / "server.sock", times=1000),
        pytest.raises(ConfigError, match="in use by something that eaglefeed did not start"),
    ):
        EmbeddedServer(tmp_path).start()
    assert (tmp_path / "server.sock").exists()


def test_a_server_killed_just_now_is_started_again(tmp_path: Path) -> None:
    """Its lock is free for a moment before its socket is closed, and resets who connects then."""
    with who_resets(tmp_path / "server.sock", times=1), EmbeddedServer(tmp_path) as server:
        connect(server.url).close()


def test_a_folder_with_a_long_or_odd_path_works(tmp_path: Path) -> None:
    folder = tmp_path / "odd #?%20 näme" / ("x" * 150)
    with EmbeddedServer(folder) as server:
        client = connect(server.url)
        assert open_queue(client, "run", "samples").put([QueueItem("a", b"")]).accepted == 1
        client.close()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "broken-server"
    program.write_text("#!/bin/sh\necho 'Fatal: no luck today' >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(QueueUnavailable, match=r"code 3.*no luck today"):
        EmbeddedServer(tmp_path / "queue", binary=str(program)).start()


def test_a_file_that_the_server_cannot_read_says_why(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        client = connect(server.url)
        open_queue(client, "run", "samples").put([QueueItem("a", b"x")])
        client.close()
    (found,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    found.write_bytes(b"*1\r\nnonsense\r\n" + found.read_bytes())
    with pytest.raises(QueueUnavailable, match=r"ended.*[Bb]ad file format"):
        EmbeddedServer(tmp_path).start()


def test_a_folder_or_program_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder cannot be used"):
        EmbeddedServer(tmp_path / "file").start()
    with pytest.raises(ConfigError, match="cannot start the server"):
        EmbeddedServer(tmp_path / "queue", binary=str(tmp_path / "nowhere")).start()


def test_a_closed_share_may_be_closed_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    server.close()
    server.close()
    assert not is_up(server)
