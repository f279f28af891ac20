"""How large a target's samples are, known from its configuration alone."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eaglefeed.errors import TargetUnavailable
from eaglefeed.producer.loading import resolve_target
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS
from eaglefeed.schema.refs import DTYPE_BYTES

if TYPE_CHECKING:
    from eaglefeed.schema.prompt import Prompt

__all__ = ["TargetSizes", "sample_bytes", "target_sizes"]


class TargetSizes(NamedTuple):
    """H, V and L of a target, and the longest sequence it takes (None: unknown)."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_positions: int | None


def target_sizes(name: str, cache_dir: Path | None = None, *, trust_remote_code: bool = False) -> TargetSizes:
    """Read a target's configuration, not its weights.

    Raises:
        TargetUnavailable: no such target.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve_target(name, cache_dir), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        fix = "pass --target with a Hugging Face id or a local folder"
        raise TargetUnavailable("no configuration", subject=name, got=str(error).split("\n")[0], fix=fix) from None
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    return TargetSizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, longest)


def sample_bytes(prompt: "Prompt", sizes: TargetSizes, *, dtype: str, draft_vocab_size: int | None) -> int:
    """Bytes of the tensors that a prompt becomes.

    Args:
        prompt: the work item.
        sizes: of the target.
        dtype: of the target's states and logits.
        draft_vocab_size: D for target_probs; None for full logits.
    """
    positions = len(prompt.rows) * max(len(row.input_ids) for row in prompt.rows)
    aux = NUM_AUX_LAYERS * sizes.hidden_size * DTYPE_BYTES[dtype]
    ids_and_masks = 3 * DTYPE_BYTES["int64"]
    logits = sizes.vocab_size * DTYPE_BYTES[dtype]
    probs = (draft_vocab_size or 0) * DTYPE_BYTES[dtype] + DTYPE_BYTES["bool"]
    return positions * (aux + ids_and_masks + (logits if draft_vocab_size is None else probs))
