"""What a target server is asked, and whether an answer is that of the question.

B batch · S sequence · H target hidden size · V target vocabulary · D draft vocabulary
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from eaglefeed.errors import SchemaError, TargetUnavailable
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.eagle3 import validate_eagle3_packing_inputs, validate_eagle3_specs
from eaglefeed.schema.protocol import ModelInfo
from eaglefeed.schema.values import shift_left
from eaglefeed.storage.header import MAX_HEADER_BYTES
from eaglefeed.storage.shard import TensorWriter, encode_tensors, spec_of

__all__ = ["RowsRequest", "VocabSession", "new_id"]

_WIDEST_ITEM_BYTES = 8


def new_id() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True, eq=False)
class VocabSession:
    """A vocabulary map, and the random name under which servers keep it.

    A new map has a new name, so a request on its way is answered over the map it was made with.
    """

    name: str
    draft_vocab_size: int
    body: bytearray

    @classmethod
    def of(cls, selected_token_ids: Tensor, selected_token_mask: Tensor) -> "VocabSession":
        """The session of a map, ids [D] and mask [V].

        Raises:
            SchemaError: no tensors.
        """
        tensors = {"selected_token_ids": selected_token_ids, "selected_token_mask": selected_token_mask}
        _check_tensors(tensors)
        writer = TensorWriter({name: tensor.detach().cpu() for name, tensor in tensors.items()}, {})
        return cls(new_id(), len(selected_token_ids), encode_tensors(writer))


class RowsRequest:
    """Rows to be run by a target, kept as they were when it was made.

    Args:
        input_ids: [B, S] as tokenized, not shifted.
        attention_mask: [B, S] 0/1.
        loss_mask: [B, S] 0/1, not shifted.
        session: the vocabulary map that answers are to be over; None for logits.
        position_ids: [B, S]; packing takes all three of these or none, and whether it adds up is the target's to check.
        seq_lens: [B, max_docs].
        doc_remaining: [B, S].

    Raises:
        SchemaError: ids and masks that are not of one shape [B, S], no rows or tokens, no whole numbers, or incomplete
            packing.
    """

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        *,
        session: VocabSession | None,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> None:
        packing = {"position_ids": position_ids, "seq_lens": seq_lens, "doc_remaining": doc_remaining}
        validate_eagle3_packing_inputs(**packing)
        given = {name: tensor for name, tensor in packing.items() if tensor is not None}
        rows = {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
        _check_tensors(rows | given)
        shapes = {tuple(tensor.shape) for tensor in rows.values()}
        if len(shapes) != 1 or input_ids.ndim != 2:
            raise SchemaError("ids and masks need one shape", wanted="[B, S]", got=sorted(shapes))
        if not input_ids.numel():
            what = "no tokens" if len(input_ids) else "no rows"
            raise SchemaError(what, subject="input_ids", wanted="[B, S], both at least 1", got=list(input_ids.shape))
        self._rows = {name: _integers(name, tensor) for name, tensor in rows.items()}
        self._packing = {name: _integers(name, tensor) for name, tensor in given.items()}
        self.id, self.session = new_id(), session
        self.body = encode_tensors(TensorWriter(self._rows | self._packing, {"request": self.id}))

    def max_bytes(self, info: ModelInfo) -> int:
        """A bound for the file of its answer."""
        num_items = sum(prod(shape) for shape in self._shapes(info).values())
        return MAX_HEADER_BYTES + num_items * _WIDEST_ITEM_BYTES

    def answer(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], info: ModelInfo, server: str
    ) -> Eagle3TargetBatch:
        """The answer as a batch, if it is the one to this request.

        Args:
            tensors: what the server sent, its digests checked.
            metadata: of the same file.
            info: the target's sizes.
            server: named in an error.

        Raises:
            TargetUnavailable: another request's or target's, other features, shapes or dtypes, or of other tokens.
        """
        if (got := metadata.get("request")) != self.id:
            raise _not_the_answer(server, "an answer to another request", self.id, got)
        if (got := metadata.get("model")) != info.id:
            raise _not_the_answer(server, "an answer of another target", info.id, got)
        shapes, found = self._shapes(info), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != shapes:
            raise _not_the_answer(server, "an answer of other features or shapes", shapes, found)
        self._check_dtypes(tensors, info, server)
        self._check_tokens(tensors, server)
        return Eagle3TargetBatch(**tensors)  # type: ignore[arg-type]  # sample_ids are none of them

    def _shapes(self, info: ModelInfo) -> dict[str, tuple[int, ...]]:
        rows = tuple(self._rows["input_ids"].shape)
        core = {"aux_hidden_states": (*rows, 3 * info.hidden_size)} | dict.fromkeys(self._rows, rows)
        core |= {name: tuple(tensor.shape) for name, tensor in self._packing.items()}
        if self.session is None:
            return core | {"logits": (*rows, info.vocab_size)}
        return core | {"target_probs": (*rows, self.session.draft_vocab_size), "position_mask": (*rows, 1)}

    def _check_dtypes(self, tensors: Mapping[str, Tensor], info: ModelInfo, server: str) -> None:
        specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        try:
            validate_eagle3_specs(specs, server)
        except SchemaError as error:
            raise _not_the_answer(server, error.what, error.wanted, error.got) from None
        if (got := specs["aux_hidden_states"].dtype) != info.dtype:
            raise _not_the_answer(server, "an answer of another dtype", info.dtype, got)

    def _check_tokens(self, tensors: Mapping[str, Tensor], server: str) -> None:
        """Check that the rows are the request's own: shifted, padded on the right, and packed as it said."""
        real = self._rows["attention_mask"].bool()
        lengths = real.sum(-1, keepdim=True)
        wanted_mask = torch.arange(real.shape[1]) < lengths
        next_real, is_next = shift_left(wanted_mask), real & (real.cumsum(-1) > 1)
        same = torch.equal(tensors["attention_mask"].cpu(), wanted_mask.long())
        for name in ("input_ids", "loss_mask"):
            wanted = torch.zeros_like(self._rows[name]).masked_scatter_(next_real, self._rows[name][is_next])
            if self._packing and name == "loss_mask":  # no loss from one document to the next
                wanted *= self._packing["doc_remaining"] > 0
            same = same and torch.equal(tensors[name].cpu(), wanted)
        same = same and all(torch.equal(tensors[name].cpu(), value) for name, value in self._packing.items())
        if not same:
            raise _not_the_answer(server, "an answer of other rows than those that were asked for", None, None)


def _check_tensors(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise SchemaError("no tensor", subject=name, wanted="a torch.Tensor", got=kind)


def _integers(name: str, tensor: Tensor) -> Tensor:
    """A copy on the CPU, int64."""
    values = tensor.detach().cpu()
    found = values.to(torch.int64, copy=True)
    if not torch.equal(found.to(values.dtype), values):
        raise SchemaError(f"{name} holds no whole numbers", wanted="int64", got=str(values.dtype))
    return found


def _not_the_answer(server: str, what: str, wanted: object, got: object) -> TargetUnavailable:
    fix = "restart that server with this version of eaglefeed"
    return TargetUnavailable(what, subject=server, wanted=wanted, got=got, fix=fix)
