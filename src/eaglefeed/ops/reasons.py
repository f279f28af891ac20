"""Classes of the reasons for which items were set aside: few and known, whatever the reasons say."""

import builtins

from eaglefeed import errors

__all__ = ["CRASHED", "OTHER", "REASON_CLASSES", "reason_class"]

CRASHED, OTHER = "crashed", "other"
_ERRORS = {name for name in errors.__all__ if name != "EaglefeedError"}
_BUILT_IN = {name for name in vars(builtins) if name.endswith("Error")}
_OF_TORCH = {"OutOfMemoryError"}
REASON_CLASSES = frozenset({CRASHED, OTHER} | _ERRORS | _BUILT_IN | _OF_TORCH)
"""All that there are."""


def reason_class(reason: str) -> str:
    """The class of the error that a reason begins with; CRASHED where workers died of the item, else OTHER."""
    if reason.startswith("its lease ran out "):  # rules.crash_reason, and the scripts
        return CRASHED
    head = reason.partition(":")[0]
    return head if head in REASON_CLASSES else OTHER
