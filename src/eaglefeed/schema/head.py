"""The target's head: how logits are made of last hidden states, the same for producers and trainers."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from eaglefeed.errors import SchemaError

__all__ = ["LogitRule", "head_digest"]


@dataclass(frozen=True)
class LogitRule:
    """What some targets do to their head's outputs, in this order; the names are those of their configurations.

    Args:
        logit_scale: logits are multiplied by it (Cohere).
        logits_scaling: logits are divided by it (Granite).
        final_logit_softcapping: a logit x becomes c · tanh(x / c) (Gemma-2).
    """

    logit_scale: float | None = None
    logits_scaling: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def of_config(cls, config: object) -> "LogitRule":
        """The rule of a target by its text configuration."""
        return cls(**{name: getattr(config, name, None) for name in cls.__dataclass_fields__})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> "LogitRule":
        """Read what `metadata` gave.

        Raises:
            SchemaError: not numbers.
        """
        found = {name: text for name in cls.__dataclass_fields__ if (text := metadata.get(name, ""))}
        try:
            return cls(**{name: float(text) for name, text in found.items()})
        except ValueError:
            raise SchemaError("the assets' metadata is damaged", wanted="numbers", got=found) from None

    def metadata(self) -> dict[str, str]:
        """The numbers as text, "" where there is none."""
        return {name: str(value or "") for name, value in asdict(self).items()}

    def __call__(self, outputs: Tensor) -> Tensor:
        """Logits of the head's outputs, any shape."""
        logits = outputs if self.logit_scale is None else outputs * self.logit_scale
        logits = logits if self.logits_scaling is None else logits / self.logits_scaling
        cap = self.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def head_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Digest of all that makes logits of last hidden states.

    Args:
        tensors: the run's assets: `lm_head.weight` and, where there is one, `lm_head.bias`.
        metadata: theirs, with the numbers of a LogitRule.
    """
    digest = xxhash.xxh3_128(json.dumps(LogitRule.from_metadata(metadata).metadata()).encode())
    for name in ("lm_head.weight", "lm_head.bias"):
        if name in tensors:
            tensor = tensors[name]
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
