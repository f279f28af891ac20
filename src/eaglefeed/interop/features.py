"""A row of another project's offline features as a sample: checked against the target, then shifted by the contract.

n tokens · H target hidden size · V target vocabulary
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from eaglefeed.errors import InputError
from eaglefeed.interop.norm import Gain
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS
from eaglefeed.schema.refs import DTYPE_BYTES
from eaglefeed.schema.values import shift_left

__all__ = ["Features", "ImportTarget", "dense_tensor"]

_CHUNK_TOKENS = 256
"""As many as producers make logits of at once: then equal states give the same best token."""
_IDS, _MASKS = (torch.int64, torch.int32), (torch.int64, torch.int32, torch.bool)
_HEADER_BYTES = 2**16
_WRONG_FILES = "is --target the model that made this file, and --format the project?"


@dataclass(frozen=True)
class ImportTarget:
    """What an import knows of the target.

    Args:
        contract: the run's, whose samples are supervised by last hidden states.
        norm: its final norm, [..., H] → [..., H] in the contract's dtype.
        logits: its head, last hidden states [..., H] → logits [..., V].
    """

    contract: RunContract
    norm: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]

    @cached_property
    def gain(self) -> Gain:
        """What the final norm multiplies with and adds."""
        with torch.no_grad():
            return Gain.of_norm(self.norm, self.contract.hidden_size, getattr(torch, self.contract.dtype))

    def max_file_bytes(self, dtype: str = "float32") -> int:
        """Bytes of the largest file with a row of at most max_length tokens, whose states have that dtype."""
        states = (NUM_AUX_LAYERS + 1) * self.contract.hidden_size * DTYPE_BYTES[dtype]
        return self.contract.max_length * (states + 2 * DTYPE_BYTES["int64"]) + _HEADER_BYTES


@dataclass(frozen=True)
class Features:
    """One row as its file holds it, nothing of it shifted.

    Args:
        name: of the file, for errors.
        input_ids: [n].
        loss_mask: [n], 1 at tokens that are to be predicted.
        aux: [n, 3H], the lowest layer first.
        last: [n, H].
        is_normed: whether the format's last states come after the target's final norm.
    """

    name: str
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    is_normed: bool

    def checked(self, target: ImportTarget) -> "Features":
        """The same with int64 ids and mask, once it fits the target.

        Raises:
            InputError: it does not; names the file, what was wanted and what came.
        """
        contract = target.contract
        self._check_length(contract.max_length)
        self._check_states("auxiliary states", self.aux, NUM_AUX_LAYERS * contract.hidden_size, contract.dtype)
        self._check_states("last states", self.last, contract.hidden_size, contract.dtype)
        self._check_integers("token ids", self.input_ids, _IDS, contract.vocab_size)
        self._check_integers("loss mask", self.loss_mask, _MASKS, 2)
        self._check_norm(target.gain)
        return replace(self, input_ids=self.input_ids.long(), loss_mask=self.loss_mask.long())

    def tensors(self, target: ImportTarget) -> dict[str, Tensor]:
        """Of what `checked` returned, the decoded features of its sample: B = 1, S = n."""
        ids, mask = self.input_ids[None], self.loss_mask[None]
        with torch.no_grad():
            last = self.last[None] if self.is_normed else target.norm(self.last[None])
            best = torch.zeros_like(ids, dtype=torch.int32)
            for start in range(1, len(self.last), _CHUNK_TOKENS):
                logits = target.logits(last[:, start : start + _CHUNK_TOKENS])
                best[:, start - 1 : start - 1 + logits.shape[1]] = logits.argmax(-1)
        return {
            "aux_hidden_states": self._ordered_aux(target.contract.aux_layer_ids)[None],
            "input_ids": shift_left(ids),
            "attention_mask": torch.ones_like(mask),
            "loss_mask": shift_left(mask),
            "last_hidden_states": shift_left(last),
            "target_argmax": best,
        }

    def _ordered_aux(self, layer_ids: tuple[int, ...]) -> Tensor:
        """[n, 3H] in the contract's order of layers."""
        ascending = sorted(layer_ids)
        layers = self.aux.view(len(self.aux), NUM_AUX_LAYERS, -1)
        return layers[:, [ascending.index(layer) for layer in layer_ids]].flatten(1)

    def _check_length(self, longest: int) -> None:
        shape = list(self.input_ids.shape)
        if len(shape) != 1:
            raise self._fault("token ids of another shape", "[n]", shape)
        if not 1 <= shape[0] <= longest:
            fix = "raise feed.max_length, up to the target's positions, in a run of its own if this one has samples"
            raise self._fault("a row of impossible length", f"1 to {longest} tokens", shape[0], fix)
        if list(self.loss_mask.shape) != shape:
            raise self._fault("a loss mask of another length than its token ids", shape, list(self.loss_mask.shape))

    def _check_states(self, what: str, states: Tensor, width: int, dtype: str) -> None:
        if list(states.shape) != [len(self.input_ids), width]:
            raise self._fault(f"{what} of another shape", [len(self.input_ids), width], list(states.shape))
        if _name(states.dtype) != dtype:
            fix = "pass target.dtype with the dtype of the files"
            raise self._fault(f"{what} of another dtype", dtype, _name(states.dtype), fix)
        if not all(end.isfinite() for end in states.aminmax()):
            bad = (~states.isfinite()).nonzero()
            raise self._fault(f"{what} with values that are not finite", None, f"{len(bad)}, first {bad[0].tolist()}")

    def _check_integers(self, what: str, values: Tensor, dtypes: tuple[torch.dtype, ...], bound: int) -> None:
        if values.dtype not in dtypes:
            raise self._fault(f"{what} of another dtype", " or ".join(map(_name, dtypes)), _name(values.dtype))
        low, high = (int(end) for end in values.aminmax())
        if low < 0 or high >= bound:
            raise self._fault(f"{what} out of range", f"0 to {bound - 1}", low if low < 0 else high)

    def _check_norm(self, gain: Gain) -> None:
        if self.is_normed and not gain.is_of(self.last):
            raise self._fault("last states that did not come out of the target's final norm", None, None, _WRONG_FILES)
        if not self.is_normed and not gain.is_harmless(self.last):
            what, wanted = "last states that have been through the target's final norm", "those before it"
            raise self._fault(what, wanted, None, _WRONG_FILES)

    def _fault(self, what: str, wanted: object, got: object, fix: str = "") -> InputError:
        return InputError(what, subject=self.name, wanted=wanted, got=got, fix=fix)


def dense_tensor(values: Mapping[str, object], key: str, name: str) -> Tensor:
    """A tensor that a file must hold.

    Raises:
        InputError: it holds none of that key.
    """
    value = values.get(key)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        got = type(value).__name__ if key in values else sorted(map(str, values))
        raise InputError("no such tensor in it", subject=name, wanted=key, got=got)
    return value.detach()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
