"""From a ref to a batch: read, checked, and ready to train on."""

from torch import Tensor

from eaglefeed.consumer.expand import TargetHead
from eaglefeed.errors import ConfigError, ContractMismatch
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3 import EAGLE3_SCHEMA_VERSION
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SCHEMA_VERSION, decode_stored, validate_ref
from eaglefeed.schema.refs import SampleRef, decode_ref
from eaglefeed.schema.values import validate_eagle3_tensors
from eaglefeed.storage.base import FeatureStore, Verify, is_verified, key_of
from eaglefeed.storage.buffers import BufferRing

__all__ = ["Materializer"]


class Materializer:
    """Reads samples into the buffers of a ring, and lets none through that is not what it should be.

    Args:
        store: where the samples lie.
        ring: what they are read into; a batch keeps its buffer as long as one of its tensors lives.
        contract: the run's contract, or its id; samples of another are refused. "" takes any. The id is what a ref says
            of itself; with the whole contract, samples are held against its fields too, and ids against its vocab_size.
        values: whose values are checked: every sample's, 1 in 16, or none.
        head: whose last hidden states are taken, decoded but not expanded; None takes samples of schema version 1.

    Raises:
        ConfigError: a head is there and the contract needs none, or the reverse.
    """

    def __init__(
        self,
        store: FeatureStore,
        ring: BufferRing,
        *,
        contract: RunContract | str,
        values: Verify,
        head: TargetHead | None = None,
    ) -> None:
        self._store, self._ring, self._values, self._head = store, ring, values, head
        self._schema_version = EAGLE3_SCHEMA_VERSION if head is None else EAGLE3_COMPACT_SCHEMA_VERSION
        self._vocab_size = None if head is None else head.vocab_size
        self._contract, self._contract_id = None, contract
        if isinstance(contract, RunContract):
            self._contract, self._contract_id = contract, contract.id
            self._vocab_size = contract.vocab_size
            if self._schema_version != contract.schema_version:
                fix = "pass head=load_run_assets(store).head(), which is None where none is needed"
                got = "no head" if head is None else "a head"
                raise ConfigError("not what the contract needs", subject=contract.supervision, got=got, fix=fix)

    def materialize(self, payload: bytes) -> tuple[SampleRef, Eagle3TargetBatch]:
        """The ref that a payload holds, and its sample.

        Raises:
            ConfigError: the sample is of the run, and this stream is not set up for what it holds: it must not go on.
            SchemaError: no ref, or one of another contract or schema.
            SampleCorrupt: a shard that is not what its ref promises; says what and where.
            BuffersHeld: no buffer came back in time, and no sample is at fault.
            StorageError: it cannot be read, here or now.
        """
        ref = decode_ref(payload)
        if self._contract_id not in ("", ref.contract):
            what = "made under another run contract"
            raise ContractMismatch(what, subject=ref.sample_id, wanted=self._contract_id, got=ref.contract)
        if self._contract is None:
            self._check_head(ref)
        else:
            self._contract.require_widths(ref.feature_specs, ref.sample_id)
        validate_ref(ref, self._schema_version)
        if self._head is not None:
            self._head.check(ref)
        tensors = self._read(ref)
        if is_verified(self._values, ref.sample_id):
            where = f"{ref.sample_id} ({key_of(ref)})"
            validate_eagle3_tensors(tensors, ref.feature_specs, sample_id=where, vocab_size=self._vocab_size)
        return ref, Eagle3TargetBatch(**tensors, sample_ids=(ref.sample_id,))

    def _check_head(self, ref: SampleRef) -> None:
        """Without the contract, the first sample tells whether this stream needs a head."""
        needs_head = ref.schema_version == EAGLE3_COMPACT_SCHEMA_VERSION
        if needs_head and self._head is None:
            what, fix = (
                "holds last hidden states, and the stream has no head",
                "pass head=load_run_assets(store).head()",
            )
            raise ConfigError(what, subject=ref.sample_id, fix=fix)
        if self._head is not None and ref.schema_version == EAGLE3_SCHEMA_VERSION:
            what, fix = "needs no head, and the stream has one", "leave head out"
            raise ConfigError(what, subject=ref.sample_id, fix=fix)

    def _read(self, ref: SampleRef) -> dict[str, Tensor]:
        """Its features, decoded; keeps nothing of what they were decoded from."""
        stored = self._store.get(ref, self._ring)
        if self._contract is not None:
            self._contract.require_sample(ref, stored)
        return decode_stored(ref, stored)
