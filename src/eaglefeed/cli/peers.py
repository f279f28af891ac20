"""What the commands need of runs whose samples stay with their producers, nccl://."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

from eaglefeed.cli.common import is_with_producers
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError, SchemaError
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import LeasedItem, LeaseQueue
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.base import FeatureStore, open_store
from eaglefeed.storage.options import PeerOptions

__all__ = ["RefWatch", "refuse_peers", "trainer_options"]

_DOCUMENTS = "run-files"
_PEEKED = 3

log = get_logger(__name__)


def trainer_options(settings: Settings, refs: Callable[[], Iterable[LeasedItem]]) -> PeerOptions:
    """A trainer finds producers by the open `refs`, and keeps the run's files beside its checkpoints.

    They are there when it comes back to a run whose samples are all trained on, and whose producers have ended.
    """
    if not is_with_producers(settings):
        return PeerOptions()
    documents = open_store(str((settings.train_output / _DOCUMENTS).absolute()))
    return PeerOptions(device=settings.train.device, discover=lambda: _producers(refs()), documents=documents)


def _producers(refs: Iterable[LeasedItem]) -> Iterator[str]:
    for item in refs:
        with suppress(SchemaError):
            yield decode_ref(item.payload).store_uri


class RefWatch:
    """Looks at the samples that wait in the queue, for a trainer that would wait for ever.

    Args:
        store: the trainer's.
        samples: opens the queue, as some group of the run sees it.
    """

    def __init__(self, store: FeatureStore, samples: Callable[[], LeaseQueue]) -> None:
        self._store, self._samples, self._is_warned = store, samples, False

    def look(self) -> None:
        """Check a few refs, and warn once of samples whose producers are all gone.

        Raises:
            ConfigError: the refs are of another kind of store.
        """
        samples = self._samples()
        for uri in _producers(islice(samples.payloads(), _PEEKED)):
            self._require_kind(uri)
        stats = samples.stats()
        count = stats.ready + stats.delayed + stats.leased + stats.parked
        if self._store.stays_with_producer and count and not stats.workers.get("producer") and not self._is_warned:
            self._is_warned = True
            fix = "start `eaglefeed produce`: it makes them again"
            log.warning("samples_without_producers", count=count, what="kept by producers that are gone", fix=fix)

    def _require_kind(self, uri: str) -> None:
        kind = uri.partition("://")[0]
        if kind != self._store.uri.partition("://")[0]:
            is_kept = uri.startswith("nccl://")
            wanted, address = ("nccl://…", "nccl://") if is_kept else (uri, uri)
            what, fix = "the samples lie in another kind of store", f"pass --store {address}"
            raise ConfigError(what, subject="store.uri", wanted=wanted, got=self._store.uri, fix=fix)


def refuse_peers(settings: Settings, what: str) -> None:
    """Refuse what needs shards that lie somewhere.

    Raises:
        ConfigError: the run's samples stay with their producers.
    """
    if is_with_producers(settings):
        fix = "`eaglefeed queue stats` counts the samples; each producer frees its own as soon as nobody needs them"
        raise ConfigError(f"{what}: its samples are in their producers' memory", subject=settings.store_uri, fix=fix)
