"""How large a target's samples are, known from its configuration alone."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eaglefeed.errors import TargetUnavailable
from eaglefeed.producer.configuration import check_kind, longest_row, max_positions, read_config, size_of, text_config
from eaglefeed.producer.loading import resolve_target
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS
from eaglefeed.schema.refs import DTYPE_BYTES

if TYPE_CHECKING:
    from eaglefeed.schema.prompt import Prompt

__all__ = ["Encoding", "TargetSizes", "sample_bytes", "target_sizes"]


class TargetSizes(NamedTuple):
    """H, V and L of a target, and the longest row it takes (None: unknown)."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_positions: int | None


class Encoding(NamedTuple):
    """How samples are stored: the RunContract's options of these names, and D (of target_probs alone)."""

    supervision: str
    aux_storage: str = "same"
    supervision_rows: str = "all"
    draft_vocab_size: int = 0


def target_sizes(
    name: str, cache_dir: Path | None = None, *, trust_remote_code: bool = False, engine: str = "hf"
) -> TargetSizes:
    """Read a target's configuration, not its weights; the engine that will run it bounds its rows.

    Raises:
        TargetUnavailable: no such target.
        TargetMismatch: one that cannot be a target.
    """
    try:
        config = read_config(resolve_target(name, cache_dir), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        fix = "pass --target with a Hugging Face id or a local folder"
        raise TargetUnavailable("no configuration", subject=name, got=str(error).split("\n")[0], fix=fix) from None
    check_kind(config, name)
    text = text_config(config)
    hidden, vocab, layers = (size_of(text, size) for size in ("hidden_size", "vocab_size", "num_hidden_layers"))
    return TargetSizes(hidden, vocab, layers, longest_row(max_positions(text), engine))


def sample_bytes(prompt: "Prompt", sizes: TargetSizes, encoding: Encoding, *, dtype: str) -> int:
    """Bytes of the tensors that are stored of a prompt.

    Args:
        prompt: the work item.
        sizes: of the target.
        encoding: how its samples are stored.
        dtype: of the target's states and logits.
    """
    positions = len(prompt.rows) * max(len(row.input_ids) for row in prompt.rows)
    aux = NUM_AUX_LAYERS * sizes.hidden_size
    aux_bytes = aux * DTYPE_BYTES[dtype]
    if encoding.aux_storage == "fp8":
        aux_bytes = aux * DTYPE_BYTES["float8_e4m3fn"] + DTYPE_BYTES["float32"]
    rows = positions
    if encoding.supervision_rows == "supervised":
        rows = sum(row.num_supervised for row in prompt.rows)
    integers = 3 * positions
    if prompt.is_packed:
        integers += 2 * positions + len(prompt.rows) * max(len(row.documents) for row in prompt.rows)
    supervision_bytes = rows * _supervision_bytes(sizes, encoding, DTYPE_BYTES[dtype])
    return positions * aux_bytes + integers * DTYPE_BYTES["int64"] + supervision_bytes


def _supervision_bytes(sizes: TargetSizes, encoding: Encoding, itemsize: int) -> int:
    """Bytes of one position's supervision."""
    return {
        "logits": sizes.vocab_size * itemsize,
        "target_probs": encoding.draft_vocab_size * itemsize + DTYPE_BYTES["bool"],
        "last_hidden_states": sizes.hidden_size * itemsize + DTYPE_BYTES["int32"],
    }[encoding.supervision]
