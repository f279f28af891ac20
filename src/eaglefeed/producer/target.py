"""HFEagle3TargetModel: supervision from any Hugging Face causal language model in this process.

B batch · S sequence · H hidden size · V target vocabulary · D draft vocabulary
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from eaglefeed.errors import SchemaError, TargetMismatch
from eaglefeed.logs import get_logger
from eaglefeed.producer.rows import check_packing, right_padded
from eaglefeed.producer.supervision import compact_supervision, draft_supervision, logits_supervision
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch, EmbeddingHolder
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS, default_aux_layer_ids, validate_eagle3_packing_inputs
from eaglefeed.schema.head import LogitRule, head_digest
from eaglefeed.schema.values import shift_left

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HFEagle3TargetModel"]

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_log = get_logger(__name__)


class HFEagle3TargetModel(Eagle3TargetBackend):
    """Runs a model, takes the outputs of three decoder layers and the logits, and lays them out as the contract says.

    Without a vocabulary map the supervision is `logits` in the model's dtype. With one it is `target_probs` (a float32
    softmax over the draft vocabulary, stored in the model's dtype) and `position_mask`. With `compact` it is
    `last_hidden_states` and `target_argmax`, for any vocabulary map: it is the consumer that projects.

    Args:
        model: any causal language model of transformers.
        aux_layer_ids: three 0-based decoder layers whose outputs are taken, in this order; by default the contract's.
        compact: supervise with last hidden states.

    Raises:
        SchemaError: ids that are not three distinct layers of the model, or a model too shallow for the default.
        TargetMismatch: its decoder layers cannot be found; or, with `compact`, its logits are more than its head.
    """

    def __init__(
        self, model: "PreTrainedModel", aux_layer_ids: tuple[int, ...] | None = None, *, compact: bool = False
    ) -> None:
        self.model = model.eval()
        self._config = model.config.get_text_config()
        self._backbone = _backbone(model)
        self._layers = _decoder_layers(self._backbone, self.num_layers)
        self.aux_layer_ids = _checked_layer_ids(aux_layer_ids, self.num_layers)
        self._rule = LogitRule.of_config(self._config)
        self._selected: tuple[Tensor, Tensor] | None = None
        self._head_alone = self._head_is_enough()
        self._compact = compact
        if compact and not self._head_alone:
            what = (
                "its logits are more than its head, scale and softcap: trainers cannot make them of last hidden states"
            )
            fix = "supervise with produce.supervision=target_probs or logits"
            raise TargetMismatch(what, subject=type(model).__name__, fix=fix)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self._config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self._config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return int(self._head().weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """Tokens a row may have, if the model says so."""
        return getattr(self._config, "max_position_embeddings", None)

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of the features."""
        return str(self.model.dtype).removeprefix("torch.")

    def get_input_embeddings(self) -> EmbeddingHolder:
        """The model's input embeddings, [V, H] (or taller)."""
        return cast("EmbeddingHolder", self.model.get_input_embeddings())

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Make `target_probs` and `position_mask` over these tokens from now on.

        Args:
            selected_token_ids: [D] int64, ascending.
            selected_token_mask: [V] bool, true at those ids.

        Raises:
            SchemaError: the two disagree, or are not of this target's vocabulary.
        """
        if selected_token_mask.shape != (self.vocab_size,):
            got = list(selected_token_mask.shape)
            raise SchemaError("the vocabulary map is another target's", wanted=f"[{self.vocab_size}]", got=got)
        if not torch.equal(selected_token_mask.nonzero().flatten(), selected_token_ids):
            raise SchemaError("the vocabulary map is inconsistent", wanted="ids ascending, as nonzero(mask)")
        self._selected = (selected_token_ids.to(self.model.device), selected_token_mask.to(self.model.device))

    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Eagle3TargetBatch:
        """Run the model. Left-padded rows come out padded on the right, as every shard is.

        Args:
            input_ids: [B, S] as tokenized, not shifted.
            attention_mask: [B, S] 0/1, one run of ones a row.
            loss_mask: [B, S] 0/1, not shifted.
            position_ids: [B, S], restarting at 0 with each document; packing takes all three of these or none.
            seq_lens: [B, max_docs]; attention does not cross from one document to another.
            doc_remaining: [B, S], handed through.

        Raises:
            SchemaError: rows that the contract or the model does not allow.
        """
        validate_eagle3_packing_inputs(position_ids=position_ids, seq_lens=seq_lens, doc_remaining=doc_remaining)
        ids, attention, loss = (tensor.to(self.model.device) for tensor in (input_ids, attention_mask, loss_mask))
        rows = right_padded(ids, attention, loss, may_move=position_ids is None)
        self._check_rows(rows.input_ids)
        packing = self._checked_packing(position_ids, seq_lens, doc_remaining, rows.real)
        # no_grad, not inference_mode: a trainer in this process may put the result into its graph.
        with torch.no_grad():
            aux, last = self._forward(rows.input_ids, packing.get("position_ids"))
            next_loss = shift_left(rows.loss_mask)
            supervision = self._supervision(last, shift_left(rows.real), next_loss)
        return Eagle3TargetBatch(
            aux_hidden_states=aux.masked_fill_(~rows.real[..., None], 0),
            input_ids=shift_left(rows.input_ids),
            attention_mask=rows.real.long(),
            loss_mask=next_loss,
            **supervision,
            **packing,
        )

    def target_assets(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What trainers need of the target, on the CPU.

        Returns:
            embed_tokens.weight, lm_head.weight, norm.weight and, where the model has them, lm_head.bias and norm.bias;
            and metadata: `config` (the text config as JSON) and the numbers of its LogitRule.
        """
        parts = {"embed_tokens": self.model.get_input_embeddings(), "lm_head": self._head(), "norm": self._norm()}
        found = {name: tensor for part, module in parts.items() for name, tensor in _weights(part, module).items()}
        # Cloned, since a tied head shares its memory with the embeddings and safetensors takes no shared memory.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        config = json.dumps(self._config.to_dict(), sort_keys=True, default=str)
        return tensors, {"config": config, **self._rule.metadata()}

    def head_digest(self) -> str:
        """The RunContract's `head_digest` for supervision by last hidden states."""
        return head_digest(_weights("lm_head", self._head()), self._rule.metadata())

    def _check_rows(self, input_ids: Tensor) -> None:
        longest, limit = input_ids.shape[1], self.max_positions
        if limit is not None and longest > limit:
            fix = "feed with a lower feed.max_length"
            raise SchemaError("row longer than the target's positions", wanted=f"at most {limit}", got=longest, fix=fix)
        low, high = (int(bound) for bound in input_ids.aminmax())
        if low < 0 or high >= self.vocab_size:
            got = low if low < 0 else high
            raise SchemaError("token id outside the target's vocabulary", wanted=f"0 to {self.vocab_size - 1}", got=got)

    def _checked_packing(
        self, position_ids: Tensor | None, seq_lens: Tensor | None, doc_remaining: Tensor | None, real: Tensor
    ) -> dict[str, Any]:
        if position_ids is None or seq_lens is None or doc_remaining is None:
            return {}
        positions, lengths, remaining = (
            tensor.to(self.model.device).long() for tensor in (position_ids, seq_lens, doc_remaining)
        )
        check_packing(positions, lengths, remaining, real)
        if not self._isolates_documents:
            kind, fix = type(self.model).__name__, "feed without packing"
            raise SchemaError("the target lets packed documents see each other", subject=kind, fix=fix)
        return {"position_ids": positions, "seq_lens": lengths, "doc_remaining": remaining}

    @cached_property
    def _isolates_documents(self) -> bool:
        """Whether a second document's states stay the same when the first one changes."""
        ids = torch.tensor([[0, 1, 2], [3, 4, 2]], device=self.model.device) % self.vocab_size
        positions = torch.tensor([[0, 1, 0]], device=self.model.device).expand_as(ids)
        with torch.no_grad():
            one, other = self._forward(ids, positions)[0][:, 2]
        return torch.allclose(one, other, rtol=1e-3, atol=1e-3)

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Aux states [B, S, 3H] and what logits are made of: last hidden states [B, S, H], or the logits themselves.

        No attention mask goes in: padding stands to the right, where causal attention never looks back from; and
        transformers separates packed documents by their restarting positions only without a mask.
        """
        runner = self._backbone if self._head_alone else self.model
        with self._captured() as outputs:
            result = runner(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        aux = torch.cat([outputs[layer] for layer in self.aux_layer_ids], dim=-1)
        return aux, result.last_hidden_state if self._head_alone else result.logits

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

    def _supervision(self, last: Tensor, next_real: Tensor, next_loss: Tensor) -> dict[str, Any]:
        if self._compact:
            return compact_supervision(last, self._logits, next_real)
        if self._selected is None:
            return logits_supervision(last, self._logits, next_real, vocab_size=self.vocab_size)
        return draft_supervision(last, self._logits, next_real, next_loss=next_loss, selected=self._selected)

    def _logits(self, last: Tensor) -> Tensor:
        if not self._head_alone:
            return last
        return self._rule(self._head()(last))

    def _head_is_enough(self) -> bool:
        """Whether head, scale and softcap give the model's own logits; some models do more on the way."""
        ids = torch.arange(min(4, self.vocab_size), device=self.model.device)[None]
        self._head_alone = True
        with torch.no_grad():
            mine = self._logits(self._forward(ids, None)[1])
            wanted = self.model(input_ids=ids, use_cache=False).logits
        same = mine.dtype == wanted.dtype and torch.allclose(mine.float(), wanted.float(), rtol=1e-3, atol=1e-3)
        if not same:
            _log.info("the target's logits are more than its head: taking them whole, at the price of memory")
        return same

    def _head(self) -> nn.Linear:
        return cast("nn.Linear", self.model.get_output_embeddings())

    def _norm(self) -> nn.Module | None:
        found = (getattr(self._backbone, name, None) for name in _NORM_NAMES)
        return next((module for module in found if isinstance(module, nn.Module)), None)


def _backbone(model: "PreTrainedModel") -> nn.Module:
    decoder = model.get_decoder()
    return cast("nn.Module", model.base_model if decoder is None or decoder is model else decoder)


def _weights(part: str, module: nn.Module | None) -> dict[str, Tensor]:
    found = {f"{part}.{name}": getattr(module, name, None) for name in ("weight", "bias")}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


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


def _checked_layer_ids(layer_ids: tuple[int, ...] | None, num_layers: int) -> tuple[int, int, int]:
    ids = default_aux_layer_ids(num_layers) if layer_ids is None else tuple(layer_ids)
    if len(ids) != NUM_AUX_LAYERS or len(set(ids)) != len(ids) or not all(0 <= layer < num_layers for layer in ids):
        fix = f"pass three distinct aux_layer_ids from 0 to {num_layers - 1}; they mean the layers' outputs"
        raise SchemaError("impossible aux_layer_ids", got=list(ids), fix=fix)
    return cast("tuple[int, int, int]", ids)
