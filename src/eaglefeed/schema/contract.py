"""RunContract: what must stay equal over a run. No torch here."""

import json
from typing import TYPE_CHECKING, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from eaglefeed.errors import ContractMismatch, SchemaError
from eaglefeed.schema.eagle3 import EAGLE3_SCHEMA_VERSION
from eaglefeed.schema.eagle3_compact import (
    EAGLE3_COMPACT_SCHEMA_VERSION,
    SUPERVISION_ENCODINGS,
    stored_form,
    validate_ref,
)
from eaglefeed.schema.refs import FeatureAlgorithm, FeatureSpec, SampleRef, first_fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["ASSETS_FILE", "CONTRACT_FILE", "CONTRACT_RECORD", "IMPORTED", "RETAIN_RECORD", "RunContract"]

CONTRACT_FILE = "contract.json"
ASSETS_FILE = "target_assets.safetensors"
"""Files of the run, beside its shards."""
CONTRACT_RECORD, RETAIN_RECORD = "contract", "retain:"
"""In the record that the run's queues hold: the same contract; and, with the name of a samples queue behind it, that
shards stay after that queue has released them."""

IMPORTED = "imported from "
"""What the fingerprints of tokenizer and template begin with where rows were tokenized by another project."""


class RunContract(BaseModel):
    """Written beside the shards before the first of them; whoever differs in one field is refused and told which.

    Args:
        target: the target's name, for people.
        target_fingerprint: digest of the target's weights.
        dtype: dtype of aux hidden states.
        hidden_size: H.
        vocab_size: V.
        aux_layer_ids: 0-based decoder layers whose outputs are taken, in this order.
        aux_norm: "none": the residual stream as the layer leaves it, before any later norm.
        supervision: the encoding; "last_hidden_states", and the options below, are of schema version 2.
        aux_storage: "same" as they are, or "fp8" with one scale a token; `schema.eagle3_compact` states the error.
        supervision_rows: "all", or only "supervised" ones, whose loss mask is 1; exact for training.
        head_digest: digest of the head that last hidden states are made for ("" for other supervision).
        vocab_map_digest: digest of the vocabulary map ("" without one).
        tokenizer_fingerprint: digest of the tokenizer.
        template_fingerprint: digest of the chat template and the mask rules.
        max_length: tokens a row was cut to.
        schema_version: version of the feature contract.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    target: str
    target_fingerprint: str
    dtype: str
    hidden_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, int, int]
    aux_norm: str = "none"
    supervision: Literal["logits", "target_probs", "last_hidden_states"]
    aux_storage: Literal["same", "fp8"] = "same"
    supervision_rows: Literal["all", "supervised"] = "all"
    head_digest: str = ""
    vocab_map_digest: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    max_length: int
    schema_version: int

    @model_validator(mode="after")
    def _fits_its_version(self) -> Self:
        is_compact = self.supervision == "last_hidden_states"
        version = EAGLE3_COMPACT_SCHEMA_VERSION if is_compact else EAGLE3_SCHEMA_VERSION
        if self.schema_version != version:
            raise ValueError(f"{self.supervision} are of schema version {version}, not {self.schema_version}")
        if is_compact != bool(self.head_digest):
            raise ValueError("head_digest goes with last_hidden_states")
        if not is_compact and (self.aux_storage, self.supervision_rows) != ("same", "all"):
            raise ValueError("aux_storage and supervision_rows go with last_hidden_states")
        return self

    @property
    def id(self) -> str:
        """Digest over every field."""
        return xxhash.xxh3_64_hexdigest(self.to_json())

    def to_json(self) -> bytes:
        """One canonical text, the same in every process."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "RunContract":
        """Read `to_json` back.

        Raises:
            SchemaError: not a contract.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise SchemaError("not a run contract", subject=CONTRACT_FILE, got=first_fault(error)) from None

    def require(self, other: "RunContract", who: str) -> None:
        """Check that `other`, what `who` would work by, is this contract.

        Raises:
            ContractMismatch: names every field that differs, with both values.
        """
        mine, theirs = self.model_dump(), other.model_dump()
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            wanted = ", ".join(f"{name}={mine[name]}" for name in differing)
            got = ", ".join(f"{name}={theirs[name]}" for name in differing)
            raise ContractMismatch("differs from the run's contract", subject=who, wanted=wanted, got=got)

    def ref_of(
        self,
        *,
        sample_id: str,
        run_id: str,
        store_uri: str,
        key: str,
        specs: "Mapping[str, FeatureSpec]",
        num_tokens: int,
    ) -> SampleRef:
        """The ref of a sample that this contract describes, before it is stored.

        Args:
            sample_id: the sample.
            run_id: the run.
            store_uri: where it will lie,
            key: and under which name there.
            specs: of its decoded tensors.
            num_tokens: of its rows.

        Raises:
            ContractMismatch: states or logits are not as wide as the target's.
            SchemaError: the contract's schema version has no such sample.
        """
        self.require_widths(specs, sample_id)
        ref = SampleRef(
            sample_id=sample_id,
            run_id=run_id,
            store_uri=store_uri,
            feature_keys=dict.fromkeys(specs, key),
            feature_specs=dict(specs),
            algorithm=FeatureAlgorithm.EAGLE3,
            schema_version=self.schema_version,
            num_tokens=num_tokens,
            estimated_bytes=sum(spec.num_bytes for spec in specs.values()),
            target_model_version=self.target_fingerprint,
            draft_weight_version="",
            contract=self.id,
        )
        validate_ref(ref, self.schema_version)
        return ref

    def require_widths(self, specs: "Mapping[str, FeatureSpec]", sample_id: str) -> None:
        """Check that aux states are of each layer and as wide as the target's, and logits of its whole vocabulary.

        Raises:
            ContractMismatch: names both widths; a draft's own have no say in it.
        """
        layers = len(self.aux_layer_ids)
        aux = (layers * self.hidden_size, f"{layers} layers of hidden_size {self.hidden_size}")
        for name, (width, why) in {"aux_hidden_states": aux, "logits": (self.vocab_size, "vocab_size")}.items():
            got = specs[name].shape[-1:] if name in specs else (width,)
            if got != (width,):
                what, wanted = f"{name} of another width than the run's contract says", f"{width} ({why})"
                raise ContractMismatch(what, subject=sample_id, wanted=wanted, got=", ".join(map(str, got)))

    def require_sample(self, ref: SampleRef, stored: "Mapping[str, Tensor]") -> None:
        """Check that a sample is what this contract says, as far as a sample shows it; its id alone is a claim.

        Args:
            ref: a valid ref of this contract's schema version.
            stored: its tensors as they are stored.

        Raises:
            ContractMismatch: names every field that differs, with both values.
        """
        self.require_widths(ref.feature_specs, ref.sample_id)
        aux_storage, supervision_rows = stored_form(stored)
        shown = {
            "target_fingerprint": ref.target_model_version,
            "dtype": ref.feature_specs["aux_hidden_states"].dtype,
            "supervision": next(names[0] for names in SUPERVISION_ENCODINGS if names[0] in ref.feature_specs),
            "aux_storage": aux_storage,
            "supervision_rows": supervision_rows,
        }
        self.require(self.model_copy(update=shown), ref.sample_id)
