"""The target and the vocabulary map as a command loads them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eaglefeed.producer.engine import Eagle3Target
    from eaglefeed.schema.vocab import VocabMapping

__all__ = ["compare_target", "opened_target", "target_model", "target_tokenizer", "vocabulary_map"]


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


def vocabulary_map(settings: Settings, fingerprint: str, *, vocab_size: int | None = None) -> "VocabMapping | None":
    """The map that samples are projected with; None for full logits, and for last hidden states without one.

    Raises:
        ConfigError: target_probs without a map.
        SchemaError: it is no map, or one of another tokenizer than that with this fingerprint, or of another V.
    """
    produce = settings.produce
    if produce.supervision == "logits" or (produce.supervision == "last_hidden_states" and produce.vocab is None):
        return None
    if produce.vocab is None:
        fix = "make one with `eaglefeed vocab` and pass it with --vocab"
        raise ConfigError("target_probs need a vocabulary map", subject="produce.vocab", fix=fix)
    from eaglefeed.schema.vocab import VocabMapping

    return VocabMapping.load(produce.vocab, vocab_size=vocab_size).of_tokenizer(fingerprint)


class _Captured(Protocol):
    """How states were captured."""

    @property
    def dtype(self) -> str: ...

    @property
    def aux_layer_ids(self) -> tuple[int, int, int]: ...


def compare_target(settings: Settings, found: _Captured, what: str, fix: str) -> None:
    """Hold what was set of the target against what there is; a default asks for nothing.

    Args:
        settings: the user's.
        found: a contract, or what servers say of themselves.
        what: of the error, where the two differ,
        fix: and how to set the other side, "{}" being the setting.

    Raises:
        ConfigError: they differ.
    """
    for field in settings.target.model_fields_set & {"aux_layer_ids", "dtype"}:
        wanted, got = getattr(settings.target, field), getattr(found, field)
        if wanted is not None and wanted != got:
            fix = f"{fix.format(f'target.{field}={_as_word(wanted)}')}, or leave it out here"
            raise ConfigError(what, subject=f"target.{field}", wanted=_as_word(wanted), got=_as_word(got), fix=fix)


def _as_word(value: "str | tuple[int, ...]") -> str:
    return value if isinstance(value, str) else ",".join(map(str, value))
