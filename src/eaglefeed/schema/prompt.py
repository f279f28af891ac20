"""Prompt: one tokenized work item of the prompts queue, and its msgpack form. No torch here."""

from array import array
from typing import Annotated

import msgpack
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from eaglefeed.errors import SchemaError, SchemaVersionError
from eaglefeed.schema.refs import first_fault, safe_sample_id

__all__ = ["MAX_PROMPT_BYTES", "PROMPT_VERSION", "Prompt", "PromptRow", "decode_prompt", "encode_prompt"]

PROMPT_VERSION = 1
MAX_PROMPT_BYTES = 64 * 1024 * 1024
_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class PromptRow:
    """One conversation: its token ids, and 1 where the loss is taken (same length, not shifted)."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the lengths and the values."""
        if len(self.input_ids) != len(self.loss_mask) or not set(self.loss_mask) <= {0, 1}:
            raise ValueError("a row needs a loss mask of 0 and 1, one for each token")
        if not self.input_ids or min(self.input_ids) < 0:
            raise ValueError("a row needs token ids, none of them negative")


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Prompt:
    """What a producer leases: the rows of one sample, and how they were tokenized.

    Args:
        sample_id: id of the sample that will be made of it.
        rows: its conversations; a producer pads them to the longest.
        tokenizer_fingerprint: digest of the tokenizer.
        template_fingerprint: digest of the chat template and the mask rules.
        max_length: tokens a row was cut to.
    """

    sample_id: Annotated[str, AfterValidator(safe_sample_id)]
    rows: Annotated[tuple[PromptRow, ...], Field(min_length=1)]
    tokenizer_fingerprint: str
    template_fingerprint: str
    max_length: int

    @property
    def num_tokens(self) -> int:
        """Real tokens over all rows."""
        return sum(len(row.input_ids) for row in self.rows)


def encode_prompt(prompt: Prompt) -> bytes:
    """The wire form: a msgpack map, the version first, ids as little-endian int32 and masks as bytes.

    Raises:
        SchemaError: it is larger than MAX_PROMPT_BYTES.
    """
    wire = {
        "v": PROMPT_VERSION,
        "id": prompt.sample_id,
        "rows": [[array("i", row.input_ids).tobytes(), bytes(row.loss_mask)] for row in prompt.rows],
        "tokenizer": prompt.tokenizer_fingerprint,
        "template": prompt.template_fingerprint,
        "max_length": prompt.max_length,
    }
    data: bytes = msgpack.packb(wire)
    if len(data) > MAX_PROMPT_BYTES:
        fix = "lower feed.max_length or feed.batch_size"
        wanted = f"at most {MAX_PROMPT_BYTES} bytes"
        raise SchemaError("prompt too large", subject=prompt.sample_id, wanted=wanted, got=len(data), fix=fix)
    return data


def decode_prompt(data: bytes) -> Prompt:
    """Read the wire form back.

    Raises:
        SchemaVersionError: another version.
        SchemaError: not a prompt.
    """
    try:
        wire = msgpack.unpackb(data, use_list=False, strict_map_key=True)
        version = wire["v"]
    except (KeyError, TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
        raise SchemaError("not a prompt", got=f"{type(error).__name__}: {error}") from None
    if version != PROMPT_VERSION:
        raise SchemaVersionError("unknown version of a prompt", wanted=PROMPT_VERSION, got=version)
    try:
        rows = tuple(PromptRow(tuple(array("i", ids)), tuple(mask)) for ids, mask in wire["rows"])
        return Prompt(
            sample_id=wire["id"],
            rows=rows,
            tokenizer_fingerprint=wire["tokenizer"],
            template_fingerprint=wire["template"],
            max_length=wire["max_length"],
        )
    except ValidationError as error:
        raise SchemaError("not a prompt", got=first_fault(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError("not a prompt", got=f"{type(error).__name__}: {error}") from None
