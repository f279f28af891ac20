"""Samples of every encoding, of the sizes of an 8B target, with values that cost little to make.

S sequence · H target hidden size · V target vocabulary · D draft vocabulary; B is 1, and no position is masked
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from eaglefeed.bench.storage_plan import StoragePlan
from eaglefeed.schema.eagle3 import EAGLE3_SCHEMA_VERSION
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SCHEMA_VERSION, decode_stored, encode_compact
from eaglefeed.schema.refs import FeatureAlgorithm, SampleRef
from eaglefeed.storage.base import shard_key
from eaglefeed.storage.shard import spec_of

__all__ = ["Encoding", "Sample", "make_sample", "small_plan"]

_BLOCK = 2**22
_SMALL = 64


class Encoding(StrEnum):
    """How a sample's supervision, and with FP8_AUX also its aux states, are stored."""

    LOGITS = "logits"
    TARGET_PROBS = "target_probs"
    LAST_HIDDEN_STATES = "last_hidden_states"
    FP8_AUX = "fp8_aux"

    @property
    def is_compact(self) -> bool:
        """Whether it is of schema version 2."""
        return self in (Encoding.LAST_HIDDEN_STATES, Encoding.FP8_AUX)


@dataclass(frozen=True)
class Sample:
    """Features of one encoding, and a ref whose id and key `numbered` gives."""

    encoding: Encoding
    features: Mapping[str, Tensor]
    ref: SampleRef

    def encode(self) -> dict[str, Tensor]:
        """What is stored."""
        if not self.encoding.is_compact:
            return dict(self.features)
        return encode_compact(self.features, fp8_aux=self.encoding is Encoding.FP8_AUX, supervised_rows=False)

    def decode(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The features of what is stored."""
        return decode_stored(self.ref, stored)

    def numbered(self, number: int) -> SampleRef:
        """The ref of the sample as number `number`."""
        sample_id = f"s-{number}"
        keys = dict.fromkeys(self.features, shard_key(sample_id, 1))
        return replace(self.ref, sample_id=sample_id, feature_keys=keys)


def small_plan(plan: StoragePlan) -> StoragePlan:
    """The same for samples of a few kB, whose cost is that of their files."""
    return replace(plan, tokens=16, hidden=_SMALL, draft_vocab=_SMALL)


def make_sample(plan: StoragePlan, encoding: Encoding) -> Sample:
    """A sample of that encoding."""
    ones = torch.ones(1, plan.tokens, dtype=torch.int64)
    features = {
        "aux_hidden_states": _noise(1, plan.tokens, 3 * plan.hidden),
        "input_ids": ones,
        "attention_mask": ones.clone(),
        "loss_mask": ones.clone(),
        **_supervision(plan, encoding),
    }
    specs = {name: spec_of(tensor) for name, tensor in features.items()}
    ref = SampleRef(
        sample_id="s",
        run_id="bench",
        store_uri="file:///bench",
        feature_keys={},
        feature_specs=specs,
        algorithm=FeatureAlgorithm.EAGLE3,
        schema_version=EAGLE3_COMPACT_SCHEMA_VERSION if encoding.is_compact else EAGLE3_SCHEMA_VERSION,
        num_tokens=plan.tokens,
        estimated_bytes=sum(spec.num_bytes for spec in specs.values()),
        target_model_version="bench",
        draft_weight_version="",
        contract="0123456789abcdef",
    )
    return Sample(encoding, features, ref)


def _supervision(plan: StoragePlan, encoding: Encoding) -> dict[str, Tensor]:
    if encoding is Encoding.LOGITS:
        return {"logits": _noise(1, plan.tokens, plan.vocab)}
    if encoding is Encoding.TARGET_PROBS:
        mask = torch.ones(1, plan.tokens, 1, dtype=torch.bool)
        return {"target_probs": _noise(1, plan.tokens, plan.draft_vocab), "position_mask": mask}
    argmax = torch.ones(1, plan.tokens, dtype=torch.int32)
    return {"last_hidden_states": _noise(1, plan.tokens, plan.hidden), "target_argmax": argmax}


def _noise(*shape: int) -> Tensor:
    """Normally distributed bfloat16, repeated after 4 Mi numbers: making more takes longer than storing them."""
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    filled = torch.empty(shape, dtype=torch.bfloat16)
    flat = filled.view(-1)
    for start in range(0, len(flat), _BLOCK):
        part = flat[start : start + _BLOCK]
        part.copy_(block[: len(part)])
    return filled
