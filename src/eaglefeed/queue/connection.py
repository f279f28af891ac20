"""The connection to a Redis or Valkey server: our deadlines and retries instead of redis-py's."""

import itertools
import os
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from hiredis import pack_command
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, QueueError
from eaglefeed.logs import get_logger
from eaglefeed.queue.address import address_of, check_authority, read_password
from eaglefeed.queue.checks import check_server
from eaglefeed.queue.refusals import NotPermitted, away, may_pass, reason_of, refusal
from eaglefeed.queue.scripts import Keys, Script

__all__ = ["NotPermitted", "QueueClient", "connect", "open_client", "read_info"]

_log = get_logger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_MIN_ANSWER_S, _MAX_ANSWER_S = 2.0, 20.0
"""A reply may take long while the server's disk is busy; the blocking read of a waiting lease takes a second."""
_POOL_LOOKS, _POOL_POLL_S = 1000, 0.01
_MAX_CONNECTIONS = 64
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0


class QueueClient:
    """A connection pool to one server. Every call has a deadline and is repeated until then; errors are ours.

    A call whose reply was lost may be carried out twice; scripts that would mind know a call by its `turn`. A client
    that is pickled, as for a process that is spawned, comes out as one of its own; in a forked process it may not be
    used. `num_repeats` counts the calls that were sent again.

    Args:
        pool: redis-py's connections, without retries of their own.
        address: how messages call the server; holds no password.
        max_wait_s: how long a call is repeated.
        clock: for the deadline and the pauses.
        place: the URL and what is secret, which another process needs for a client of its own.
    """

    def __init__(
        self,
        pool: redis.ConnectionPool,
        *,
        address: str,
        max_wait_s: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
        place: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        self.address, self.max_wait_s, self.clock, self._place = address, max_wait_s, clock, place
        self.id, self.num_repeats = secrets.token_hex(8), 0
        self._pool: Any = pool  # redis-py types only a part of it
        self._idle: list[Any] = [None] * _MAX_CONNECTIONS  # None: not made yet
        self._pid = os.getpid()
        self._sequence = itertools.count(1)
        self._turns: dict[str, threading.Lock] = {}

    def __repr__(self) -> str:
        return f"QueueClient({self.address!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._place is None:
            raise TypeError("only a client that knows its server's URL can be pickled")
        return _open, (*self._place, self.address, self.max_wait_s)

    def impatient(self) -> "QueueClient":
        """Another client of the same server that repeats no call: for what may as well not be carried out."""
        return QueueClient(self._pool, address=self.address, max_wait_s=0.0, clock=self.clock, place=self._place)

    def turn(self, name: str) -> threading.Lock:
        """To be held for a call of `name`: the server keeps one reply a name, so there is one call of it at a time."""
        return self._turns.get(name) or self._turns.setdefault(name, threading.Lock())

    def next_number(self) -> int:
        """By which the server knows a call that is repeated."""
        return next(self._sequence)

    def call(self, *command: str | bytes | float) -> Any:
        """Send a command and return its raw reply.

        Raises:
            QueueUnavailable: no answer within the deadline; then nobody knows whether it was carried out.
            ConfigError: the server refuses the password or the user.
            QueueError: any other refusal, or use after fork.
        """
        packed: bytes = pack_command(command)  # type: ignore[arg-type]  # its stubs are too narrow
        return self._insist(lambda _: packed)

    def run(self, script: Script, keys: Keys, args: Sequence[str | bytes | float]) -> Any:
        """Run a script by its digest; a server that does not know it (any more) gets its text. Raises as `call`.

        One that replays gets a last argument: 1 when the call is repeated, else 0.
        """
        last = ([0], [1]) if script.replays else ([], [])
        try:
            return self._insist(lambda attempt: keys.pack(script, (*args, *last[attempt > 0])))
        except exceptions.NoScriptError:
            # it may have been carried out before the server was restarted
            return self.call("EVAL", script.text, len(keys.names), *keys.names, *args, *last[1])

    def _insist(self, packed: Callable[[int], bytes]) -> Any:
        """Send what `packed` makes for each attempt, until there is an answer."""
        if os.getpid() != self._pid:
            fix = "connect again in this process; loaders lease in the main process and hand refs to their workers"
            raise QueueError("a connection cannot be used after fork", subject=self.address, fix=fix)
        end_s = self.clock.monotonic() + self.max_wait_s
        for attempt in itertools.count():
            try:
                return self._attempt(packed(attempt))
            except exceptions.NoScriptError:
                raise
            except (redis.RedisError, OSError) as error:
                self._give_up_or_wait(error, attempt, end_s)
        raise AssertionError

    def close(self) -> None:
        """Close the pool's connections."""
        self._pool.disconnect()

    def _attempt(self, packed: bytes) -> Any:
        """One try. redis-py's pool makes the connections; its own handing out looks at each of them every time."""
        is_whole, connection = False, self._take_connection()
        try:
            connection.send_packed_command((packed,))
            reply = connection.read_response()
            is_whole = True
        except exceptions.ResponseError as error:
            is_whole = not isinstance(error, exceptions.ReadOnlyError)
            raise
        finally:
            if not is_whole:
                connection.disconnect()
            self._idle.append(connection)
        return reply

    def _take_connection(self) -> Any:
        """The connection that was used last; a list's pop and append need no lock."""
        for _ in range(_POOL_LOOKS):
            try:
                connection = self._idle.pop()
            except IndexError:
                self.clock.sleep(_POOL_POLL_S)
            else:
                return connection if connection is not None else self._pool.make_connection()
        raise exceptions.ConnectionError(f"all {_MAX_CONNECTIONS} connections are in use")

    def _give_up_or_wait(self, error: Exception, attempt: int, end_s: float) -> None:
        """Pause before the next attempt, or raise what the caller is told."""
        if not may_pass(error):
            raise refusal(self.address, error) from error
        left_s = end_s - self.clock.monotonic()
        if left_s <= 0:
            raise away(self.address, error) from error
        self.num_repeats += 1
        if attempt == 0:
            _log.warning("queue_away", address=self.address, reason=reason_of(error), max_wait_s=self.max_wait_s)
        most_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(attempt, 10), left_s)
        self.clock.sleep(random.uniform(0, most_s))  # noqa: S311 - jitter, not a secret


def connect(
    url: str,
    *,
    password: str | None = None,
    password_file: str | Path | None = None,
    tls_ca_file: str | Path | None = None,
    max_wait_s: float = 30.0,
) -> QueueClient:
    """Connect to the server at `url` and check that it keeps what it is given.

    Args:
        url: redis://, rediss:// (TLS) or unix://, as redis-py reads it.
        password: the password, unless the URL has it.
        password_file: a file that holds it.
        tls_ca_file: certificate of who vouches for a rediss:// server; the system's by default.
        max_wait_s: how long a call is repeated, such as while the server restarts.

    Raises:
        ConfigError: a URL or password that cannot be used.
        QueueUnavailable: nobody answers there.
        UnsafeServer: a server that loses data: it evicts, is a replica or too old.
    """
    client = open_client(
        url, password=password, password_file=password_file, tls_ca_file=tls_ca_file, max_wait_s=max_wait_s
    )
    check_server(client.address, read_info(client))
    return client


def open_client(
    url: str,
    *,
    password: str | None = None,
    password_file: str | Path | None = None,
    tls_ca_file: str | Path | None = None,
    max_wait_s: float = 30.0,
) -> QueueClient:
    """A client whose server nobody has asked or judged yet; the parameters are `connect`'s.

    Raises:
        ConfigError: a URL or password that cannot be used.
    """
    address = address_of(url)
    if password is not None and password_file is not None:
        raise ConfigError("both a password and a password file", subject=address, fix="keep one of them")
    secret = read_password(Path(password_file)) if password_file is not None else password
    options: dict[str, Any] = {"password": secret} if secret is not None else {}
    if tls_ca_file is not None:
        options["ssl_ca_certs"] = check_authority(address, tls_ca_file)
    return _open(url, options, address, max_wait_s)


def _open(url: str, own: dict[str, Any], address: str, max_wait_s: float) -> QueueClient:
    options: dict[str, Any] = own | {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": min(max(max_wait_s, _MIN_ANSWER_S), _MAX_ANSWER_S),
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "max_connections": _MAX_CONNECTIONS,
        "protocol": 2,
    }
    try:
        pool = redis.BlockingConnectionPool.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)  # tells an unknown option, connects nowhere
    except (ValueError, TypeError):
        # its text may quote a part of the URL, the password among it
        raise ConfigError(
            "not a server's URL", subject=address, wanted="redis://host:port/db, the host behind user:password@"
        ) from None
    return QueueClient(pool, address=address, max_wait_s=max_wait_s, place=(url, own))


def read_info(client: QueueClient) -> dict[str, str]:
    """What the server says of itself; nothing if its user may not ask, or it has no such command."""
    try:
        text = client.call("INFO").decode(errors="replace")
    except (NotPermitted, QueueError) as error:
        if isinstance(error, NotPermitted) or "unknown command" in str(error):
            return {}
        raise
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}
