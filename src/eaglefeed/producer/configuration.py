"""What a target's configuration says: whether it can be one, its sizes, and how long a row it takes."""

from typing import Any

from eaglefeed.errors import TargetMismatch

__all__ = ["check_kind", "longest_row", "max_positions", "read_config", "size_of", "text_config"]

_SIZES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
"""A size's names, where a configuration does not map its own to the first."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_RESERVED = {"sglang": 8}
"""Positions of a row that an engine keeps for what it generates."""
_FIX = "use a causal language model, which has one stack of decoder layers"


def read_config(source: str, *, trust_remote_code: bool) -> Any:
    """The configuration of what `resolve_target` gave, with transformers' own errors."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def check_kind(config: Any, name: str) -> None:
    """Check the whole configuration of a target, before its weights are read.

    Raises:
        TargetMismatch: an encoder-decoder, or one without a size that every decoder has.
    """
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder-decoder, whose decoder says nothing without its encoder"
        raise TargetMismatch(what, subject=name, got=getattr(config, "model_type", ""), fix=_FIX)
    try:
        text = text_config(config)
    except ValueError as error:
        raise TargetMismatch("no one text model in it", subject=name, got=str(error)[:300], fix=_FIX) from None
    for size in _SIZES:
        size_of(text, size, name)


def text_config(config: Any) -> Any:
    """The part of a configuration that is of the language model: a target that sees images has others too."""
    return config.get_text_config(decoder=True)


def size_of(config: Any, size: str, name: str = "") -> int:
    """num_hidden_layers, hidden_size or vocab_size of a text configuration.

    Raises:
        TargetMismatch: it does not say.
    """
    found = (getattr(config, known, None) for known in _SIZES[size])
    value = next((value for value in found if isinstance(value, int) and value > 0), None)
    if value is None:
        subject = name or type(config).__name__
        raise TargetMismatch("its configuration lacks a size", subject=subject, wanted=size, fix=_FIX)
    return value


def max_positions(config: Any) -> int | None:
    """Positions of a text configuration, if it says so; what a rotary scaling would add to them does not count."""
    found = (getattr(config, name, None) for name in _POSITIONS)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def longest_row(positions: int | None, engine: str) -> int | None:
    """Tokens a row may have in an engine of our own, of a target with so many positions; None if it does not say."""
    return None if positions is None else positions - _RESERVED.get(engine, 0)
