"""What a call of `eaglefeed feed` agrees on with the others of its run."""

import sys
from pathlib import Path

from eaglefeed.cli.common import RunQueues
from eaglefeed.producer.feed_record import FeedRecord, agree_on_feed, agree_on_file, unfinished
from eaglefeed.producer.ledger import QueueLedger

__all__ = ["agree", "waits_for_others"]


def agree(queues: RunQueues, record: FeedRecord, path: Path) -> str:
    """Before the first prompt is queued: the run is fed as it was before, and the file holds what it held.

    Returns what `note_whole` is told once all of the file is queued.

    Raises:
        ContractMismatch: names what differs, with both values.
    """
    instance = _instance(queues)
    agree_on_feed(queues.samples, instance, record)
    return agree_on_file(queues.samples, instance, path, may_grow=record.keeps_rows)


def waits_for_others(queues: RunQueues, *, is_new: bool) -> bool:
    """Whether the feed of another file was killed, or is under way: a closed run would take no more of it.

    Args:
        queues: of the run.
        is_new: whether this call queued anything; the next one, which does not, closes the run all the same.
    """
    left = unfinished(queues.samples, _instance(queues)) if is_new else []
    if left:
        fix = "feed it again; or this file once more, to close the run without it"
        sys.stderr.write(f"eaglefeed: {', '.join(left)}: not fed to its end, so the run stays open; {fix}\n")
    return bool(left)


def _instance(queues: RunQueues) -> str:
    return QueueLedger(queues.run, queues.named).instance()
