"""What the first rank of a job does for all of them, while the others wait; its failure is everybody's."""

import threading
from collections.abc import Callable, Mapping

import msgpack
import torch

from eaglefeed import errors
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.errors import ConfigError, EaglefeedError, RankGone

__all__ = ["first_alone", "first_at_length", "keep_waiting", "pack_error", "require_alike", "unpack_error"]

_DONE, _FAILED, _WAIT = b"d", b"f", b"w"
_MAX_TEXT = 4000


def first_alone(ranks: Ranks, call: Callable[[], bytes]) -> bytes:
    """Make a call on rank 0 alone; every rank gets what it returns, or raises what it raised.

    A call that may take longer than the ranks' deadline must `keep_waiting` now and then.

    Raises:
        RankGone: another rank did not come here.
    """
    if ranks.is_first:
        return _call(ranks, call)
    while (message := ranks.tell()) == _WAIT:
        pass
    if message.startswith(_FAILED):
        raise unpack_error(message[1:])
    return message[1:]


def keep_waiting(ranks: Ranks) -> None:
    """On rank 0, in a call of `first_alone`: tell the others that it goes on."""
    ranks.tell(_WAIT)


def first_at_length(ranks: Ranks, call: Callable[[], None]) -> None:
    """Make a call on rank 0 between two steps, which may take longer than the ranks' deadline: they wait for its end.

    For the main threads; the call is made on another one. Its error is raised on rank 0 alone.

    Raises:
        RankGone: another rank did not come here.
    """
    if ranks.world_size == 1:
        call()
        return
    word = torch.ones(1, dtype=torch.uint8)
    if not ranks.is_first:
        while word[0]:
            ranks.share([word])
        return
    errors: list[BaseException] = []
    thread = threading.Thread(target=_keeping, args=(call, errors), name="eaglefeed-first", daemon=True)
    thread.start()
    while word[0]:
        thread.join(ranks.timeout_s / 4)
        word[0] = thread.is_alive()
        ranks.share([word])
    if errors:
        raise errors[0]


def _keeping(call: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        errors.append(error)


def require_alike(ranks: Ranks, setup: Mapping[str, str]) -> None:
    """Check that all ranks were given the same: they would hang, or learn different things, without a word.

    Raises:
        ConfigError: on every rank; names one that differs, and in what.
        RankGone: another rank did not come here.
    """
    found: list[dict[str, str]] = [msgpack.unpackb(each) for each in ranks.collect(msgpack.packb(dict(setup)))]

    def compare() -> bytes:
        for rank, theirs in enumerate(found):
            for name in setup:
                if theirs.get(name) != setup[name]:
                    fix = "start all ranks of a job with the same settings"
                    what, wanted = f"rank {rank} has another {name} than rank 0", setup[name]
                    raise ConfigError(what, wanted=wanted, got=theirs.get(name), fix=fix)
        return b""

    first_alone(ranks, compare)


def pack_error(error: EaglefeedError) -> bytes:
    """An error for other ranks: its class and its text."""
    data: bytes = msgpack.packb([type(error).__name__, str(error)[:_MAX_TEXT]], unicode_errors="backslashreplace")
    return data


def unpack_error(data: bytes, rank: int = 0) -> EaglefeedError:
    """What `pack_error` was given on a rank, as far as callers look at it: the class, and the text with its origin."""
    name, text = msgpack.unpackb(data)
    kind = getattr(errors, name, EaglefeedError)
    error: EaglefeedError = kind.__new__(kind)
    EaglefeedError.__init__(error, text if text.startswith("on rank ") else f"on rank {rank}: {text}")
    error.fix, error.args = "", (error.what,)  # the text has its fix already
    return error


def _call(ranks: Ranks, call: Callable[[], bytes]) -> bytes:
    try:
        result = call()
    except RankGone:
        raise
    except EaglefeedError as error:
        ranks.tell(_FAILED + pack_error(error))
        raise
    ranks.tell(_DONE + result)
    return result
