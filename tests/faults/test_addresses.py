"""How a server is reached: passwords, addresses, TLS."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from commands import Shell
from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import Lease, QueueItem
from eaglefeed.queue.connection import QueueClient
from faults.access_server import RIGHTS, SERVERS, Server, started

ODD = "p@ss/w#rd:?%[]&+ ü"
"""A password of characters that a URL cannot hold as they are."""
pytestmark = pytest.mark.skipif(not SERVERS, reason="no server is installed")


@pytest.fixture(scope="module", params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("a folder with spaces") / "in it, one more"
    folder.mkdir()
    with started(request.param, folder) as running:
        yield running


@pytest.fixture
def tls(server: Server) -> Server:
    if server.tls_port is None:
        pytest.skip(f"this {server.kind} was built without TLS")
    return server


# passwords


def test_a_password_comes_by_file_or_by_variable_and_never_shows(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.admin.call("ACL", "SETUSER", "eaglefeed", f">{ODD}")
    file = tmp_path / "password"
    file.write_text(ODD + "\n", encoding="utf-8")
    shell = Shell(capsys, f"redis_url={server.url}")
    by_file = shell.run("queue", "stats", f"queue.password_file={file}", "--json")
    monkeypatch.setenv("EAGLEFEED_QUEUE__PASSWORD", ODD)
    by_variable = shell.run("queue", "stats", "--json")
    assert by_file.code == by_variable.code == 0
    both = shell.run("queue", "stats", f"queue.password_file={file}")
    monkeypatch.setenv("EAGLEFEED_QUEUE__PASSWORD", ODD + "!")
    wrong = shell.run("queue", "stats")
    on_the_line = shell.run("queue", "stats", f"queue.password={ODD}")
    assert (both.code, wrong.code, on_the_line.code) == (2, 2, 2)
    assert "keep one of them" in both.err
    assert "refuses the log-in" in wrong.err
    assert "EAGLEFEED_QUEUE__PASSWORD" in on_the_line.err
    for ended in (by_file, by_variable, both, wrong, on_the_line):
        assert ODD not in ended.out + ended.err
        assert "Traceback" not in ended.err


@pytest.mark.parametrize(("user", "password"), [("odd", ODD), ("wörker@home", "a b"), ("a:b/c", "!*'();,$~")])
def test_user_and_password_are_percent_encoded_in_an_address(server: Server, user: str, password: str) -> None:
    server.admin.call("ACL", "SETUSER", user, "reset", "on", f">{password}", "~eaglefeed:*", *RIGHTS)
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    client = connect(f"redis://{login}@127.0.0.1:{server.port}/0", max_wait_s=2.0)
    assert open_queue(client, "odd", "prompts").stats().ready == 0
    assert client.address == f"redis://127.0.0.1:{server.port}/0"
    client.close()


@pytest.mark.parametrize("password", ["p@ss", "a/b", "a#b", "a?b", "a b", "[x]", "50%"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(password: str) -> None:
    with pytest.raises(ConfigError, match="percent-encode it") as caught:
        connect(f"redis://user:{password}@127.0.0.1:1/0")
    assert password not in str(caught.value)


# addresses


def addresses(server: Server) -> Iterator[str]:
    socket_path = server.folder / "server.sock"
    yield f"redis://eaglefeed@localhost:{server.port}"
    yield f"redis://eaglefeed@127.0.0.1:{server.port}/7"
    yield f"unix://{quote(str(socket_path))}?username=eaglefeed&db=3"
    yield f"unix://{socket_path}?username=eaglefeed"


def test_hosts_databases_and_socket_paths_with_spaces_are_reached(server: Server) -> None:
    for place, url in enumerate(addresses(server)):
        client = connect(url, password="word", max_wait_s=2.0)
        open_queue(client, f"at{place}", "prompts").put([QueueItem("a", b"x")])
        client.close()
    for place, database in enumerate((0, 7, 3, 0)):
        there = connect(f"{next(addresses(server))}/{database}", password="word", max_wait_s=2.0)
        assert open_queue(there, f"at{place}", "prompts").stats().ready == 1
        there.close()


def test_a_host_of_ipv6_is_reached(server: Server) -> None:
    try:
        socket.create_connection(("::1", server.port), timeout=5).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    client = connect(f"redis://eaglefeed@[::1]:{server.port}/0", password="word", max_wait_s=2.0)
    assert client.address == f"redis://[::1]:{server.port}/0"
    client.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:99999/0",
        "redis://127.0.0.1:port/0",
        "redis://[::1/0",
        "redis://127.0.0.1:1/word",
        "redis://127.0.0.1:1/0/1",
        "redis://127.0.0.1:1/-1",
        "redis://127.0.0.1:1/0?nothing=1",
        "localhost:6379",
    ],
)
def test_an_address_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server's URL"):
        connect(url, max_wait_s=0.1)


# TLS


def over_tls(server: Server, ca: str, host: str = "localhost") -> Callable[[], QueueClient]:
    url = f"rediss://eaglefeed@{host}:{server.tls_port}/0"
    return lambda: connect(url, password="word", tls_ca_file=server.folder / ca, max_wait_s=1.0)


def test_the_right_authority_opens_an_encrypted_connection(tls: Server) -> None:
    client = over_tls(tls, "ca.pem")()
    queue = open_queue(client, "tls", "prompts")
    queue.put([QueueItem("a", b"x")])
    got = queue.lease(1, visibility_timeout_s=60, consumer="c")
    assert isinstance(got, Lease)
    assert got.items[0].payload == b"x"
    client.close()


@pytest.mark.parametrize(("ca", "host"), [("other-ca.pem", "localhost"), ("ca.pem", "127.0.0.1")])
def test_a_server_that_nobody_vouches_for_is_not_talked_to(tls: Server, ca: str, host: str) -> None:
    with pytest.raises(ConfigError, match=r"nobody vouches for this server.*queue\.tls_ca_file"):
        over_tls(tls, ca, host)()


def test_without_an_authority_of_ones_own_the_systems_are_asked(tls: Server) -> None:
    with pytest.raises(ConfigError, match="nobody vouches for this server"):
        connect(f"rediss://eaglefeed@localhost:{tls.tls_port}/0", password="word", max_wait_s=1.0)


def test_the_commands_reach_a_tls_server_or_tell_in_one_line_why_not(
    tls: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLEFEED_QUEUE__PASSWORD", "word")
    shell = Shell(capsys, f"redis_url=rediss://eaglefeed@localhost:{tls.tls_port}/0")
    assert shell.run("queue", "stats", f"queue.tls_ca_file={tls.folder}/ca.pem").code == 0
    for wrong in ("other-ca.pem", "no-ca.pem", "users.acl"):
        ended = shell.run("queue", "stats", f"queue.tls_ca_file={tls.folder}/{wrong}")
        assert ended.code == 2, wrong
        assert ended.err.splitlines()[-1].startswith("eaglefeed: "), wrong
        assert "Traceback" not in ended.err


def test_a_certificate_without_tls_is_refused_before_the_password_goes_out(server: Server, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    with pytest.raises(ConfigError, match="rediss://"):
        connect(server.url, password="word", tls_ca_file=tmp_path / "ca.pem", max_wait_s=0.1)


@pytest.mark.timeout(60)
def test_plain_text_to_a_tls_port_and_tls_to_a_plain_one_are_told_and_not_hung_on(tls: Server) -> None:
    with pytest.raises(QueueUnavailable):
        connect(f"redis://eaglefeed@localhost:{tls.tls_port}/0", password="word", max_wait_s=0.5)
    with pytest.raises(QueueUnavailable):
        over_tls(tls._replace(tls_port=tls.port), "ca.pem")()
