"""The draft's one decoder layer, its rotary embedding and its key-value cache.

B batch · n queries · m slots · T cached slots · H hidden size · d head size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eaglefeed.consumer.draft_config import DraftConfig

__all__ = ["Attention", "DraftCache", "KeyValue", "Layer", "Mlp", "Norm", "Rotary"]


class KeyValue(NamedTuple):
    """Keys and values, [B, kv_heads, n, d] each."""

    keys: Tensor
    values: Tensor


@dataclass
class DraftCache:
    """Keys and values of a draft while it decodes: [B, kv_heads, T, d], and which of the T slots are real, [B, T]."""

    keys: Tensor
    values: Tensor
    valid: Tensor

    @property
    def length(self) -> int:
        """T."""
        return self.valid.shape[1]

    def append(self, new: KeyValue, valid: Tensor) -> None:
        """Add slots; those that are not `valid` [B, n] are never attended to."""
        self.keys = torch.cat([self.keys, new.keys], dim=2)
        self.values = torch.cat([self.values, new.values], dim=2)
        self.valid = torch.cat([self.valid, valid], dim=1)

    def crop(self, length: int) -> None:
        """Forget the slots from `length` on."""
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        self.valid = self.valid[:, :length]


class Rotary(NamedTuple):
    """Cosines and sines of some positions, [B, 1, n, d]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: DraftConfig) -> "Rotary":
        """Those of `positions` [B, n]."""
        exponents = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
        angles = positions[:, None, :, None].float() * config.rope_theta**-exponents
        angles = torch.cat([angles, angles], dim=-1)
        return cls(angles.cos(), angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        """Rotate queries or keys [B, heads, n, d] to their positions."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * self.sin.to(x.dtype)


class Norm(nn.RMSNorm):
    """RMSNorm that stays in its weight's dtype where products run in a lower one."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, KeyValue]:
        """Queries [B, heads, n, d], keys and values [B, kv_heads, n, d] of x [B, n, 2H]."""
        q, k, v = (
            layer(x).view(*x.shape[:2], layer.out_features // self.head_dim, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotary.turn(q), KeyValue(rotary.turn(k), v)

    def attend(self, q: Tensor, real: KeyValue, mask: Tensor, own: Sequence[KeyValue] = ()) -> Tensor:
        """Attention of n queries over m shared slots, and each query's own slots.

        Args:
            q: [B, heads, n, d].
            real: [B, kv_heads, m, d] each.
            mask: [B, 1, n, m] bool, true where a query sees a slot.
            own: [B, kv_heads, n, d] each; query i sees slot i of each alone.

        Returns:
            [B, n, H].
        """
        # Queries of one kv head lie side by side, so that grouped heads need no copy of the keys.
        batch, heads, n, _ = q.shape
        grouped = q.reshape(batch, self.kv_heads, heads // self.kv_heads, n, self.head_dim) * self.head_dim**-0.5
        slots = real.keys.shape[2]
        scores = (grouped.flatten(2, 3) @ real.keys.transpose(2, 3)).view(*grouped.shape[:4], slots)
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
        diagonal = [(grouped * kv.keys[:, :, None]).sum(-1, keepdim=True) for kv in own]
        weights = torch.cat([scores, *diagonal], dim=-1).float().softmax(-1).to(q.dtype)
        mixed = (weights[..., :slots].flatten(2, 3) @ real.values).view_as(grouped)
        for index, kv in enumerate(own, start=slots):
            mixed = mixed + weights[..., index : index + 1] * kv.values[:, :, None]
        out: Tensor = self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, H] → [B, n, H]."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Norms, attention and MLP; the caller attends between `project` and `finish`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def project(self, embeds: Tensor, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, KeyValue]:
        """Queries, keys and values of embeds and hidden, [B, n, H] each."""
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        return self.self_attn.project(both, rotary)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual and MLP: hidden and attended [B, n, H] → [B, n, H]."""
        hidden = hidden + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
