"""A folder of features into a run: each file is an item of the prompts queue, and its row becomes that item's sample.

So an import is a producer like any other. Its leases name the shards, so that no janitor takes one for an orphan; it
waits for room; a killed one is gone on with by the next call, which queues nothing twice; trainers may train meanwhile.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import (
    IdConflict,
    InputError,
    QueueUnavailable,
    SampleCorrupt,
    SchemaError,
    StaleLease,
    StoreFull,
)
from eaglefeed.interop.features import Features, ImportTarget
from eaglefeed.interop.file_items import FileItems
from eaglefeed.interop.folder import FeatureFile, FeatureFolder, too_large
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import DrainState, Lease, LeasedItem, LeaseQueue, QueueItem
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.eagle3_compact import encode_compact
from eaglefeed.schema.refs import SampleRef, encode_ref
from eaglefeed.schema.values import validate_eagle3_tensors
from eaglefeed.storage.base import FeatureStore, shard_key
from eaglefeed.storage.shard import spec_of

__all__ = ["Imported", "Importer"]

_WAIT_S, _FULL_PAUSE_S = 1.0, 5.0

log = get_logger(__name__)


@dataclass
class Imported:
    """What an import did.

    Args:
        files: in the folder.
        left_out: rows that have no file.
        known: files that an earlier call had queued, or whose samples a rebuilt queue holds.
        imported: by this call.
        num_tokens: of those.
        num_bytes: that their shards take.
        stale: whose lease ran out, so that another import has them.
        supervised: tokens that are to be predicted.
        agreed: of those, the ones that the target would have said itself: few, and it is another target, or other text.
        dead: that crashed the process again and again.
        drained: whether every file is a sample now.
    """

    files: int = 0
    left_out: int = 0
    known: int = 0
    imported: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    stale: int = 0
    supervised: int = 0
    agreed: int = 0
    dead: int = 0
    drained: bool = False


class Importer:
    """Imports one folder.

    Args:
        folder: where the files are.
        target: what is known of the target; its contract is the run's.
        prompts: of the run; nothing but this folder's files was ever put there.
        samples: of the run.
        store: where shards go.
        run_id: the run.
        name: this process's, unique in the run.
        agree: called with the bytes of the largest file, once the first file fits and before the run knows any of them:
            writes the run's contract and assets, or refuses.
        visibility_timeout_s: how long a lease lasts without a renewal.
        stall_timeout_s: leases are no longer renewed when no file was done in this time.
        tidy: called between files: a bounded piece of a janitor's work.
        clock: pauses wait on it.
    """

    def __init__(
        self,
        folder: FeatureFolder,
        target: ImportTarget,
        *,
        prompts: LeaseQueue,
        samples: LeaseQueue,
        store: FeatureStore,
        run_id: str,
        name: str,
        agree: Callable[[int], None],
        visibility_timeout_s: float = 60.0,
        stall_timeout_s: float = 600.0,
        tidy: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._folder, self._target, self._store, self._run_id = folder, target, store, run_id
        self._prompts, self._samples, self._name = prompts, samples, name
        self._agree, self._timeout_s, self._tidy, self._clock = agree, visibility_timeout_s, tidy, clock
        self._renewer = LeaseRenewer(
            prompts,
            visibility_timeout_s=visibility_timeout_s,
            stall_timeout_s=stall_timeout_s,
            on_renewed=lambda: prompts.beat("producer", name),
        )
        self._is_waiting = False
        self.done = Imported()

    def run(self, stop: threading.Event) -> Imported:
        """Import until every file is a sample, or `stop` is set; then the samples are closed.

        Raises:
            InputError: a file that does not fit; it stays queued, those before it are imported, and the next call goes
                on with it.
            ConfigError: other prompts than this folder's are queued; the run is as it was.
            QueueError: the queue refused, or is out of reach.
            StorageError: the store refused, or is out of reach.
        """
        self._queue_files()
        self._renewer.start()
        try:
            while not stop.is_set() and self._round():
                pass
        finally:
            self._renewer.stop()
            self._leave()
        stats = self._prompts.stats()
        self.done.dead, self.done.drained = stats.dead, stats.drained
        return self.done

    def _queue_files(self) -> None:
        files = self._folder.files()
        self.done.files, self.done.left_out = len(files), self._folder.num_missing
        self._row(files[0].name)  # what is wrong with all of them is told while another call can still say otherwise
        self._check_sizes(files)
        self._items = FileItems(self._folder.format, files, self._prompts, self._samples)
        left = self._items.left()
        self._agree(max(file.num_bytes for file in files))
        self.done.known = len(files) - len(left) + self._items.put(left)
        self._prompts.close()

    def _check_sizes(self, files: Sequence[FeatureFile]) -> None:
        """Refuse a row that is too long before hours are spent on others; of compressed files only reading tells."""
        bound = self._target.max_file_bytes(self._target.contract.dtype)
        for file in files:
            if file.num_bytes > bound and not file.name.endswith(".gz"):
                raise too_large(file.name, bound, file.num_bytes)

    def _row(self, name: str) -> Features:
        return self._folder.read(name, self._target.max_file_bytes()).checked(self._target)

    def _round(self) -> bool:
        self._prompts.beat("producer", self._name)
        self._tidy()
        if not self._has_room():
            return True
        lease = self._prompts.lease(1, visibility_timeout_s=self._timeout_s, consumer=self._name, wait_s=_WAIT_S)
        if isinstance(lease, Lease):
            self._import(lease.token, lease.items[0])
        elif lease.state is DrainState.DRAINED:
            self._samples.close()
            return False
        return True

    def _has_room(self) -> bool:
        if self._samples.wait_for_room(_WAIT_S) and self._store.wait_for_room(_WAIT_S):
            self._is_waiting = False
            return True
        if not self._is_waiting:
            fix = "train meanwhile, or raise queue.high_count and queue.high_bytes"
            log.warning("import_waits_for_room", queue=self._samples.name, fix=fix)
        self._is_waiting = True
        return self._prompts.stats().drained  # then nothing needs room any more

    def _import(self, token: int, item: LeasedItem) -> None:
        self._renewer.add(token)
        try:
            self._make(token, item)
        except StaleLease as error:
            log.warning("import_lost_its_lease", sample_id=item.id, lease=token, reason=str(error))
            self.done.stale += 1
        except StoreFull as error:
            self._give_back(token, item.id, str(error))
            log.warning("import_waits_for_the_store", sample_id=item.id, lease=token, reason=str(error))
            self._clock.sleep(_FULL_PAUSE_S)
        except BaseException as error:
            self._give_back(token, item.id, str(error))
            raise
        finally:
            self._renewer.forget(token)
            self._renewer.progress()

    def _make(self, token: int, item: LeasedItem) -> None:
        file = self._items.file_of(item)
        tensors = self._row(file.name).tensors(self._target)
        ref = self._describe(file.sample_id, tensors, token)
        try:
            validate_eagle3_tensors(tensors, ref.feature_specs, sample_id=ref.sample_id)
        except SampleCorrupt as error:
            raise InputError(error.what, subject=file.name, wanted=error.wanted, got=error.got) from None
        self._hand_off(token, self._store.put(ref, self._encoded(tensors)))
        self._count(tensors)

    def _describe(self, sample_id: str, tensors: dict[str, Tensor], token: int) -> SampleRef:
        contract, specs = self._target.contract, {name: spec_of(tensor) for name, tensor in tensors.items()}
        return contract.ref_of(
            sample_id=sample_id,
            run_id=self._run_id,
            store_uri=self._store.uri,
            key=shard_key(sample_id, token),
            specs=specs,
            num_tokens=tensors["input_ids"].numel(),
        )

    def _encoded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        contract = self._target.contract
        fp8, dropped = contract.aux_storage == "fp8", contract.supervision_rows == "supervised"
        return encode_compact(tensors, fp8_aux=fp8, supervised_rows=dropped)

    def _hand_off(self, token: int, ref: SampleRef) -> None:
        self._renewer.forget(token)
        try:
            item = QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)
            self._prompts.handoff(token, ref.sample_id, item, self._samples)
        except (IdConflict, SchemaError, StaleLease):
            self._store.delete(ref)  # its name holds this lease's token: nobody will ever read it
            raise
        self.done.imported += 1
        self.done.num_tokens += ref.num_tokens
        self.done.num_bytes += ref.stored_bytes

    def _count(self, tensors: dict[str, Tensor]) -> None:
        """Row t of target_argmax stands for what follows token t + 1, which is row t + 1 of input_ids."""
        supervised = tensors["loss_mask"][:, 1:].bool()
        same = tensors["target_argmax"][:, :-1] == tensors["input_ids"][:, 1:]
        self.done.supervised += int(supervised.sum())
        self.done.agreed += int((same & supervised).sum())

    def _give_back(self, token: int, item_id: str, reason: str) -> None:
        self._renewer.forget(token)
        try:
            self._prompts.nack(token, [item_id], reason=reason, delay_s=0)
        except QueueUnavailable as error:
            log.warning("lease_left_to_run_out", sample_id=item_id, lease=token, reason=str(error))

    def _leave(self) -> None:
        try:
            self._prompts.farewell("producer", self._name)
        except QueueUnavailable as error:
            log.warning("no_farewell", queue=self._prompts.name, reason=str(error))
