"""The target as a command loads it."""

from typing import TYPE_CHECKING

from eaglefeed.config import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["target_model", "target_tokenizer"]


def target_model(settings: Settings) -> "PreTrainedModel":
    """The model, ready for inference."""
    from eaglefeed.producer.loading import load_target

    target = settings.target
    return load_target(
        target.name,
        dtype=target.dtype,
        device=target.device,
        cache_dir=target.cache_dir,
        num_threads=target.num_threads or None,
        trust_remote_code=target.trust_remote_code,
    )


def target_tokenizer(settings: Settings) -> "PreTrainedTokenizerBase":
    """Its tokenizer."""
    from eaglefeed.producer.loading import load_tokenizer

    target = settings.target
    return load_tokenizer(target.name, cache_dir=target.cache_dir, trust_remote_code=target.trust_remote_code)
