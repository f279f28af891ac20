"""Texts to tokens, no further than they matter: a text of megabytes would take some 250 bytes of memory a character."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

__all__ = ["encode_start"]

_MIN_CHARS = 2**17
_CHARS_A_TOKEN = 32


def encode_start(tokenizer: "PreTrainedTokenizerBase", text: str, max_tokens: int | None) -> "BatchEncoding":
    """Tokenize a text as it is, with each token's place in it.

    Of a text far longer than `max_tokens` tokens take, only a beginning is tokenized. It is at least twice as long as
    those tokens are, so that they are those of the whole text: where it is cut, only tokens nearby change.

    Args:
        tokenizer: a fast one.
        text: of any length.
        max_tokens: tokens that matter; all with None.
    """
    size = len(text) if max_tokens is None else max(_MIN_CHARS, _CHARS_A_TOKEN * max_tokens)
    while True:
        encoded = tokenizer(
            text[:size], add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        places = encoded["offset_mapping"]
        if max_tokens is None or size >= len(text):
            return encoded
        if len(places) > max_tokens and places[max_tokens][1] <= size // 2:
            return encoded
        size *= 2
