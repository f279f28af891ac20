"""RunContract: what must stay equal over a run. No torch here."""

import json

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from eaglefeed.errors import ContractMismatch, SchemaError
from eaglefeed.schema.refs import first_fault

__all__ = ["ASSETS_FILE", "CONTRACT_FILE", "RunContract"]

CONTRACT_FILE = "contract.json"
ASSETS_FILE = "target_assets.safetensors"
"""Files of the run, beside its shards."""


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
        supervision: "logits" or "target_probs".
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
    supervision: str
    vocab_map_digest: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    max_length: int
    schema_version: int

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
