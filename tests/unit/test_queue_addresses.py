"""What a server's URL means: which host, database, user and password, and what is refused instead of guessed."""

import pickle
from typing import Any
from urllib.parse import quote

import pytest
import structlog

from eaglefeed.errors import ConfigError, QueueUnavailable
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.connection import QueueClient, open_client

UNLIKELY = "Zq9!"
"""Part of each password below, which nothing that is written may show."""


def meant(client: QueueClient) -> dict[str, Any]:
    names = ("host", "port", "db", "username", "password", "path")
    given = client._pool.connection_kwargs
    return {name: given[name] for name in names if given.get(name) is not None}


def refused(url: str) -> str:
    with structlog.testing.capture_logs() as logs, pytest.raises(ConfigError) as caught:
        connect(url, max_wait_s=0.0)
    told = f"{caught.value} {caught.value.__dict__} {logs}"
    assert caught.value.__cause__ is None
    assert UNLIKELY not in told
    return str(caught.value)


# passwords


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:p#{UNLIKELY}@localhost:6379/0",
        f"redis://:p@{UNLIKELY}/w%rd@localhost:6379/0",
        f"redis://:{UNLIKELY}?@localhost:6379",
        f"rediss://user:{UNLIKELY}[@localhost:6379",
        f"redis://:{UNLIKELY}%@localhost",
        f"redis://:{UNLIKELY} x@localhost",
        f"unix://:{UNLIKELY}/@/run/redis.sock",
        f"redis://localhost:6379/0?password={UNLIKELY}+x",
        f"redis://localhost:6379/0?password={UNLIKELY}%2541",
        f"redis://localhost:6379/0?password={UNLIKELY}@x",
    ],
)
def test_a_raw_reserved_character_says_what_to_do_and_shows_no_password(url: str) -> None:
    told = refused(url)
    assert "percent-encode it" in told
    assert "password file (queue.password_file)" in told


@pytest.mark.parametrize("url", [f"redis://:p#{UNLIKELY}", f"redis://localhost:6379/0?password=p#{UNLIKELY}"])
def test_what_stands_behind_a_raw_hash_is_not_left_out_in_silence(url: str) -> None:
    assert "must be percent-encoded: '#'; write %23" in refused(url)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://:a%2Fb%40c@localhost:6379/2", {"host": "localhost", "port": 6379, "db": 2, "password": "a/b@c"}),
        ("redis://user:p%23ss@h:6379", {"host": "h", "port": 6379, "username": "user", "password": "p#ss"}),
        ("rediss://us%40er:%25%3A@h", {"host": "h", "username": "us@er", "password": "%:"}),
        ("redis://user:@[2001:db8::1]:7000/15", {"host": "2001:db8::1", "port": 7000, "db": 15, "username": "user"}),
        ("unix:///run/a%20b.sock?db=3&username=u", {"path": "/run/a b.sock", "db": 3, "username": "u"}),
        ("redis://h/0?password=a%2Bb", {"host": "h", "db": 0, "password": "a+b"}),
    ],
)
def test_an_encoded_address_means_what_it_says(url: str, wanted: dict[str, Any]) -> None:
    assert meant(open_client(url)) == wanted


@pytest.mark.parametrize("password", ["p#ss", "p@ss/w%rd", "a b", "ü:%40", "'\"\\"])
def test_a_password_of_its_own_needs_no_encoding(password: str) -> None:
    assert meant(open_client("redis://user@localhost:6379/0", password=password))["password"] == password
    assert meant(open_client(f"redis://:{quote(password, safe='')}@localhost"))["password"] == password


def test_a_server_that_is_away_is_told_of_without_the_password() -> None:
    with structlog.testing.capture_logs() as logs, pytest.raises(QueueUnavailable) as caught:
        connect(f"redis://us:{UNLIKELY}@127.0.0.1:1/0", max_wait_s=0.01)
    told = f"{caught.value!r} {caught.value} {logs} {open_client(f'redis://:{UNLIKELY}@h')!r}"
    assert [entry["event"] for entry in logs] == ["queue_away"]
    assert UNLIKELY not in told


# places


@pytest.mark.parametrize(
    "url", ["redis://", "redis://:6379/0", "redis://u:p@:6379", "redis:///0", "redis://h:0", "unix://"]
)
def test_an_address_without_a_place_is_not_this_machines_default(url: str) -> None:
    assert "a host's name" in refused(url) or "the path of a socket" in refused(url)


@pytest.mark.parametrize("url", ["redis://h:6379/0\n", "redis://h\r:6379", "redis://h:6379/0\t"])
def test_a_line_break_of_a_file_is_named(url: str) -> None:
    assert "must be percent-encoded" in refused(url)


@pytest.mark.parametrize(
    "option",
    ["decode_responses=true", "socket_timeout=0.5", "protocol=3", "max_connections=1", "retry_on_timeout=1", "port=1"],
)
def test_an_option_that_would_change_how_the_client_works_is_refused(option: str) -> None:
    """A socket's timeout below the second that a waiting lease blocks would end every wait as an outage."""
    name = option.partition("=")[0]
    assert (
        f"wanted no other options than db, username, password, client_name, and ssl_… for rediss://, got '{name}'"
        in (refused(f"redis://h:6379/0?db=1&{option}"))
    )


@pytest.mark.parametrize(
    "url", ["redis-sentinel://h:26379/m", "redis+cluster://h", "valkey://h", "REDIS://h", "'redis://h'"]
)
def test_an_address_of_another_kind_names_those_that_are_read(url: str) -> None:
    assert "wanted redis://…, rediss://…, unix://…" in refused(url)


# copies


def test_a_queue_that_is_pickled_comes_out_with_a_client_of_its_own() -> None:
    client = open_client("redis://user@h:6379/2", password=UNLIKELY, max_wait_s=7.0)
    queue = open_queue(client, "run", "samples", "second")
    copy = pickle.loads(pickle.dumps(queue))
    assert (copy.namespace, copy.name, copy.group) == ("run", "samples", "second")
    other = copy._client
    assert (other.address, other.max_wait_s, meant(other)) == (client.address, 7.0, meant(client))
    assert other.id != client.id
    assert other._pool is not client._pool
