"""The parts of a target that are read outside its forward: embeddings, final norm, head, configuration.

H hidden size · V target vocabulary
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eaglefeed.errors import TargetMismatch
from eaglefeed.producer.configuration import size_of, text_config
from eaglefeed.schema.batch import EmbeddingHolder
from eaglefeed.schema.head import LogitRule, head_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TargetParts", "backbone_of", "check_width", "gathered"]

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, where a tensor-parallel model holds a part of it in each process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass
class _Embeddings:
    weight: Tensor


@dataclass(frozen=True)
class TargetParts:
    """A target's own modules and what its configuration says.

    Args:
        config: its text configuration.
        embed_tokens: input embeddings, [V, H] or taller.
        head: last hidden states [..., H] → [..., V].
        norm: the final norm, where it was found.
        rule: what is done to the head's outputs.
    """

    config: Any
    embed_tokens: nn.Module
    head: nn.Linear
    norm: nn.Module | None
    rule: LogitRule

    @classmethod
    def of_model(cls, model: "PreTrainedModel") -> "TargetParts":
        """Those of a model, not copied.

        Raises:
            TargetMismatch: embeddings or head are missing, of a part of the vocabulary, or of another width than H.
        """
        config, backbone = text_config(model.config), backbone_of(model)
        found = (getattr(backbone, name, None) for name in _NORM_NAMES)
        norm = next((module for module in found if isinstance(module, nn.Module)), None)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        _check_tables(embeddings, head, config, type(model).__name__)
        return cls(config, embeddings, head, norm, LogitRule.of_config(config))

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return int(self.head.weight.shape[0])

    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] of last hidden states [..., H]."""
        return gathered(self.rule(self.head(last)))

    def embeddings(self) -> EmbeddingHolder:
        """The input embeddings, whole."""
        module = cast("EmbeddingHolder", self.embed_tokens)
        if isinstance(module.weight, DTensor):
            return _Embeddings(gathered(module.weight))
        return module

    def assets(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What trainers need of the target, on the CPU; Eagle3Target.target_assets says what."""
        modules = {"embed_tokens": self.embed_tokens, "lm_head": self.head, "norm": self.norm}
        found = {name: tensor for part, module in modules.items() for name, tensor in _weights(part, module).items()}
        # Cloned, since a tied head shares its memory with the embeddings and safetensors takes no shared memory.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        config = json.dumps(self.config.to_dict(), sort_keys=True, default=str)
        return tensors, {"config": config, **self.rule.metadata()}

    def head_digest(self) -> str:
        """The RunContract's `head_digest` for supervision by last hidden states."""
        return head_digest(_weights("lm_head", self.head), self.rule.metadata())


def backbone_of(model: "PreTrainedModel") -> nn.Module:
    """The part of a model that gives last hidden states."""
    # Of some models get_decoder is the head or the model itself, and of some base_model is.
    tried = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    parts = (part for part in tried if isinstance(part, nn.Module) and part is not model)
    return next((part for part in parts if _holds_layers(part)), model)


def check_width(width: int, vocab_size: int, name: str) -> None:
    """Check that logits or their head are of the whole vocabulary.

    Raises:
        TargetMismatch: they are narrower, as a head is that is shared between processes and not gathered.
    """
    if width < vocab_size:
        what = "its logits are of a part of its vocabulary, as one process of several that share a head has them"
        fix = "gather them in the model, or let vllm or sglang share it (target.tp_size)"
        raise TargetMismatch(what, subject=name, wanted=vocab_size, got=width, fix=fix)


def _check_tables(embeddings: Any, head: Any, config: Any, name: str) -> None:
    for what, module in (("input embeddings", embeddings), ("head", head)):
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise TargetMismatch(f"its {what} cannot be found", subject=name)
    check_width(int(head.weight.shape[0]), size_of(config, "vocab_size", name), name)
    wanted, got = size_of(config, "hidden_size", name), int(embeddings.weight.shape[1])
    if got != wanted:
        what = "its embeddings, which the draft shares, are of another width than its states"
        raise TargetMismatch(what, subject=name, wanted=wanted, got=got)


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) for part in module.modules())


def _weights(part: str, module: nn.Module | None) -> dict[str, Tensor]:
    found = {f"{part}.{name}": getattr(module, name, None) for name in ("weight", "bias")}
    return {name: gathered(tensor) for name, tensor in found.items() if isinstance(tensor, Tensor)}
