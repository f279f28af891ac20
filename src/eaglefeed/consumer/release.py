"""Deleting the shards of samples that every group is done with."""

from eaglefeed.errors import SchemaError, StorageError
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeaseQueue, QueueItem
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.base import FeatureStore

__all__ = ["delete_released"]

_PAGE = 200

log = get_logger(__name__)


def delete_released(samples: LeaseQueue, store: FeatureStore, *, retain: bool = False) -> int:
    """Delete the shards of released samples, a page at a time; returns how many samples left the queue's list.

    What a crash or a failing store leaves stays on that list, for the next call.

    Args:
        samples: the queue.
        store: where the shards lie.
        retain: leave the shards, and only clear the list.

    Raises:
        QueueUnavailable: the server was away for too long.
    """
    count = 0
    while page := samples.released(_PAGE):
        gone = [item.id for item in page if retain or _delete(store, item)]
        samples.forget(gone)
        count += len(gone)
        if len(page) < _PAGE or len(gone) < len(page):
            break
    return count


def _delete(store: FeatureStore, item: QueueItem) -> bool:
    """False where the shard is still there and may be deleted later."""
    try:
        store.delete(decode_ref(item.payload))
    except SchemaError as error:  # it names no shard
        log.error("released_ref_unreadable", sample_id=item.id, reason=str(error))  # noqa: TRY400
    except StorageError as error:
        log.warning("shard_stays", sample_id=item.id, reason=str(error))
        return False
    return True
