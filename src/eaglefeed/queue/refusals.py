"""What a server's refusals mean: whether time may help, and what the user is told."""

from typing import NamedTuple

from redis import exceptions

from eaglefeed.errors import ConfigError, EaglefeedError, QueueError, QueueUnavailable

__all__ = ["NotPermitted", "away", "may_pass", "reason_of", "refusal"]

_REFUSED = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
_PASSING = {
    "BUSY ": "see which script it runs, and SCRIPT KILL that",
    "MISCONF ": "free its disk, and see its log",
    "NOREPLICAS ": "start its replicas, or lower its min-replicas-to-write",
    "UNBLOCKED ": "",
}
"""What passes, and what helps; the last ends a blocking read when a failover makes the server a replica."""
_CONNECTION = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_NOT_VOUCHED_FOR = "CERTIFICATE_VERIFY_FAILED"
_AUTH = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)


class NotPermitted(ConfigError):
    """The server's user may not use a command."""

    default_fix = "grant it what deploy/users.acl.template lists"


class _Refusal(NamedTuple):
    """How a refusal is known, by its class or by words of its text, and how it is told."""

    known_by: tuple[type[Exception] | str, ...]
    kind: type[EaglefeedError]
    what: str
    fix: str = ""

    def fits(self, error: Exception) -> bool:
        return any(mark in str(error) if isinstance(mark, str) else isinstance(error, mark) for mark in self.known_by)


_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")
_CLUSTER = (exceptions.AskError, exceptions.ClusterCrossSlotError)  # a MovedError is an AskError
_REFUSALS = (
    _Refusal(
        _AUTH, ConfigError, "the server refuses the log-in", "check user and password, or the file it is read from"
    ),
    _Refusal(
        (_NOT_VOUCHED_FOR,),
        ConfigError,
        "nobody vouches for this server",
        "check the host's name, and the certificate of queue.tls_ca_file",
    ),
    _Refusal((exceptions.NoPermissionError, *_IN_SCRIPT), NotPermitted, "the server's user lacks a permission"),
    _Refusal(
        ("running in protected mode",),
        ConfigError,
        "the server is in protected mode, and talks to its own machine alone",
        "give it a password or an aclfile, as deploy/users.acl.template",
    ),
    _Refusal(
        ("DB index is out of range", "SELECT is not allowed in cluster mode"),
        ConfigError,
        "the server has no such database",
        "use another number at the address's end, 0 is always there",
    ),
    _Refusal(
        _CLUSTER,
        ConfigError,
        "a node of a cluster that does not keep the run's keys",
        "use a server outside of a cluster: the addresses of clusters are not read",
    ),
    _Refusal(
        (exceptions.InvalidResponse,),
        ConfigError,
        "what answers there is no Redis or Valkey server",
        "check host and port, and rediss:// where it speaks TLS",
    ),
    _Refusal(
        ("unknown command",),
        QueueError,
        "the server lacks a command",
        "use Redis 6.2 or later, or Valkey, and rename no command that deploy/users.acl.template lists",
    ),
)


def may_pass(error: Exception) -> bool:
    """Whether the same call may go well later."""
    if isinstance(error, _AUTH) or _NOT_VOUCHED_FOR in str(error):
        return False
    if isinstance(error, (*_REFUSED, *_CONNECTION)):
        return True
    return str(error).startswith(tuple(_PASSING)) or "-READONLY" in str(error)


def reason_of(error: Exception) -> str:
    """Its class and text."""
    return f"{type(error).__name__}: {error}"


def away(address: str, error: Exception) -> QueueUnavailable:
    """What is told of an error that did not pass in time."""
    fix = next((fix for start, fix in _PASSING.items() if str(error).startswith(start)), "")
    if isinstance(error, exceptions.BusyLoadingError):
        fix = "wait until it has read its file, or raise queue.max_wait_s"
    return QueueUnavailable(address, reason_of(error), fix=fix)


def refusal(address: str, error: Exception) -> EaglefeedError:
    """What is told of an error that does not pass."""
    if "used memory > 'maxmemory'" in str(error):
        fix = "raise its maxmemory, or let consumers catch up"
        return QueueUnavailable(address, "out of memory", fix=fix, is_full=True)
    for each in _REFUSALS:
        if each.fits(error):
            return each.kind(each.what, subject=address, got=reason_of(error), fix=each.fix)
    return QueueError("the server refuses a command", subject=address, got=reason_of(error))
