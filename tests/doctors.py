"""What tests of the doctor share."""

from collections.abc import Iterable
from pathlib import Path

from commands import Ended
from eaglefeed.ops.doctor import Finding

_ORDER = ["ok", "skipped", "warn", "fail"]


def only(*parts: str) -> list[str]:
    """The command that looks at these parts."""
    return ["doctor", "--json", *(word for part in parts for word in ("--only", part))]


def found(ended: Ended, check: str) -> dict[str, str]:
    """The finding of that name that is worst; whatever is not well has a fix."""
    findings = [each for each in ended.document["findings"] if each["check"] == check]
    assert findings, f"no {check} in {ended.out} {ended.err}"
    assert all(each["fix"] for each in findings if each["status"] in {"warn", "fail"})
    return max(findings, key=lambda each: _ORDER.index(each["status"]))


def worst(findings: Iterable[Finding], check: str) -> Finding:
    """The finding of that name that is worst; whatever is not well has a fix."""
    named = [each for each in findings if each.check == check]
    assert all(each.fix for each in named if each.status in {"warn", "fail"})
    return max(named, key=lambda each: _ORDER.index(each.status))


def left_in(folder: Path) -> list[str]:
    """All that lies in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
