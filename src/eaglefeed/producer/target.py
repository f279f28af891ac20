"""HFEagle3TargetModel: supervision from any Hugging Face causal language model in this process.

B batch · S sequence · H hidden size · V target vocabulary
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglefeed.errors import TargetMismatch
from eaglefeed.logs import get_logger
from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.engines.documents import documents_of
from eaglefeed.producer.loading import target_fingerprint
from eaglefeed.producer.parts import TargetParts, backbone_of, check_width, gathered
from eaglefeed.producer.probing import check_states, decoder_layers, isolates_documents, layer_output, looks_ahead
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
        TargetMismatch: its decoder layers cannot be found, or do not give one causal state of H numbers a token; it
            holds a part of its vocabulary; or, with `compact`, its logits are more than its head.
    """

    engine = "hf"

    def __init__(
        self, model: "PreTrainedModel", aux_layer_ids: tuple[int, ...] | None = None, *, compact: bool = False
    ) -> None:
        self.model = model.eval()
        super().__init__(TargetParts.of_model(model), aux_layer_ids, compact=compact)
        self._backbone = backbone_of(model)
        self._layers = decoder_layers(self._backbone, self.num_layers)
        self._rows_apart = _measures_rows(self.parts.config)
        self._head_alone = True
        self._states_dtype = self._try_layers().dtype
        self._head_alone = self._head_is_enough()
        if compact and not self._head_alone:
            what = (
                "its logits are more than its head, scale and softcap: trainers cannot make them of last hidden states"
            )
            fix = "supervise with produce.supervision=target_probs or logits"
            raise TargetMismatch(what, subject=self._kind, fix=fix)

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of the features, which of some models is not that of their weights."""
        return str(self._states_dtype).removeprefix("torch.")

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
        if self._rows_apart:
            return True
        if "chunked_attention" in (getattr(self.parts.config, "layer_types", None) or ()):
            return False  # transformers counts chunks from the row's start, not from the document's
        return isolates_documents(self._aux, self.vocab_size, self.device)

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        return (self._run_each if self._rows_apart else self._run_all)(rows, position_ids)

    def _run_all(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._run(rows.input_ids, position_ids)

    def _run_each(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Each document in a forward of its own, without padding."""
        whole: list[Tensor] = []
        for row, start, ids in documents_of(rows, position_ids):
            parts = self._run(torch.tensor([ids], device=self.device), None)
            whole = whole or [part.new_zeros(*rows.real.shape, part.shape[-1]) for part in parts]
            for place, part in zip(whole, parts, strict=True):
                place[row, start : start + len(ids)] = part[0]
        return whole[0], whole[1]

    def _aux(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        with torch.no_grad():
            return self._run(input_ids, position_ids)[0]

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
            outputs[layer] = layer_output(output)

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

    def _try_layers(self) -> Tensor:
        """Aux states of a few tokens.

        Raises:
            TargetMismatch: they are not what the contract calls so.
        """
        ids = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        try:
            aux = self._aux(ids, None)
        except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
            got = f"{type(error).__name__}: {str(error)[:200]}"
            raise TargetMismatch("no states come out of its layers", subject=self._kind, got=got) from error
        check_states(aux, ids, self.hidden_size, self._kind)
        if looks_ahead(self._aux, self.vocab_size, self.device):
            fix = "use a causal language model: a draft cannot see what comes after"
            raise TargetMismatch("its states see the tokens behind them", subject=self._kind, fix=fix)
        return aux

    def _head_is_enough(self) -> bool:
        """Whether head, scale and softcap give the model's own logits; some models do more on the way.

        Raises:
            TargetMismatch: they are of a part of the vocabulary.
        """
        ids = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        with torch.no_grad():
            mine = self._logits(self._run(ids, None)[1])
            wanted = gathered(self.model(input_ids=ids, use_cache=False).logits)
        check_width(wanted.shape[-1], self.vocab_size, self._kind)
        same = mine.shape == wanted.shape and mine.dtype == wanted.dtype
        same = same and torch.allclose(mine.float(), wanted.float(), rtol=1e-3, atol=1e-3)
        if not same:
            _log.info("logits_taken_whole", reason="they are more than the head's", price="memory for [B, S, V]")
        return same


def _measures_rows(config: Any) -> bool:
    """Whether rotary frequencies change with the length of the longest row of a forward, padding included.

    "longrope" has one set of them up to its original positions and another beyond; a row would have the other states
    beside a longer one.
    """
    rules = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return any("longrope" in (rule.get("rope_type"), rule.get("type")) for rule in _dicts(rules))


def _dicts(rules: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rules for all layers, and those that stand for a kind of layers each."""
    yield rules
    yield from (rule for rule in rules.values() if isinstance(rule, dict))
