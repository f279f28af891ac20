"""Prompt: one tokenized work item of the prompts queue, and its msgpack form. No torch here."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

import msgpack
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from eaglefeed.errors import SchemaError, SchemaVersionError
from eaglefeed.schema.refs import first_fault, safe_sample_id

__all__ = [
    "MAX_PROMPT_BYTES",
    "PACKED_PROMPT_VERSION",
    "PROMPT_VERSION",
    "Prompt",
    "PromptRow",
    "decode_prompt",
    "encode_prompt",
]

PROMPT_VERSION, PACKED_PROMPT_VERSION = 1, 2
MAX_PROMPT_BYTES = 64 * 1024 * 1024
_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class PromptRow:
    """One conversation, or several packed behind each other.

    Args:
        input_ids: token ids.
        loss_mask: 1 where the loss is taken; same length, not shifted.
        documents: tokens of each conversation of a packed row, in order; empty for a row that is not packed.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    documents: tuple[int, ...] = ()

    @property
    def num_supervised(self) -> int:
        """Tokens that are to be predicted; a conversation's first one has nothing before it to be predicted from."""
        firsts = accumulate(self.documents[:-1], initial=0)
        return sum(self.loss_mask) - sum(self.loss_mask[first] for first in firsts)

    def __post_init__(self) -> None:
        """Check the lengths and the values."""
        if len(self.input_ids) != len(self.loss_mask) or not set(self.loss_mask) <= {0, 1}:
            raise ValueError("a row needs a loss mask of 0 and 1, one for each token")
        if not self.input_ids or min(self.input_ids) < 0:
            raise ValueError("a row needs token ids, none of them negative")
        if self.documents and (min(self.documents) < 1 or sum(self.documents) != len(self.input_ids)):
            raise ValueError("a packed row needs documents of at least one token, which fill it")


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class Prompt:
    """What a producer leases: the rows of one sample, and how they were tokenized.

    Args:
        sample_id: id of the sample that will be made of it.
        rows: its conversations; a producer pads them to the longest. All of them are packed, or none.
        tokenizer_fingerprint: digest of the tokenizer.
        template_fingerprint: digest of the chat template and the mask rules.
        max_length: tokens a row was cut to.
    """

    sample_id: Annotated[str, AfterValidator(safe_sample_id)]
    rows: Annotated[tuple[PromptRow, ...], Field(min_length=1)]
    tokenizer_fingerprint: str
    template_fingerprint: str
    max_length: int

    def __post_init__(self) -> None:
        """Check that packed and other rows are not mixed."""
        if len({bool(row.documents) for row in self.rows}) != 1:
            raise ValueError("rows are either all packed, or none is")

    @property
    def is_packed(self) -> bool:
        """Whether its rows hold documents that must not see each other."""
        return bool(self.rows[0].documents)

    @property
    def num_tokens(self) -> int:
        """Real tokens over all rows."""
        return sum(len(row.input_ids) for row in self.rows)


def encode_prompt(prompt: Prompt) -> bytes:
    """The wire form: a msgpack map, the version first, ids as little-endian int32 and masks as bytes.

    Packed rows have a version of their own: a producer that knows no packing must not take them for one conversation.

    Raises:
        SchemaError: it is larger than MAX_PROMPT_BYTES.
    """
    wire = {
        "v": PACKED_PROMPT_VERSION if prompt.is_packed else PROMPT_VERSION,
        "id": prompt.sample_id,
        "rows": [_encode_row(row) for row in prompt.rows],
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
    if version not in (versions := (PROMPT_VERSION, PACKED_PROMPT_VERSION)):
        wanted = " or ".join(map(str, versions))
        raise SchemaVersionError("unknown version of a prompt", wanted=wanted, got=version)
    try:
        rows = tuple(_decode_row(row, is_packed=version == PACKED_PROMPT_VERSION) for row in wire["rows"])
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


def _encode_row(row: PromptRow) -> list[bytes]:
    wire = [array("i", row.input_ids).tobytes(), bytes(row.loss_mask)]
    return [*wire, array("i", row.documents).tobytes()] if row.documents else wire


def _decode_row(wire: Sequence[bytes], *, is_packed: bool) -> PromptRow:
    if not is_packed:
        ids, mask = wire
        return PromptRow(_numbers("i", ids), _numbers("B", mask))
    ids, mask, documents = wire
    if not documents:
        raise ValueError("a packed row without documents")
    return PromptRow(_numbers("i", ids), _numbers("B", mask), _numbers("i", documents))


def _numbers(code: str, data: bytes) -> tuple[int, ...]:
    """Numbers of one of array's type codes; a list in the place of bytes is a TypeError."""
    values = array(code)
    values.frombytes(data)
    return tuple(values)
