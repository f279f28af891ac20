"""What a run's queues know of its shards: the janitor's view of them, and what a producer agrees at first."""

import secrets
from collections.abc import Callable, Collection

from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.logs import get_logger
from eaglefeed.queue import rules
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.contract import RETAIN_RECORD
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.base import FeatureStore, key_of
from eaglefeed.storage.orphans import EVERY_KEY, introduce

__all__ = ["QueueLedger", "enlist", "register"]

_SAMPLES = "samples"
_QUEUE = "queue:"
"""In the run's record, with a samples queue's name behind it."""

log = get_logger(__name__)


class QueueLedger:
    """See RefLedger.

    Args:
        run_id: as it stands in the refs of the run.
        open_queue: opens a queue of the run by its name.
        lifted: as if no queue retained what it has released: nobody will replay it.
    """

    def __init__(self, run_id: str, open_queue: Callable[[str], LeaseQueue], *, lifted: bool = False) -> None:
        self.run_id, self._open, self._lifted = run_id, open_queue, lifted
        self._run = open_queue(_SAMPLES)

    def instance(self) -> str:
        """See RefLedger."""
        return self._run.agree(rules.INSTANCE, secrets.token_hex(8).encode()).decode()

    def former(self) -> set[str]:
        """See RefLedger."""
        return {name.removeprefix(rules.FORMER) for name in self._run.agreed() if name.startswith(rules.FORMER)}

    def retains(self, queue: str) -> bool:
        """See RefLedger."""
        return not self._lifted and RETAIN_RECORD + queue in self._run.agreed()

    def leased(self, tokens: Collection[int]) -> set[int]:
        """See RefLedger."""
        prompts = [rules.prompts_of(samples.name) for samples in self.releases()]
        return {token for name in prompts if name for token in self._open(name).leased(tokens)}

    def kept(self, ids: Collection[str]) -> dict[str, set[str]]:
        """See RefLedger."""
        keys: dict[str, set[str]] = {}
        for samples in self.releases():
            for item in samples.find(ids):
                keys.setdefault(item.id, set()).add(_key(item.id, item.payload))
            # asked after what it may have kept
            for item_id in samples.known(ids) if self.retains(samples.name) else ():
                keys.setdefault(item_id, {EVERY_KEY})
        return keys

    def releases(self) -> list[LeaseQueue]:
        """See RefLedger."""
        found = {name.removeprefix(_QUEUE) for name in self._run.agreed() if name.startswith(_QUEUE)}
        return [self._open(name) for name in sorted(found | {_SAMPLES})]


def _key(item_id: str, payload: bytes) -> str:
    try:
        return key_of(decode_ref(payload))
    except (SchemaError, SampleCorrupt) as error:
        log.warning("kept_ref_unreadable", sample_id=item_id, reason=str(error))
        return EVERY_KEY


def enlist(samples: LeaseQueue) -> None:
    """List a samples queue in the run's record, before its first ref: then every ledger asks it too."""
    samples.agree(f"{_QUEUE}{samples.name}", b"1")


def register(store: FeatureStore, samples: LeaseQueue, run_id: str) -> None:
    """Before a producer's first shard: list its queue in the run's record, and introduce the queue to the store."""
    enlist(samples)
    if not introduce(store, QueueLedger(run_id, lambda _: samples)):
        fix = "before feeding, `eaglefeed store rebuild`, or delete the folder; until then no janitor deletes shards"
        log.warning("shards_from_before", store=store.uri, run=run_id, fix=fix)
