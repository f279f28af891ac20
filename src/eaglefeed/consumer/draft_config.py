"""DraftConfig: a draft's sizes, derived from its target's. No torch here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eaglefeed.errors import ConfigError

__all__ = ["DraftConfig"]


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Sizes of a draft; the names are Hugging Face's.

    Args:
        hidden_size: H, the target's own, since its embeddings are shared.
        intermediate_size: of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of a head.
        rms_norm_eps: of every norm.
        rope_theta: base of the rotary embedding.
        max_position_embeddings: the target's: servers refuse to draft beyond it.
        vocab_size: V, the target's.
        draft_vocab_size: D, at most V.
        ttt_steps: steps of training-time test.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    ttt_steps: int = 3

    def __post_init__(self) -> None:
        """Check what would fail far from here."""
        faults = {
            "draft_vocab_size": not 0 < self.draft_vocab_size <= self.vocab_size,
            "num_key_value_heads": self.num_attention_heads % self.num_key_value_heads != 0,
            "ttt_steps": self.ttt_steps < 1,
            "head_dim": self.head_dim % 2 != 0,
        }
        for name in (name for name, faulty in faults.items() if faulty):
            raise ConfigError("impossible size of a draft", subject=name, got=getattr(self, name))

    @classmethod
    def from_target_config(
        cls,
        config: Mapping[str, Any],
        *,
        draft_vocab_size: int,
        ttt_steps: int = 3,
        intermediate_size: int | None = None,
        num_key_value_heads: int | None = None,
    ) -> "DraftConfig":
        """Derive a draft from a Hugging Face target's config.json.

        Args:
            config: the parsed file; a nested text_config is used where there is one.
            draft_vocab_size: D.
            ttt_steps: steps of training-time test.
            intermediate_size: of the MLP; the target's by default.
            num_key_value_heads: the target's by default.

        Raises:
            ConfigError: a size is missing or impossible.
        """
        config = config.get("text_config") or config
        hidden = _size(config, "hidden_size", "n_embd", "d_model")
        heads = _size(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate_size or _size(config, "intermediate_size", "n_inner", default=4 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=num_key_value_heads or _size(config, "num_key_value_heads", default=heads),
            head_dim=_size(config, "head_dim", default=hidden // heads),
            rms_norm_eps=float(_first(config, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") or 1e-5),
            rope_theta=_rope_theta(config),
            max_position_embeddings=_size(config, *_POSITIONS, default=2048),
            vocab_size=_size(config, "vocab_size"),
            draft_vocab_size=draft_vocab_size,
            ttt_steps=ttt_steps,
        )

    def to_json(self) -> str:
        """One canonical text."""
        return json.dumps(asdict(self), sort_keys=True)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = _first(config, *names)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        fix = "pass the config.json of a causal language model"
        raise ConfigError(
            "the target's config lacks a size", subject=names[0], wanted="a positive integer", got=value, fix=fix
        )
    return value


def _rope_theta(config: Mapping[str, Any]) -> float:
    """From the top level, from transformers 5's rope_parameters, or from those of its full attention layers."""
    nested = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or nested.get("rope_theta")
    theta = theta or (nested.get("full_attention") or {}).get("rope_theta")
    return float(theta or 10_000.0)
