"""HFEagle3TargetModel: supervision from any Hugging Face causal language model in this process.

B batch · S sequence · H hidden size · V target vocabulary
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eaglefeed.errors import TargetMismatch
from eaglefeed.logs import get_logger
from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.loading import target_fingerprint
from eaglefeed.producer.parts import TargetParts, backbone_of, gathered
from eaglefeed.producer.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HFEagle3TargetModel"]

_log = get_logger(__name__)


class HFEagle3TargetModel(Eagle3Target):
    """A target of transformers; Eagle3Target says what its supervision is.

    Args:
        model: any causal language model of transformers.
        aux_layer_ids: three 0-based decoder layers whose outputs are taken, in this order; by default the contract's.
        compact: supervise with last hidden states.

    Raises:
        SchemaError: ids that are not three distinct layers of the model, or a model too shallow for the default.
        TargetMismatch: its decoder layers cannot be found; or, with `compact`, its logits are more than its head.
    """

    engine = "hf"

    def __init__(
        self, model: "PreTrainedModel", aux_layer_ids: tuple[int, ...] | None = None, *, compact: bool = False
    ) -> None:
        self.model = model.eval()
        super().__init__(TargetParts.of_model(model), aux_layer_ids, compact=compact)
        self._backbone = backbone_of(model)
        self._layers = _decoder_layers(self._backbone, self.num_layers)
        self._head_alone = self._head_is_enough()
        if compact and not self._head_alone:
            what = (
                "its logits are more than its head, scale and softcap: trainers cannot make them of last hidden states"
            )
            fix = "supervise with produce.supervision=target_probs or logits"
            raise TargetMismatch(what, subject=self._kind, fix=fix)

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of the features."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.model.device)

    def fingerprint(self) -> str:
        """The RunContract's `target_fingerprint`."""
        return target_fingerprint(self.model)

    @property
    def _kind(self) -> str:
        return type(self.model).__name__

    @cached_property
    def _isolates_documents(self) -> bool:
        """Whether a second document's states stay the same when the first one changes."""
        ids = torch.tensor([[0, 1, 2], [3, 4, 2]], device=self.device) % self.vocab_size
        positions = torch.tensor([[0, 1, 0]], device=self.device).expand_as(ids)
        with torch.no_grad():
            one, other = self._run(ids, positions)[0][:, 2]
        return torch.allclose(one, other, rtol=1e-3, atol=1e-3)

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._run(rows.input_ids, position_ids)

    def _run(self, input_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Aux states [B, S, 3H] and what logits are made of: last hidden states [B, S, H], or the logits themselves.

        No attention mask goes in: padding stands to the right, where causal attention never looks back from; and
        transformers separates packed documents by their restarting positions only without a mask.
        """
        runner = self._backbone if self._head_alone else self.model
        with self._captured() as outputs:
            result = runner(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        aux = torch.cat([gathered(outputs[layer]) for layer in self.aux_layer_ids], dim=-1)
        return aux, gathered(result.last_hidden_state if self._head_alone else result.logits)

    @contextmanager
    def _captured(self) -> Iterator[dict[int, Tensor]]:
        outputs: dict[int, Tensor] = {}

        def keep(layer: int, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        def hook_of(layer: int) -> Any:
            return lambda _module, _args, output: keep(layer, output)

        hooks = [self._layers[layer].register_forward_hook(hook_of(layer)) for layer in self.aux_layer_ids]
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()

    def _logits(self, last: Tensor) -> Tensor:
        return super()._logits(last) if self._head_alone else last

    def _head_is_enough(self) -> bool:
        """Whether head, scale and softcap give the model's own logits; some models do more on the way."""
        ids = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        self._head_alone = True
        with torch.no_grad():
            mine = self._logits(self._run(ids, None)[1])
            wanted = gathered(self.model(input_ids=ids, use_cache=False).logits)
        same = mine.dtype == wanted.dtype and torch.allclose(mine.float(), wanted.float(), rtol=1e-3, atol=1e-3)
        if not same:
            _log.info("logits_taken_whole", reason="they are more than the head's", price="memory for [B, S, V]")
        return same


def _decoder_layers(backbone: nn.Module, num_layers: int) -> nn.ModuleList:
    """The outermost list of `num_layers` modules: lists inside layers (experts) lie deeper."""
    lists = [
        (name.count("."), module)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        kind = type(backbone).__name__
        raise TargetMismatch("its decoder layers cannot be found", subject=kind, wanted=f"a list of {num_layers}")
    return min(lists, key=lambda found: found[0])[1]
