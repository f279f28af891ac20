"""The target's final norm, which stands between the last states of one project's files and another's.

    eaglefeed's last_hidden_states, SpecForge's hidden_state    after the norm
    the last layer of speculators' hs_*.safetensors             before it

A final norm is y = g · u + b with u = x / rms(x), or (x - mean(x)) / std(x): u has a mean square of 1 in every row, by
which a row shows whether it has been normed. From y alone u is known, and not the size that x had; the norm of u is y
again, so u serves where x is asked for.

n tokens · H hidden size
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from eaglefeed.errors import SchemaError

__all__ = ["Gain"]

_TOLERANCE = 0.05
"""How far a median row's mean square may be from 1: the norm's epsilon, and rounding to bfloat16."""


class Gain:
    """What a final norm multiplies with and adds.

    Args:
        scale: g, [H].
        bias: b, [H].
    """

    def __init__(self, scale: Tensor, bias: Tensor) -> None:
        self._scale, self._bias = scale.float(), bias.float()
        self._used = self._scale != 0

    @classmethod
    def of_norm(cls, norm: Callable[[Tensor], Tensor], hidden_size: int, dtype: torch.dtype) -> "Gain":
        """Found by what the norm does to a row of mean 0 and mean square 1, whatever kind it is."""
        signs = torch.ones(1, hidden_size, dtype=dtype)
        signs[:, 1::2] = -1
        bias = norm(torch.zeros_like(signs)).float()
        return cls(((norm(signs).float() - bias) * signs.float())[0], bias[0])

    @classmethod
    def of_assets(cls, tensors: Mapping[str, Tensor], normed: Tensor) -> "Gain":
        """That of a run: some targets multiply with the norm's weight, others with 1 + it.

        Args:
            tensors: the run's assets, with `norm.weight` and perhaps `norm.bias`.
            normed: [n, H] last hidden states of the run, which show which of both it is.

        Raises:
            SchemaError: neither.
        """
        if "norm.weight" not in tensors:
            raise SchemaError("the run's assets hold no final norm", wanted="norm.weight", got=sorted(tensors))
        weight = tensors["norm.weight"].float()
        bias = tensors.get("norm.bias", torch.zeros_like(weight))
        for scale in (weight, weight + 1):
            gain = cls(scale, bias)
            if gain.is_of(normed) and gain._used.all():
                return gain
        raise SchemaError("the run's last hidden states do not come out of the final norm in its assets")

    def is_of(self, states: Tensor) -> bool:
        """Whether rows [n, H] look as if they came out of this norm."""
        return _has_size_1(self.undo(states)[:, self._used])

    def undo(self, normed: Tensor) -> Tensor:
        """The u of rows [n, H] that came out of the norm, in float32."""
        return (normed.float() - self._bias) / self._scale.masked_fill(~self._used, 1)

    def is_harmless(self, states: Tensor) -> bool:
        """Whether rows [n, H] may go into this norm: they did not come out of it, or it would not change them."""
        return _has_size_1(states.float()) or not self.is_of(states)


def _has_size_1(rows: Tensor) -> bool:
    return bool((rows.square().mean(-1).median() - 1).abs() <= _TOLERANCE)
