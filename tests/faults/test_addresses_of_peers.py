"""Addresses that a process gives to others: one that means "this machine" is not given to other machines."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import structlog

import peers
from commands import Shell
from eaglefeed.access import loopback_of
from eaglefeed.cli.doctor_settings import examine_settings
from eaglefeed.config import load_settings
from eaglefeed.consumer import ranks
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.errors import ConfigError, PeerGone, RankGone
from eaglefeed.storage.base import open_store

TOKEN = "0123456789abcdef"
KNOWN = {
    "debian": ["127.0.1.1"],
    "clone": ["127.0.0.1", "::1"],
    "proper": ["10.0.0.5"],
    "both": ["127.0.1.1", "10.0.0.5"],
}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has this machine bear a name, and know what some names stand for."""
    look_up = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host == "nobody":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        places = KNOWN.get(host)
        if places is None:
            return look_up(host, port, *args, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, port or 0)) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [("debian", "127.0.1.1"), ("clone", "127.0.0.1"), ("proper", ""), ("both", ""), ("nobody", ""), ("x" * 70, "")],
)
def test_a_name_that_stands_for_this_machine_alone_is_told_from_others(name: str, wanted: str) -> None:
    assert loopback_of(name) == wanted


@pytest.mark.usefixtures("named")
def test_a_producer_does_not_send_trainers_to_a_name_of_their_own_machine() -> None:
    with pytest.raises(ConfigError, match=r"debian: trainers elsewhere.*got 127\.0\.1\.1; .*nccl://ADDRESS:PORT"):
        open_store("nccl://debian:0", peer=peers.PeerOptions(token=TOKEN))


def test_a_machine_that_is_called_localhost_has_no_name_for_others(named: Callable[[str], None]) -> None:
    named("localhost")
    with pytest.raises(ConfigError, match="nccl://ADDRESS:PORT"):
        open_store("nccl://0.0.0.0:0", peer=peers.PeerOptions(token=TOKEN))


def test_a_producer_on_every_address_warns_of_a_name_that_others_may_not_know(named: Callable[[str], None]) -> None:
    for name, is_told in (("debian", True), ("proper", False)):
        named(name)
        with structlog.testing.capture_logs() as logs, peers.keeping("0.0.0.0:0", token=TOKEN) as store:
            assert store.uri.startswith(f"nccl://{name}:")
        assert any(entry["event"] == "refs_name_a_loopback_address" for entry in logs) == is_told


def test_a_ref_that_names_this_machine_alone_is_said_to_where_nobody_answers() -> None:
    with peers.keeping() as producer:
        ref = peers.put(producer)
    with peers.pulling() as trainer:
        for _ in range(2):  # the second time from memory
            with pytest.raises(PeerGone, match=r"127\.0\.0\.1.* another machine is to name.*nccl://ADDRESS:PORT"):
                trainer.get(ref)


def test_the_doctor_tells_of_a_producer_that_trainers_of_other_machines_would_not_find() -> None:
    for host, is_told in (("127.0.0.1", True), ("localhost", True), ("10.0.0.5", False)):
        settings = load_settings(None, ["redis_url=rediss://queue.example:6379", f"store.uri=nccl://{host}:8200"])
        told = [each.what for each in examine_settings(settings) if "look for samples on their own" in each.what]
        assert bool(told) == is_told


SPREAD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("name", "variables", "is_refused"),
    [
        ("debian", {}, True),
        ("clone", {}, True),
        ("debian", {"GLOO_SOCKET_IFNAME": "eth0"}, False),
        ("debian", {"LOCAL_WORLD_SIZE": "2"}, False),
        ("proper", {}, False),
    ],
)
def test_a_rank_that_others_would_look_for_on_their_own_machine_does_not_join(
    name: str,
    variables: dict[str, str],
    is_refused: bool,
    named: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named(name)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for key, value in (SPREAD | variables).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("eaglefeed.cli.train_run.run_training", lambda *_, **__: None)
    ended = Shell(capsys).run("train")
    assert ended.code == (2 if is_refused else 0)
    assert ("GLOO_SOCKET_IFNAME" in ended.err) == is_refused


def test_whatever_else_listens_at_the_jobs_address_holds_a_rank_no_longer_than_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_LATE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for key, value in (SPREAD | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}).items():
            monkeypatch.setenv(key, value)
        with pytest.raises(RankGone, match=r"the start.*does not answer as a job does.*MASTER_PORT"):
            Ranks.of_job(timeout_s=1.0)


def test_a_rank_says_which_port_of_the_job_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        variables = SPREAD | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(RankGone, match=rf"the start.*port: {port}.*MASTER_PORT"):
            Ranks.of_job(timeout_s=1.0)


JOIN = """
import sys
from eaglefeed.consumer.ranks import Ranks
with Ranks.of_job(timeout_s=20.0) as ranks:
    print(ranks.tell(b"hello").decode())
"""


@pytest.fixture
def two_machines() -> Iterator[list[list[str]]]:
    """What to put before a command to run it on one of two machines, 10.77.0.1 and .2, as far as the network goes."""
    names = [f"ef{os.getpid()}{side}" for side in "ab"]
    first = ["ip", "netns", "add", names[0]]
    if not shutil.which("ip") or subprocess.run(first, capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces can be made here")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        stack.callback(ip, "netns", "del", names[0])
        ip("netns", "add", names[1])
        stack.callback(ip, "netns", "del", names[1])
        ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire0")
            for device in ("lo", "wire0"):
                ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in names]


@pytest.mark.timeout(120)
def test_ranks_on_two_machines_find_each_other_over_the_interface_that_is_named(two_machines: list[list[str]]) -> None:
    job = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "wire0"}
    started = [
        subprocess.Popen(
            [*machine, sys.executable, "-c", JOIN],
            env=os.environ | SPREAD | job | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(two_machines)
    ]
    try:
        told = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [out.strip() for out, _ in told] == ["hello", "hello"], told
