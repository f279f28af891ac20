"""Eagle3Target: what is the same for every engine that runs a target in or beside this process.

B batch · S sequence · H hidden size · V target vocabulary · D draft vocabulary
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from eaglefeed.errors import SchemaError, TargetMismatch
from eaglefeed.producer.configuration import longest_row, max_positions, size_of
from eaglefeed.producer.parts import TargetParts
from eaglefeed.producer.rows import Rows, check_packing, right_padded
from eaglefeed.producer.supervision import compact_supervision, draft_supervision, logits_supervision
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch, EmbeddingHolder
from eaglefeed.schema.eagle3 import (
    EAGLE3_PACKING_FEATURES,
    NUM_AUX_LAYERS,
    default_aux_layer_ids,
    validate_eagle3_packing_inputs,
)
from eaglefeed.schema.values import shift_left

__all__ = ["Captured", "Eagle3Target", "Selected", "checked_layer_ids"]

Selected = tuple[Tensor, Tensor]
"""A draft vocabulary on the target's device: ids [D] int64, mask [V] bool."""


@dataclass(frozen=True)
class Captured:
    """What one forward gave, nothing of it shifted.

    Args:
        rows: what went in, padded on the right.
        aux: [B, S, 3H], zero beyond each row's real length.
        last: what logits are made of: last hidden states [B, S, H] or, of some models, the logits [B, S, V].
        packing: position_ids, seq_lens and doc_remaining, or nothing.
    """

    rows: Rows
    aux: Tensor
    last: Tensor
    packing: dict[str, Any]

    def part(self, rows: slice, length: int) -> "Captured":
        """Some rows of a forward without packing, cut to `length`, which none of them is longer than.

        Aux is copied, so it holds no more.
        """
        cut = Rows(*(tensor[rows, :length] for tensor in self.rows))
        return replace(self, rows=cut, aux=self.aux[rows, :length].clone(), last=self.last[rows, :length])


class Eagle3Target(Eagle3TargetBackend):
    """Runs a target, takes the outputs of three decoder layers, and lays them out as the contract says.

    Without a vocabulary map the supervision is `logits` in the target's dtype. With one it is `target_probs` (a float32
    softmax over the draft vocabulary, stored in that dtype) and `position_mask`. With `compact` it is
    `last_hidden_states` and `target_argmax`, for any vocabulary map: it is the consumer that projects.

    Args:
        parts: of the target.
        aux_layer_ids: three 0-based decoder layers whose outputs are taken, in this order; by default the contract's.
        compact: supervise with last hidden states.

    Raises:
        SchemaError: ids that are not three distinct layers of the target, or one too shallow for the default.
    """

    engine: ClassVar[str]

    def __init__(self, parts: TargetParts, aux_layer_ids: tuple[int, ...] | None, *, compact: bool) -> None:
        self.parts = parts
        self.aux_layer_ids = checked_layer_ids(aux_layer_ids, self.num_layers)
        self._selected: Selected | None = None
        self._compact = compact

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return size_of(self.parts.config, "num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        """H."""
        return size_of(self.parts.config, "hidden_size")

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.parts.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Tokens a row may have, if the target says so."""
        return longest_row(max_positions(self.parts.config), self.engine)

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of the features."""
        return str(self.parts.head.weight.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the features are made."""
        return self.parts.head.weight.device

    @abstractmethod
    def fingerprint(self) -> str:
        """The RunContract's `target_fingerprint`."""

    @abstractmethod
    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Aux states [B, S, 3H], of memory that nobody else writes to, and what `_logits` makes logits of, [B, S, …].

        Anything may stand beyond a row's real length.
        """

    @property
    def _isolates_documents(self) -> bool:
        """Whether packed documents cannot see each other."""
        return True

    def get_input_embeddings(self) -> EmbeddingHolder:
        """The target's input embeddings, [V, H] (or taller)."""
        return self.parts.embeddings()

    def check_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> Selected:
        """The map on the target's device.

        Args:
            selected_token_ids: [D] int64, ascending.
            selected_token_mask: [V] bool, true at those ids.

        Raises:
            SchemaError: the two disagree, or are not of this target's vocabulary.
        """
        if selected_token_mask.shape != (self.vocab_size,):
            got = list(selected_token_mask.shape)
            raise SchemaError("the vocabulary map is another target's", wanted=f"[{self.vocab_size}]", got=got)
        if selected_token_mask.dtype != torch.bool or selected_token_ids.dtype != torch.int64:
            dtypes = f"{selected_token_ids.dtype}, {selected_token_mask.dtype}"
            raise SchemaError("not a vocabulary map", wanted="ids int64 [D], mask bool [V]", got=dtypes)
        selected = selected_token_mask.nonzero().flatten()
        if not torch.equal(selected, selected_token_ids) or not len(selected):
            raise SchemaError("the vocabulary map is inconsistent", wanted="ids ascending, as nonzero(mask)")
        return selected_token_ids.to(self.device), selected_token_mask.to(self.device)

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Make `target_probs` and `position_mask` over these tokens from now on; as check_vocab_mapping."""
        self._selected = self.check_vocab_mapping(selected_token_ids, selected_token_mask)

    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Eagle3TargetBatch:
        """Run the target and supervise; the parameters are `capture`'s.

        Raises:
            SchemaError: rows that the contract or the target does not allow.
        """
        captured = self.capture(input_ids, attention_mask, loss_mask, position_ids, seq_lens, doc_remaining)
        return self.supervise(captured, self._selected, compact=self._compact)

    def capture(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Captured:
        """Run the target once. Left-padded rows come out padded on the right, as every shard is.

        Args:
            input_ids: [B, S] as tokenized, not shifted.
            attention_mask: [B, S] 0/1, one run of ones a row.
            loss_mask: [B, S] 0/1, not shifted.
            position_ids: [B, S], restarting at 0 with each document; packing takes all three of these or none.
            seq_lens: [B, max_docs]; attention does not cross from one document to another.
            doc_remaining: [B, S], the real tokens after each in its document.

        Raises:
            SchemaError: rows that the contract or the target does not allow.
            TargetMismatch: packed rows for a target that does not keep their documents apart.
        """
        validate_eagle3_packing_inputs(position_ids=position_ids, seq_lens=seq_lens, doc_remaining=doc_remaining)
        ids, attention, loss = (tensor.to(self.device) for tensor in (input_ids, attention_mask, loss_mask))
        rows = right_padded(ids, attention, loss, may_move=position_ids is None)
        self._check_rows(rows.input_ids)
        packing = self._checked_packing(position_ids, seq_lens, doc_remaining, rows.real)
        # no_grad, not inference_mode: a trainer in this process may put the result into its graph.
        with torch.no_grad():
            aux, last = self._forward(rows, packing.get("position_ids"))
        return Captured(rows, aux.masked_fill_(~rows.real[..., None], 0), last, packing)

    def supervise(self, captured: Captured, selected: Selected | None, *, compact: bool = False) -> Eagle3TargetBatch:
        """Make a batch, with the supervision that a vocabulary map, or `compact`, asks for."""
        rows, next_loss = captured.rows, shift_left(captured.rows.loss_mask)
        if captured.packing:  # a document's last token must not learn how the next one begins
            next_loss = next_loss * (captured.packing["doc_remaining"] > 0)
        with torch.no_grad():
            supervision = self._supervision(captured.last, shift_left(rows.real), next_loss, selected, compact)
        return Eagle3TargetBatch(
            aux_hidden_states=captured.aux,
            input_ids=shift_left(rows.input_ids),
            attention_mask=rows.real.long(),
            loss_mask=next_loss,
            **supervision,
            **captured.packing,
        )

    def target_assets(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What trainers need of the target, on the CPU.

        Returns:
            embed_tokens.weight, lm_head.weight, norm.weight and, where the model has them, lm_head.bias and norm.bias;
            and metadata: `config` (the text config as JSON) and the numbers of its LogitRule.
        """
        return self.parts.assets()

    def head_digest(self) -> str:
        """The RunContract's `head_digest` for supervision by last hidden states."""
        return self.parts.head_digest()

    def _check_rows(self, input_ids: Tensor) -> None:
        longest, limit = input_ids.shape[1], self.max_positions
        if limit is not None and longest > limit:
            fix = "feed with a lower feed.max_length, and give this command the same"
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
        given = (position_ids, seq_lens, doc_remaining)
        moved = (tensor.to(self.device, torch.int64, copy=True) for tensor in given)  # a batch's tensors are its own
        packing = dict(zip(EAGLE3_PACKING_FEATURES, moved, strict=True))
        check_packing(packing, real)
        if not self._isolates_documents:
            fix = "feed without packing, or run it with vllm or sglang, which take each document by itself"
            raise TargetMismatch("the target lets packed documents see each other", subject=self._kind, fix=fix)
        return packing

    @property
    def _kind(self) -> str:
        return type(self).__name__

    def _supervision(
        self, last: Tensor, next_real: Tensor, next_loss: Tensor, selected: Selected | None, compact: bool
    ) -> dict[str, Any]:
        if compact:
            return compact_supervision(last, self._logits, next_real)
        if selected is None:
            return logits_supervision(last, self._logits, next_real, vocab_size=self.vocab_size)
        return draft_supervision(last, self._logits, next_real, next_loss=next_loss, selected=selected)

    def _logits(self, last: Tensor) -> Tensor:
        return self.parts.logits(last)


def checked_layer_ids(layer_ids: tuple[int, ...] | None, num_layers: int) -> tuple[int, int, int]:
    """The ids, or the contract's default.

    Raises:
        SchemaError: not three distinct layers of a model of `num_layers`, or one too shallow for the default.
    """
    ids = default_aux_layer_ids(num_layers) if layer_ids is None else tuple(layer_ids)
    in_bounds = all(type(layer) is int and 0 <= layer < num_layers for layer in ids)  # True is an int too
    if not in_bounds or len(set(ids)) != len(ids) or len(ids) != NUM_AUX_LAYERS:
        fix = f"pass three distinct aux_layer_ids from 0 to {num_layers - 1}; they mean the layers' outputs"
        raise SchemaError("impossible aux_layer_ids", got=list(ids), fix=fix)
    return cast("tuple[int, int, int]", ids)
