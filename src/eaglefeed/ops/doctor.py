"""What the doctor says, and how it looks: each look has a deadline, and one that hangs or fails is a finding too."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from eaglefeed.errors import EaglefeedError

__all__ = ["DEADLINE_S", "Finding", "Said", "Status", "fail", "look", "ok", "skipped", "warn"]

Status = Literal["ok", "warn", "fail", "skipped"]
DEADLINE_S = 15.0
"""Of one look, unless it is given another."""

_TIDY_S = 2.0
_ELSE = "see docs/troubleshooting.md"


@dataclass(frozen=True)
class Said:
    """What a look found, and what to do about it."""

    status: Status
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """What a look found, under the name of the look, such as queue.persistence."""

    check: str
    status: Status
    what: str
    fix: str = ""


def ok(what: str) -> Said:
    """All is well."""
    return Said("ok", what)


def warn(what: str, fix: str) -> Said:
    """It works, and may not do so for long or for everybody."""
    return Said("warn", what, fix)


def fail(what: str, fix: str) -> Said:
    """A run would stop here, or lose work."""
    return Said("fail", what, fix)


def skipped(what: str, fix: str = "") -> Said:
    """Not looked at."""
    return Said("skipped", what, fix)


def look(
    check: str, question: Callable[[], Iterable[Said]], deadline_s: float = DEADLINE_S, *, fix: str = _ELSE
) -> list[Finding]:
    """Ask one question in a thread of its own, so that a server or disk that hangs does not hang the doctor.

    Args:
        check: the name of what is looked at.
        question: what to ask; it leaves nothing behind, also when it fails.
        deadline_s: how long it is waited for; one that takes longer is left alone, and ends with this process.
        fix: of errors that know none.

    Returns:
        All that it said, in one piece; or a failure that says why it said nothing.
    """
    said, has_ended = list[Said](), threading.Event()

    def answer() -> None:
        said.extend(_asked(question))
        has_ended.set()

    threading.Thread(target=answer, name=f"doctor-{check}", daemon=True).start()
    try:
        is_answered = has_ended.wait(deadline_s)
    except KeyboardInterrupt:
        has_ended.wait(_TIDY_S)  # it removes what it made
        raise
    if not is_answered:
        said = [fail(f"no answer within {deadline_s:g} s", "see whether its server, disk or network hangs")]
    return [Finding(check, each.status, each.what, each.fix or fix * (each.status == "fail")) for each in said]


def _asked(question: Callable[[], Iterable[Said]]) -> list[Said]:
    try:
        return list(question())
    except EaglefeedError as error:
        return [_told(error)]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return [fail(f"{where}{error.strerror or error}", "check its owner, mode, and whether the disk is well")]
    except Exception as error:  # noqa: BLE001  one look that breaks must not keep the others from being told
        reason = EaglefeedError.text_of(error)[:300]
        return [fail(f"the look itself failed ({reason})", "tell the authors of eaglefeed, with this line")]


def _told(error: EaglefeedError) -> Said:
    """An error's text without its fix, which a finding has a place of its own for."""
    text = str(error)
    return fail(text.removesuffix(f"; {error.fix}") if error.fix else text, error.fix)
