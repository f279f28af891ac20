"""The target and the vocabulary map as a command loads them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eaglefeed.producer.engine import Eagle3Target
    from eaglefeed.schema.vocab import VocabMapping

__all__ = ["opened_target", "target_model", "target_tokenizer", "vocabulary_map"]


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


@contextmanager
def opened_target(settings: Settings, *, compact: bool = False) -> Iterator["Eagle3Target"]:
    """The target behind the engine that the settings name; what was started for it ends with the block."""
    from eaglefeed.producer.opening import open_target

    target = settings.target
    opened = open_target(
        target.name,
        engine=target.engine,
        dtype=target.dtype,
        device=target.device,
        aux_layer_ids=target.aux_layer_ids,
        compact=compact,
        tp_size=target.tp_size,
        engine_url=target.engine_url,
        engine_dir=target.engine_dir,
        engine_python=target.engine_python,
        max_length=settings.feed.max_length,
        cache_dir=target.cache_dir,
        num_threads=target.num_threads or None,
        trust_remote_code=target.trust_remote_code,
    )
    with closing(opened):
        yield opened


def target_tokenizer(settings: Settings) -> "PreTrainedTokenizerBase":
    """Its tokenizer."""
    from eaglefeed.producer.loading import load_tokenizer

    target = settings.target
    return load_tokenizer(
        target.name,
        cache_dir=target.cache_dir,
        trust_remote_code=target.trust_remote_code,
        template_values=target.chat_template_kwargs,
        template_date=target.chat_template_date,
    )


def vocabulary_map(settings: Settings) -> "VocabMapping | None":
    """The map that samples are projected with; None for full logits, and for last hidden states without one.

    Raises:
        ConfigError: target_probs without a map.
    """
    produce = settings.produce
    if produce.supervision == "logits" or (produce.supervision == "last_hidden_states" and produce.vocab is None):
        return None
    if produce.vocab is None:
        fix = "make one with `eaglefeed vocab` and pass it with --vocab"
        raise ConfigError("target_probs need a vocabulary map", subject="produce.vocab", fix=fix)
    from eaglefeed.schema.vocab import VocabMapping

    return VocabMapping.load(produce.vocab)
