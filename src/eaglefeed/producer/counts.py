"""What a draft vocabulary is chosen from: the tokens that are trained on, and those that it always or never has."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglefeed.producer.conversations import read_conversations
from eaglefeed.producer.jsonl import MAX_LINE_BYTES, ReadReport
from eaglefeed.producer.loading import resolve_target, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["count_loss_tokens", "stop_token_ids", "unused_token_ids"]


def count_loss_tokens(
    path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    report: ReadReport,
    *,
    max_length: int,
    vocab_size: int,
    max_line_bytes: int = MAX_LINE_BYTES,
    role_aliases: Mapping[str, str] | None = None,
    max_rejected_share: float = 1.0,
) -> Tensor:
    """How often each token id stands at a position with loss, [V] int64; the rest is as for `read_conversations`.

    Raises:
        InputError: see `read_conversations`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    rows = read_conversations(
        path,
        tokenizer,
        report,
        max_length=max_length,
        vocab_size=vocab_size,
        max_line_bytes=max_line_bytes,
        role_aliases=role_aliases,
        max_rejected_share=max_rejected_share,
    )
    for conversation in rows:
        ids, mask = torch.tensor(conversation.input_ids), torch.tensor(conversation.loss_mask, dtype=torch.bool)
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


def stop_token_ids(name: str, cache_dir: Path | None = None, *, trust_remote_code: bool = False) -> list[int]:
    """The ids that a target's configuration ends an answer with; its tokenizer need not call them special.

    Raises:
        TargetUnavailable: no such target.
    """
    from transformers import AutoConfig, GenerationConfig

    source = resolve_target(name, cache_dir)
    with translated(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    try:
        said = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # many targets have no generation_config.json
        said = getattr(config, "eos_token_id", None)
    return said if isinstance(said, list) else [said] if said is not None else []


def unused_token_ids(tokenizer: "PreTrainedTokenizerBase", *, vocab_size: int) -> list[int]:
    """Rows of the target's head that no token has: heads are padded to round sizes."""
    return sorted(set(range(vocab_size)) - set(tokenizer.get_vocab().values()))
