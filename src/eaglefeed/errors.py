"""Every error eaglefeed raises.

Callers branch on the class and on `retryable`, never on the text. A message is built here, from typed fields: what
happened, to which id, what was wanted and what came, and what to do next.

    EaglefeedError
    ├── ConfigError                     settings, options, variables
    ├── InputError                      conversations and files that a user brings
    ├── SchemaError (ValueError)        a ref or tensors that break the EAGLE-3 contract
    │   ├── SchemaVersionError          a schema or wire version this process was not started for
    │   └── ContractMismatch            a producer or trainer that differs from the run's contract
    ├── QueueError
    │   ├── QueueClosed                 a put of new ids after close()
    │   ├── QueueDrained                closed, and nothing left to lease
    │   ├── QueueFull          (retry)  the hard cap is reached
    │   ├── StaleLease                  the lease is no longer held by this token
    │   ├── IdConflict                  one id, two different payloads
    │   ├── NoProducers        (retry)  work remains and no producer lives
    │   ├── QueueUnavailable   (retry)  the server is out of reach, loading or out of connections
    │   └── UnsafeServer                a server that would lose data
    ├── StorageError           (retry)  a read or a write failed
    │   ├── SampleMissing      (retry)  a shard that is not there (yet)
    │   ├── SampleCorrupt               a shard whose bytes, specs or values are wrong
    │   ├── SampleDenied                a shard that this user may not read
    │   ├── StoreFull          (retry)  no room for another shard
    │   ├── BuffersHeld                 every read buffer is kept by tensors that are still in use
    │   └── PeerGone           (retry)  the process that holds the tensors is gone
    ├── TargetError
    │   ├── TargetUnavailable  (retry)  no target found, or it does not answer
    │   └── TargetMismatch              the target is not the one that was asked for
    └── RankGone               (retry)  a rank of a training job did not come to what all do together
"""

import re
from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "BuffersHeld", "ConfigError", "ContractMismatch", "EaglefeedError", "IdConflict", "InputError", "NoProducers",
    "PeerGone", "QueueClosed", "QueueDrained", "QueueError", "QueueFull", "QueueUnavailable", "RankGone",
    "SampleCorrupt", "SampleDenied", "SampleMissing", "SchemaError", "SchemaVersionError", "StaleLease", "StorageError",
    "StoreFull", "TargetError", "TargetMismatch", "TargetUnavailable", "UnsafeServer",
]  # fmt: skip

_LOGIN = re.compile(r"://[^/\s]+@")


class EaglefeedError(Exception):
    """The root of the tree.

    Args:
        what: what happened.
        subject: the id, path or name that it happened to.
        wanted: what was expected there.
        got: what was found instead.
        fix: what to do next; a class may bring a default.
    """

    retryable: ClassVar[bool] = False
    default_fix: ClassVar[str] = ""

    def __init__(
        self, what: str, *, subject: str = "", wanted: object = None, got: object = None, fix: str = ""
    ) -> None:
        self.what, self.subject, self.wanted, self.got = what, subject, wanted, got
        self.fix = fix or self.default_fix
        super().__init__(self._message())

    def _message(self) -> str:
        head = f"{self.subject}: {self.what}" if self.subject else self.what
        facts = [f"{name} {value}" for name, value in (("wanted", self.wanted), ("got", self.got)) if value is not None]
        text = "; ".join([", ".join([head, *facts]), *([self.fix] if self.fix else [])])
        return _without_logins(text)

    def __reduce__(self) -> tuple[object, ...]:
        """As it is to another process: a loader's or a pool's worker hands its error to the one that waits for it."""
        return _remade, (type(self), self.args), self.__dict__

    @staticmethod
    def text_of(error: BaseException) -> str:
        """The class and the text of any error, whose addresses have lost their user and password."""
        return _without_logins(f"{type(error).__name__}: {error}")


def _remade(kind: type[EaglefeedError], args: tuple[object, ...]) -> EaglefeedError:
    return kind.__new__(kind, *args)


def _without_logins(text: str) -> str:
    return _LOGIN.sub("://…@", text)


class ConfigError(EaglefeedError):
    """A setting, an option or a variable that cannot be used."""


class InputError(EaglefeedError):
    """A file or a row of the user's that cannot be used."""


class SchemaError(EaglefeedError, ValueError):
    """A ref or tensors that break the EAGLE-3 contract."""


class SchemaVersionError(SchemaError):
    """A version this process was not started for; versions are never migrated."""

    default_fix = "start this process with the eaglefeed version that wrote it, or produce the samples again"


class ContractMismatch(SchemaError):
    """A producer, trainer or sample that differs from the run's contract."""

    default_fix = "use the settings of the run's contract.json, or start a new run"


class QueueError(EaglefeedError):
    """Something about the lease queue."""


class QueueClosed(QueueError):
    """New ids were put into a closed queue."""

    def __init__(self, queue: str) -> None:
        super().__init__("closed, it takes no new ids", subject=queue, fix="start a new run, or feed with --keep-open")


class QueueDrained(QueueError):
    """The queue is closed and nothing is ready, delayed or leased."""

    def __init__(self, queue: str) -> None:
        super().__init__("drained: closed, and nothing is left to lease", subject=queue)


class QueueFull(QueueError):
    """The queue's hard cap is reached; put again after `retry_after_s`."""

    retryable = True

    def __init__(self, queue: str, *, depth: int, max_depth: int, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        fix = f"put again in {retry_after_s:g} s, or raise queue.max_depth"
        super().__init__("full", subject=queue, wanted=f"at most {max_depth} refs", got=depth, fix=fix)


class StaleLease(QueueError):
    """The lease was reclaimed, settled or given back before this call; nothing was changed by it."""

    def __init__(self, operation: str, token: int, item_id: str = "") -> None:
        self.operation, self.token, self.item_id = operation, token, item_id
        fix = "drop the work, its next holder has it; raise queue.visibility_timeout_s if this repeats"
        super().__init__(f"{operation} refused, lease {token} does not hold it any more", subject=item_id, fix=fix)

    @classmethod
    def of_session(cls, operation: str, session: int, newest: int) -> "StaleLease":
        """The session ended, and its leases with it, when another trainer of the group restored a checkpoint."""
        error = cls(operation, 0)
        error.what, error.wanted, error.got = f"{operation} refused, its session is over", newest, session
        error.fix = "stop this trainer: a newer one restored a checkpoint and goes on from there"
        if session > newest:
            error.what = (
                f"{operation} refused, the server knows no such session: it went back to older data, or lost it"
            )
            error.fix = "start this trainer again: it goes on from its newest checkpoint"
        if not session:
            error.fix = (
                "this group has checkpoints: call restore(step) first and pass its session (a stream: load_state_dict)"
            )
        error.args = (error._message(),)
        return error


class IdConflict(QueueError):
    """One id was put with two different payloads."""

    def __init__(self, queue: str, item_id: str) -> None:
        self.item_id = item_id
        fix = "give each conversation an id of its own"
        super().__init__(f"put into {queue} before, with another content", subject=item_id, fix=fix)


class NoProducers(QueueError):
    """Prompts remain and no producer has shown a sign of life for the grace period."""

    retryable = True

    def __init__(self, *, num_prompts: int, grace_s: float, last_error: str = "") -> None:
        self.num_prompts, self.last_error = num_prompts, last_error
        what = f"no producer has been alive for {grace_s:g} s and {num_prompts} prompts remain"
        what += f"; a producer's last error: {last_error}" if last_error else ", and none said why it ended"
        super().__init__(what, fix="start `eaglefeed produce` on this run, or wait with train.no_producers=wait")


class QueueUnavailable(QueueError):
    """The server did not answer, is loading, refuses connections, is a replica, or has no memory left (`is_full`)."""

    retryable = True

    def __init__(self, address: str, reason: str, *, fix: str = "", is_full: bool = False) -> None:
        self.address, self.reason, self.is_full = address, reason, is_full
        what = reason if fix else f"not reachable ({reason})"  # with a fix of its own, it did answer
        super().__init__(what, subject=address, fix=fix or "check that the server runs and is reachable")


class UnsafeServer(QueueError):
    """A server that would lose acknowledged work."""


class StorageError(EaglefeedError):
    """A feature store could not read or write; it may go well elsewhere or later."""

    retryable = True


class SampleMissing(StorageError):
    """A ref whose shard is not there."""

    def __init__(self, sample_id: str, key: str) -> None:
        self.sample_id, self.key = sample_id, key
        fix = "check that producer and trainer see the same folder, and that nobody deleted it"
        super().__init__("no such shard", subject=sample_id, wanted=key, fix=fix)


class SampleCorrupt(StorageError):
    """A shard whose bytes, specs or values are not those its ref promises; `where` names its file or object."""

    retryable = False

    def __init__(
        self, sample_id: str, what: str, *, wanted: object = None, got: object = None, where: str = ""
    ) -> None:
        self.sample_id, self.where, self._plain = sample_id, where, what
        fix = "produce it again; `eaglefeed validate --values` shows which files are damaged"
        super().__init__(f"{what} in {where}" if where else what, subject=sample_id, wanted=wanted, got=got, fix=fix)

    def found_in(self, where: str) -> "SampleCorrupt":
        """The same, with the file or object that it is about."""
        return SampleCorrupt(self.sample_id, self._plain, wanted=self.wanted, got=self.got, where=where)


class SampleDenied(StorageError):
    """A shard that is there, and that this user may not read: no other try will, until somebody changes it."""

    retryable = False
    default_fix = (
        "run the producers with a umask that lets others read (002 in one group, or 022), mend what is there with "
        "`chmod -R a+rX`, then `eaglefeed queue dead requeue`"
    )


class StoreFull(StorageError):
    """No room for another shard; the partial file has been removed."""

    default_fix = "free space or a quota, lower queue.high_bytes, or train on more ranks"

    def __init__(self, store: str, *, num_bytes: int, free_bytes: int, reason: str, fix: str = "") -> None:
        self.num_bytes, self.free_bytes = num_bytes, free_bytes
        what = f"no room for a shard of {num_bytes} bytes ({reason}; {free_bytes} bytes show as free)"
        super().__init__(what, subject=store, fix=fix)


class BuffersHeld(StorageError):
    """Every read buffer is kept by tensors that are still in use."""

    retryable = False

    def __init__(self, holders: Sequence[str], *, num_buffers: int, waited_s: float) -> None:
        self.holders = list(holders)
        who = ", ".join(self.holders)
        what = f"no read buffer came back in {waited_s:g} s: all {num_buffers} are held by tensors of {who}"
        fix = "drop the tensors (views and slices too) of samples that are done, clone what is kept, or raise held"
        super().__init__(what, fix=fix)


class PeerGone(StorageError):
    """The process that holds a sample's tensors does not live any more."""


class TargetError(EaglefeedError):
    """Something about the target model."""


class TargetUnavailable(TargetError):
    """No target was found, or it does not answer."""

    retryable = True


class TargetMismatch(TargetError):
    """The target is not what the run needs."""


class RankGone(EaglefeedError):
    """A rank did not come to what all ranks of a job do together; `missing` are those that are known to be late."""

    retryable = True
    default_fix = (
        "see the missing rank's log, and start the job again: it goes on from its newest checkpoint; "
        "raise collective_timeout_s if a step or a checkpoint takes longer"
    )

    def __init__(
        self,
        doing: str,
        *,
        rank: int | None,
        missing: Sequence[int],
        timeout_s: float,
        reason: str = "",
        fix: str = "",
    ) -> None:
        self.missing = tuple(missing)
        who = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        what, subject = f"{who} did not come to {doing}", "" if rank is None else f"rank {rank}"
        super().__init__(what, subject=subject, wanted=f"within {timeout_s:g} s", got=reason or None, fix=fix)
