"""The producer: wait for room, lease prompts, run the target, write shards, hand them off."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import (
    ContractMismatch,
    EaglefeedError,
    IdConflict,
    SchemaError,
    StaleLease,
    StorageError,
    StoreFull,
)
from eaglefeed.logs import get_logger
from eaglefeed.queue.base import DrainState, Lease, LeasedItem, LeaseQueue, QueueItem
from eaglefeed.queue.renewal import LeaseRenewer
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch
from eaglefeed.schema.contract import ASSETS_FILE, CONTRACT_FILE, RunContract
from eaglefeed.schema.eagle3 import validate_eagle3_ref
from eaglefeed.schema.prompt import Prompt, decode_prompt
from eaglefeed.schema.refs import FeatureAlgorithm, SampleRef, encode_ref
from eaglefeed.schema.values import validate_eagle3_tensors
from eaglefeed.storage.base import FeatureStore, shard_key
from eaglefeed.storage.shard import spec_of

__all__ = ["ProducerStats", "ProducerWorker", "pad_prompt"]

_WAIT_S = 1.0
_FULL_PAUSE_S, _RECALL_S = 5.0, 10.0

log = get_logger(__name__)


@dataclass
class ProducerStats:
    """What a producer did: nothing it leased is missing here."""

    produced: int = 0
    dead: int = 0
    retried: int = 0
    returned: int = 0
    stale: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    paused_s: float = 0.0


def pad_prompt(prompt: Prompt) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded input_ids, attention_mask and loss_mask of a prompt's rows, each [B, S] int64."""
    length = max(len(row.input_ids) for row in prompt.rows)
    ids, attention, loss = (torch.zeros(len(prompt.rows), length, dtype=torch.int64) for _ in range(3))
    for index, row in enumerate(prompt.rows):
        size = len(row.input_ids)
        ids[index, :size] = torch.tensor(row.input_ids)
        attention[index, :size] = 1
        loss[index, :size] = torch.tensor(row.loss_mask)
    return ids, attention, loss


class ProducerWorker:
    """Turns prompts into samples until the prompts are drained or it is told to stop.

    Args:
        prompts: the queue it leases from.
        samples: the queue it hands off to, of the same run.
        store: where shards go.
        target: makes the tensors.
        contract: the run's contract as this producer would write it; its max_length is taken from the first prompt.
        assets: what trainers need of the target, written once a run.
        run_id: the run.
        name: this worker's name, unique in the run.
        lease_batch: prompts a lease.
        visibility_timeout_s: how long a lease lasts without a renewal.
        max_lease_age_s: a lease is not renewed beyond this age.
        max_attempts: deliveries after which a prompt that fails is a dead letter.
        clock: what `paused_s` is measured with, and pauses wait on.
    """

    def __init__(
        self,
        *,
        prompts: LeaseQueue,
        samples: LeaseQueue,
        store: FeatureStore,
        target: Eagle3TargetBackend,
        contract: RunContract,
        assets: Callable[[], tuple[dict[str, Tensor], dict[str, str]]],
        run_id: str,
        name: str,
        lease_batch: int = 4,
        visibility_timeout_s: float = 60.0,
        max_lease_age_s: float = 1800.0,
        max_attempts: int = 5,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stats = ProducerStats()
        self._prompts, self._samples, self._store, self._target = prompts, samples, store, target
        self._own_contract, self._assets, self._run_id, self._name = contract, assets, run_id, name
        self._lease_batch, self._timeout_s = lease_batch, visibility_timeout_s
        self._max_lease_age_s, self._max_attempts, self._clock = max_lease_age_s, max_attempts, clock
        self._contract: RunContract | None = None
        self._idle = False
        self._recalled_s = clock.monotonic()

    def run(self, stop: threading.Event) -> ProducerStats:
        """Work until the prompts are drained, or `stop` is set: then the item in hand is finished, the rest given back.

        Raises:
            ContractMismatch: this producer differs from the run's contract.
            QueueUnavailable: the server was away for too long.
        """
        renewer = LeaseRenewer(
            self._prompts,
            visibility_timeout_s=self._timeout_s,
            max_lease_age_s=self._max_lease_age_s,
            on_renewed=lambda: self._prompts.beat("producer", self._name),
        )
        renewer.start()
        try:
            while not stop.is_set() and self._round(renewer, stop):
                pass
            self._prompts.farewell("producer", self._name)
        finally:
            renewer.stop()
        return self.stats

    def _round(self, renewer: LeaseRenewer, stop: threading.Event) -> bool:
        self._prompts.beat("producer", self._name)
        if self._clock.monotonic() - self._recalled_s >= _RECALL_S:
            self._recall()
        if not self._has_room():
            return True
        lease = self._prompts.lease(
            self._lease_batch, visibility_timeout_s=self._timeout_s, consumer=self._name, wait_s=_WAIT_S
        )
        if isinstance(lease, Lease):
            self._idle = False
            renewer.add(lease.token)
            try:
                self._work_through(lease, renewer, stop)
            finally:
                renewer.forget(lease.token)
            return True
        if lease.state is DrainState.DRAINED and not self._recall():
            self._samples.close()
            return False
        if not self._idle:
            log.info("producer_waits_for_prompts", queue=self._prompts.name)
        self._idle = True
        return True

    def _recall(self) -> int:
        """Take prompts back whose samples were held by a producer that died."""
        self._recalled_s = self._clock.monotonic()
        if count := self._prompts.recall(self._samples):
            log.warning("prompts_recalled", count=count, queue=self._prompts.name)
        return count

    def _has_room(self) -> bool:
        if self._samples.has_room():
            return True
        started = self._clock.monotonic()
        log.info("producer_waits_for_room", queue=self._samples.name)
        has_room = self._samples.wait_for_room(_WAIT_S)
        self.stats.paused_s += self._clock.monotonic() - started
        return has_room

    def _work_through(self, lease: Lease, renewer: LeaseRenewer, stop: threading.Event) -> None:
        for index, item in enumerate(lease.items):
            rest = [left.id for left in lease.items[index:]]
            if stop.is_set() or renewer.is_lost(lease.token):
                self._give_back(lease, rest, "producer stopped")
                return
            renewer.progress()
            self._prompts.beat("producer", self._name)
            try:
                has_room = self._attempt(lease, item)
            except ContractMismatch:
                self._give_back(lease, rest, "producer differs from the contract")
                raise
            if not has_room:
                self._give_back(lease, rest, "store full")
                self._pause()
                return

    def _attempt(self, lease: Lease, item: LeasedItem) -> bool:
        """Make one sample and account for the outcome; False when there is no room to write it."""
        try:
            self._produce(lease, item)
        except StoreFull as error:
            log.error("store_full", sample_id=item.id, reason=str(error))  # noqa: TRY400  the message says it all
            return False
        except StaleLease as error:
            self.stats.stale += 1
            log.warning("lease_lost", sample_id=item.id, lease=lease.token, reason=str(error))
        except ContractMismatch:
            raise
        # torch raises RuntimeError, also when it is out of memory
        except (IdConflict, SchemaError, StorageError, RuntimeError) as error:
            self._fail(lease, item, error)
        return True

    def _fail(self, lease: Lease, item: LeasedItem, error: Exception) -> None:
        final = isinstance(error, EaglefeedError) and not error.retryable
        final = final or item.delivery_count >= self._max_attempts
        reason = f"{type(error).__name__}: {error}"[:1000]
        log.error("prompt_failed", sample_id=item.id, lease=lease.token, final=final, reason=reason)
        self._prompts.nack(lease.token, [item.id], reason=reason, retryable=not final)
        if final:
            self.stats.dead += 1
        else:
            self.stats.retried += 1

    def _give_back(self, lease: Lease, ids: list[str], reason: str) -> None:
        given = self._prompts.nack(lease.token, ids, reason=reason, delay_s=0)
        self.stats.returned += len(given.ok)
        self.stats.stale += len(given.stale)

    def _pause(self) -> None:
        self._clock.sleep(_FULL_PAUSE_S)
        self.stats.paused_s += _FULL_PAUSE_S

    def _produce(self, lease: Lease, item: LeasedItem) -> None:
        prompt = decode_prompt(item.payload)
        contract = self._contract_for(prompt)
        _check_ids(prompt, contract.vocab_size)
        batch = self._target.generate_batch(*pad_prompt(prompt))
        ref = self._describe(prompt, batch, contract, lease.token)
        validate_eagle3_tensors(
            batch.tensors(), ref.feature_specs, sample_id=ref.sample_id, vocab_size=contract.vocab_size
        )
        ref = self._store.put(ref, batch.tensors())
        try:
            self._prompts.handoff(
                lease.token, item.id, QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes), self._samples
            )
        except (IdConflict, StaleLease):
            self._store.delete(ref)
            raise
        self.stats.produced += 1
        self.stats.num_tokens += prompt.num_tokens
        self.stats.num_bytes += ref.stored_bytes

    def _contract_for(self, prompt: Prompt) -> RunContract:
        mine = self._own_contract
        theirs = mine.model_copy(
            update={
                "tokenizer_fingerprint": prompt.tokenizer_fingerprint,
                "template_fingerprint": prompt.template_fingerprint,
                "max_length": prompt.max_length,
            }
        )
        if self._contract is None:
            theirs.require(mine.model_copy(update={"max_length": prompt.max_length}), f"producer {self._name}")
            self._contract = self._agree(theirs)
        elif theirs != self._contract:
            fault = "prompt tokenized otherwise than the run's contract says"
            raise SchemaError(fault, subject=prompt.sample_id, wanted=self._contract.id, got=theirs.id)
        return self._contract

    def _agree(self, mine: RunContract) -> RunContract:
        """Write the run's contract and assets, or check that mine is the one that stands there."""
        self._store.put_document(CONTRACT_FILE, mine.to_json())
        written = self._store.get_document(CONTRACT_FILE)
        RunContract.from_json(written or b"").require(mine, f"producer {self._name}")
        if not self._store.has_document(ASSETS_FILE):
            self._store.put_assets(ASSETS_FILE, *self._assets())
        return mine

    def _describe(self, prompt: Prompt, batch: Eagle3TargetBatch, contract: RunContract, token: int) -> SampleRef:
        specs = {name: spec_of(tensor) for name, tensor in batch.tensors().items()}
        ref = SampleRef(
            sample_id=prompt.sample_id,
            run_id=self._run_id,
            store_uri=self._store.uri,
            feature_keys=dict.fromkeys(specs, shard_key(prompt.sample_id, token)),
            feature_specs=specs,
            algorithm=FeatureAlgorithm.EAGLE3,
            schema_version=contract.schema_version,
            num_tokens=prompt.num_tokens,
            estimated_bytes=sum(spec.num_bytes for spec in specs.values()),
            target_model_version=contract.target_fingerprint,
            draft_weight_version="",
            contract=contract.id,
        )
        validate_eagle3_ref(ref)
        return ref


def _check_ids(prompt: Prompt, vocab_size: int) -> None:
    highest = max(max(row.input_ids) for row in prompt.rows)
    if highest >= vocab_size:
        what = "token id beyond the target's vocabulary"
        raise SchemaError(what, subject=prompt.sample_id, wanted=f"below {vocab_size}", got=highest)
