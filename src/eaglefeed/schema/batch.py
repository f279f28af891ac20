"""Eagle3TargetBatch, what a draft trains on, and Eagle3TargetBackend, whoever makes one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from eaglefeed.errors import SchemaError
from eaglefeed.schema.eagle3 import eagle3_supervision, validate_eagle3_packing_inputs
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SUPERVISION, SUPERVISION_ENCODINGS

if TYPE_CHECKING:
    import torch

__all__ = ["BatchHandle", "Eagle3TargetBackend", "Eagle3TargetBatch", "EmbeddingHolder"]


@dataclass(frozen=True, kw_only=True)
class Eagle3TargetBatch:
    """Supervision for one training step, shifted and zeroed as the EAGLE-3 contract says.

    Args:
        aux_hidden_states: [B, S, 3H] float.
        input_ids: [B, S] int64.
        attention_mask: [B, S] int64.
        loss_mask: [B, S] int64.
        logits: [B, S, V] float, or
        target_probs: [B, S, D] float with
        position_mask: [B, S, 1] bool, or
        last_hidden_states: [B, S, H] float, after the target's final norm, with
        target_argmax: [B, S] int32, of the full logits: exactly one of the three encodings.
        position_ids: [B, S] int64; packing takes all three of these or none.
        seq_lens: [B, max_docs] int64.
        doc_remaining: [B, S] int64.
        sample_ids: the samples it was made of; empty for a batch that came from no queue.

    Raises:
        SchemaError: not exactly one encoding, or packing features that are not complete.
    """

    aux_hidden_states: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logits: Tensor | None = None
    target_probs: Tensor | None = None
    position_mask: Tensor | None = None
    last_hidden_states: Tensor | None = None
    target_argmax: Tensor | None = None
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None
    sample_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the encoding."""
        eagle3_supervision(self.tensors(), ", ".join(self.sample_ids), SUPERVISION_ENCODINGS)
        validate_eagle3_packing_inputs(
            position_ids=self.position_ids, seq_lens=self.seq_lens, doc_remaining=self.doc_remaining
        )

    def tensors(self) -> dict[str, Tensor]:
        """The features that are present, in the contract's order."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: "torch.device | str") -> "Eagle3TargetBatch":
        """The same batch on another device."""
        # Copied whole when this returns: the memory of a batch that nobody holds any more is read into again at once.
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def to_trainer_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of a draft's forward.

        Returns:
            input_ids, attention_mask, loss_mask, aux_hidden_states, then target_logits, or target_probs and
            position_mask, then the packing features if there are any.

        Raises:
            SchemaError: last hidden states have not been expanded to target_probs and position_mask.
        """
        tensors = self.tensors()
        if EAGLE3_COMPACT_SUPERVISION[0] in tensors:
            fix = "expand them with the target's head first, as a SampleStream with `head` does"
            raise SchemaError("a draft does not read last hidden states", subject=", ".join(self.sample_ids), fix=fix)
        first = {name: tensors.pop(name) for name in ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states")}
        return first | {"target_logits" if name == "logits" else name: tensor for name, tensor in tensors.items()}


class EmbeddingHolder(Protocol):
    """An object with the target's input embeddings as `.weight`, [V, H]."""

    weight: Tensor


class BatchHandle(Protocol):
    """A batch that is on its way."""

    def result(self, timeout: float | None = None) -> Eagle3TargetBatch:
        """Wait for it, at most `timeout` seconds.

        Raises:
            TimeoutError: it did not come in time.
        """
        ...

    def cancel(self) -> bool:
        """Give it up; False if it was done already."""
        ...


class Eagle3TargetBackend(ABC):
    """A target that turns token ids into supervision: in this process, on a server, or behind an engine."""

    supports_async = False

    @abstractmethod
    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        *,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Eagle3TargetBatch:
        """Run the target.

        Args:
            input_ids: [B, S] int64 as tokenized, not shifted.
            attention_mask: [B, S] 0/1.
            loss_mask: [B, S] 0/1, not shifted.
            position_ids: [B, S], restarting at 0 with each document; packing takes all three of these or none.
            seq_lens: [B, max_docs]; no document sees another, and none is supervised by the next one's first token.
            doc_remaining: [B, S].

        Returns:
            A batch whose tensors are never written to again, by nobody: it is stored while the next one is made.
        """

    @abstractmethod
    def get_input_embeddings(self) -> EmbeddingHolder:
        """The target's input embeddings."""

    @abstractmethod
    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Project supervision onto a draft vocabulary from now on.

        Args:
            selected_token_ids: [D] int64, ascending.
            selected_token_mask: [V] bool, true at those ids.
        """

    def generate_batch_async(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        *,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> BatchHandle:
        """Start `generate_batch`; only where `supports_async` is true."""
        raise NotImplementedError(f"{type(self).__name__} answers in place: use generate_batch")

    def close(self) -> None:
        """Give back what it holds."""
        return
