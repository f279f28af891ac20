"""Small samples that tests are made of."""

import torch
from torch import Tensor

from eaglefeed.schema.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from eaglefeed.storage.base import shard_key

H, V, D = 4, 11, 5


def tensors(*, batch: int = 2, length: int = 6, supervision: str = "target_probs", seed: int = 0) -> dict[str, Tensor]:
    """A sample's features, valid in shape, dtype and values."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask = torch.zeros(batch, length, dtype=torch.int64)
    loss_mask[:, 1:-1] = 1
    found = {
        "aux_hidden_states": torch.randn(batch, length, 3 * H, generator=generator).to(torch.bfloat16),
        "input_ids": torch.randint(0, V, (batch, length), generator=generator),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "loss_mask": loss_mask,
    }
    found["input_ids"][:, -1] = 0
    if supervision == "logits":
        return found | {"logits": torch.randn(batch, length, V, generator=generator)}
    if supervision == "last_hidden_states":
        real = torch.arange(length)[:, None] < length - 1  # shifted: nothing comes after the last token
        states = torch.randn(batch, length, H, generator=generator) * real
        best = torch.randint(0, V, (batch, length), generator=generator, dtype=torch.int32) * real[:, 0]
        return found | {"last_hidden_states": states.to(torch.bfloat16), "target_argmax": best}
    probs = torch.softmax(torch.randn(batch, length, D, generator=generator), -1)
    return found | {"target_probs": probs, "position_mask": loss_mask.bool().unsqueeze(-1)}


def specs(features: dict[str, Tensor]) -> dict[str, FeatureSpec]:
    return {
        name: FeatureSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in features.items()
    }


def ref(
    features: dict[str, Tensor] | None = None, *, sample_id: str = "a-1", token: int = 7, **changes: object
) -> SampleRef:
    """The ref of a sample that is not stored yet."""
    found = specs(features if features is not None else tensors())
    fields: dict[str, object] = {
        "sample_id": sample_id,
        "run_id": "run",
        "store_uri": "mem://test",
        "feature_keys": dict.fromkeys(found, shard_key(str(sample_id), token)),
        "feature_specs": found,
        "algorithm": FeatureAlgorithm.EAGLE3,
        "schema_version": 2 if "target_argmax" in found else 1,
        "num_tokens": 12,
        "estimated_bytes": sum(spec.num_bytes for spec in found.values()),
        "target_model_version": "target",
        "draft_weight_version": "",
        "contract": "0123456789abcdef",
    }
    return SampleRef(**(fields | changes))  # type: ignore[arg-type]
