"""The connection to a Redis or Valkey server: our deadlines and retries instead of redis-py's."""

import itertools
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, EaglefeedError, QueueError, QueueUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.queue.checks import check_server
from eaglefeed.queue.scripts import Script

__all__ = ["NotPermitted", "QueueClient", "connect"]

_log = get_logger(__name__)

_SCHEMES = ("redis", "rediss", "unix")
_USERINFO = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*")
_CONNECT_TIMEOUT_S = 5.0
_MIN_ANSWER_S, _MAX_ANSWER_S = 2.0, 20.0
"""A reply may take long while the server's disk is busy; the blocking read of a waiting lease takes a second."""
_POOL_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 64
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0

_REFUSED = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
_CONNECTION = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_AUTH = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)


class NotPermitted(ConfigError):
    """The server's user may not use a command."""

    default_fix = "grant it ~eaglefeed:* +@hash +@list +@sortedset +unlink +time +eval +evalsha +info"


class QueueClient:
    """A connection pool to one server. Every call has a deadline; errors are ours.

    Args:
        pool: redis-py's connections, without retries of their own.
        address: how messages call the server; holds no password.
        max_wait_s: how long a call that is safe to repeat is repeated.
        clock: for the deadline and the pauses.
    """

    def __init__(
        self, pool: redis.ConnectionPool, *, address: str, max_wait_s: float = 30.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.address, self.max_wait_s, self.clock = address, max_wait_s, clock
        self._pool: Any = pool  # redis-py types only a part of it
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"QueueClient({self.address!r})"

    def call(self, *command: str | bytes | float, repeatable: bool = True) -> Any:
        """Send a command and return its raw reply.

        Raises:
            QueueUnavailable: no answer within the deadline, or, for one that is not `repeatable`, none after sending:
                then nobody knows whether it was carried out.
            ConfigError: the server refuses the password or the user.
            QueueError: any other refusal, or use after fork.
        """
        if os.getpid() != self._pid:
            fix = "connect again in this process; loaders lease in the main process and hand refs to their workers"
            raise QueueError("a connection cannot be used after fork", subject=self.address, fix=fix)
        end_s = self.clock.monotonic() + self.max_wait_s
        for attempt in itertools.count():
            try:
                return self._attempt(command)
            except exceptions.NoScriptError:
                raise
            except (redis.RedisError, OSError, _NotSentError) as error:
                self._give_up_or_wait(error, attempt, end_s, repeatable=repeatable)
        raise AssertionError

    def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | float], *, repeatable: bool = True
    ) -> Any:
        """Run a script by its digest; a server that does not know it (any more) gets its text. Raises as `call`."""
        tail = (len(keys), *keys, *args)
        try:
            return self.call("EVALSHA", script.sha, *tail, repeatable=repeatable)
        except exceptions.NoScriptError:
            return self.call("EVAL", script.text, *tail, repeatable=repeatable)

    def close(self) -> None:
        """Close the pool's connections."""
        self._pool.disconnect()

    def _attempt(self, command: tuple[str | bytes | float, ...]) -> Any:
        try:
            connection = self._pool.get_connection()
        except _AUTH:
            raise
        except _CONNECTION as error:
            raise _NotSentError(_reason(error)) from error
        try:
            connection.send_command(*command)
            return connection.read_response()
        except (exceptions.ReadOnlyError, *_CONNECTION):
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def _give_up_or_wait(self, error: Exception, attempt: int, end_s: float, *, repeatable: bool) -> None:
        """Pause before the next attempt, or raise what the caller is told."""
        if not _worth_repeating(error, repeatable=repeatable):
            self._refuse(error, sent=isinstance(error, _CONNECTION) and not isinstance(error, _REFUSED))
        left_s = end_s - self.clock.monotonic()
        if left_s <= 0:
            raise QueueUnavailable(self.address, _reason(error)) from error
        if attempt == 0:
            _log.warning("queue_away", address=self.address, reason=_reason(error), max_wait_s=self.max_wait_s)
        most_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(attempt, 10), left_s)
        self.clock.sleep(random.uniform(0, most_s))  # noqa: S311 - jitter, not a secret

    def _refuse(self, error: Exception, *, sent: bool) -> NoReturn:
        text = _reason(error)
        told: EaglefeedError
        if isinstance(error, _AUTH):
            fix = "check the password, or the file it is read from"
            told = ConfigError("the server refuses the log-in", subject=self.address, got=text, fix=fix)
        elif isinstance(error, exceptions.NoPermissionError):
            told = NotPermitted("the server's user lacks a permission", subject=self.address, got=text)
        elif "used memory > 'maxmemory'" in text:
            told = QueueUnavailable(self.address, "out of memory: raise its maxmemory, or let consumers catch up")
        elif sent:
            told = QueueUnavailable(self.address, f"{text}; nobody knows whether the call was carried out")
        else:
            told = QueueError("the server refuses a command", subject=self.address, got=text)
        raise told from error


class _NotSentError(Exception):
    """No connection, so the command was not carried out."""


def _worth_repeating(error: Exception, *, repeatable: bool) -> bool:
    """Whether the command was surely not carried out, or may be carried out twice, and time may help."""
    if isinstance(error, _AUTH):
        return False
    if isinstance(error, (_NotSentError, *_REFUSED)):
        return True
    if isinstance(error, exceptions.ResponseError):
        return str(error).startswith(("BUSY ", "MISCONF ")) or "-READONLY" in str(error)
    return repeatable


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, _NotSentError) else str(error)


def connect(
    url: str,
    *,
    password: str | None = None,
    password_file: str | Path | None = None,
    max_wait_s: float = 30.0,
) -> QueueClient:
    """Connect to the server at `url` and check that it keeps what it is given.

    Args:
        url: redis://, rediss:// (TLS) or unix://, as redis-py reads it.
        password: the password, unless the URL has it.
        password_file: a file that holds it.
        max_wait_s: how long a call that is safe to repeat is repeated, such as while the server restarts.

    Raises:
        ConfigError: a URL or password that cannot be used.
        QueueUnavailable: nobody answers there.
        UnsafeServer: a server that loses data: it evicts, is a replica or too old.
    """
    address = _address(url)
    if password is not None and password_file is not None:
        raise ConfigError("both a password and a password file", subject=address, fix="keep one of them")
    secret = _read_password(Path(password_file)) if password_file is not None else password
    client = QueueClient(_open(url, address, secret, max_wait_s), address=address, max_wait_s=max_wait_s)
    check_server(client.address, _read_info(client))
    return client


def _open(url: str, address: str, password: str | None, max_wait_s: float) -> redis.ConnectionPool:
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": min(max(max_wait_s, _MIN_ANSWER_S), _MAX_ANSWER_S),
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "timeout": _POOL_TIMEOUT_S,
        "max_connections": _MAX_CONNECTIONS,
        "protocol": 2,
    }
    if password is not None:
        options["password"] = password
    try:
        return redis.BlockingConnectionPool.from_url(url, **options)
    except (ValueError, TypeError):
        # its text may quote a part of the URL, the password among it
        raise ConfigError(
            "not a server's URL", subject=address, wanted="redis://[user:password@]host:port/db"
        ) from None


def _address(url: str) -> str:
    """The URL without user, password and options.

    Raises:
        ConfigError: another scheme, or a password with characters that a URL cannot hold.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        wanted = ", ".join(f"{known}://…" for known in _SCHEMES)
        raise ConfigError("not a server's URL", subject=scheme if separator else "", wanted=wanted)
    userinfo, has_user, place = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
    if has_user and not _USERINFO.fullmatch(userinfo):
        fix = "percent-encode it, such as %2F for /, or use a password file"
        raise ConfigError("the URL's password holds a reserved character", subject=f"{scheme}://…@{place}", fix=fix)
    parts = urlsplit(f"{scheme}://{place}")
    return f"{scheme}://{parts.netloc}{parts.path}"


def _read_password(path: Path) -> str:
    try:
        secret = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError("password file cannot be read", subject=str(path), got=reason) from None
    if not secret:
        raise ConfigError("password file is empty", subject=str(path))
    return secret


def _read_info(client: QueueClient) -> dict[str, str]:
    try:
        text = client.call("INFO").decode(errors="replace")
    except NotPermitted:
        return {}
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}
