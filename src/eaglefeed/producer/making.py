"""From a prompt to a sample that is ready to be stored."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from eaglefeed.errors import SchemaError
from eaglefeed.producer.agreement import RunAgreement
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SCHEMA_VERSION, encode_compact
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, decode_prompt
from eaglefeed.schema.refs import SampleRef
from eaglefeed.schema.values import validate_eagle3_rows, validate_eagle3_tensors
from eaglefeed.storage.base import shard_key
from eaglefeed.storage.shard import spec_of

__all__ = ["Made", "SampleMaker"]


class Made(NamedTuple):
    """A sample and what is to be stored of it; nobody writes to these tensors any more."""

    ref: SampleRef
    tensors: Mapping[str, Tensor]


class SampleMaker:
    """Runs the target over prompts.

    Args:
        target: makes the tensors.
        agreement: knows the run's contract.
        run_id: the run.
        store_uri: where the samples will lie.
    """

    def __init__(self, target: Eagle3TargetBackend, agreement: RunAgreement, *, run_id: str, store_uri: str) -> None:
        self._target, self._agreement = target, agreement
        self._run_id, self._store_uri = run_id, store_uri

    def make(self, payload: bytes, token: int) -> Made:
        """The sample of a prompt, checked.

        Args:
            payload: the prompt as it was leased.
            token: its lease's, which the shard is named after.

        Raises:
            ContractMismatch: this producer differs from the run's contract, or its target from what it says.
            SchemaError: no prompt, or one that does not fit the run.
            SampleCorrupt: values that no sample may have, or those of other rows.
            StorageError: the run's contract or assets cannot be written.
            RuntimeError: the target failed.
        """
        prompt = decode_prompt(payload)
        contract = self._agreement.contract_for(prompt)
        _check_ids(prompt, contract.vocab_size)
        batch = self._target.generate_batch(**pad_prompt(prompt))
        ref = self._describe(prompt, batch, contract, token)
        tensors = batch.tensors()
        validate_eagle3_rows(tensors, pad_prompt(prompt), sample_id=ref.sample_id)  # not rows that a target may change
        validate_eagle3_tensors(tensors, ref.feature_specs, sample_id=ref.sample_id, vocab_size=contract.vocab_size)
        stored = _stored(tensors, contract)
        contract.require_sample(ref, stored)
        return Made(ref, stored)

    def _describe(self, prompt: Prompt, batch: Eagle3TargetBatch, contract: RunContract, token: int) -> SampleRef:
        specs = {name: spec_of(tensor) for name, tensor in batch.tensors().items()}
        return contract.ref_of(
            sample_id=prompt.sample_id,
            run_id=self._run_id,
            store_uri=self._store_uri,
            key=shard_key(prompt.sample_id, token),
            specs=specs,
            num_tokens=prompt.num_tokens,
        )


def _stored(features: dict[str, Tensor], contract: RunContract) -> dict[str, Tensor]:
    if contract.schema_version != EAGLE3_COMPACT_SCHEMA_VERSION:
        return features
    return encode_compact(
        features,
        fp8_aux=contract.aux_storage == "fp8",
        supervised_rows=contract.supervision_rows == "supervised",
    )


def _check_ids(prompt: Prompt, vocab_size: int) -> None:
    highest = max(max(row.input_ids) for row in prompt.rows)
    if highest >= vocab_size:
        what = "token id beyond the target's vocabulary"
        raise SchemaError(what, subject=prompt.sample_id, wanted=f"below {vocab_size}", got=highest)
