"""Who guesses the next tokens: the draft, or a look into the text so far."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglefeed.consumer.decoding import NO_TOKEN, Settled
from eaglefeed.consumer.draft import Eagle3Draft

if TYPE_CHECKING:
    from eaglefeed.consumer.draft_layers import DraftCache

__all__ = ["DraftProposer", "PromptLookupProposer"]


class DraftProposer:
    """A chain of the draft's own best tokens.

    Args:
        draft: trained or not.
        d2t: [D] int64 offsets, target_id = draft_id + d2t[draft_id].
    """

    def __init__(self, draft: Eagle3Draft, d2t: Tensor) -> None:
        self._draft, self._d2t = draft.eval(), d2t
        self._cache: DraftCache = draft.new_cache(0)

    def start(self, batch_size: int) -> None:
        """Forget the prompts before."""
        self._cache = self._draft.new_cache(batch_size)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Sequence[int]], settled: Settled, num_tokens: int) -> Tensor:  # noqa: ARG002
        """[B, num_tokens] target ids; see `Proposer`."""
        states = self._draft.extend(
            settled.next_ids, self._draft.fuse(settled.aux), settled.positions, self._cache, settled.valid
        )
        verified = self._cache.length
        # Where each prompt stands: its valid positions come first.
        at = settled.valid.sum(1, keepdim=True) - 1
        hidden = states.gather(1, at[:, :, None].expand(-1, -1, states.shape[2]))
        positions = settled.positions.gather(1, at)
        tokens = [self._best(hidden)]
        while len(tokens) < num_tokens:
            positions = positions + 1
            hidden = self._draft.extend(tokens[-1], hidden, positions, self._cache)
            tokens.append(self._best(hidden))
        # Its own guesses leave the cache: what is accepted comes again, with the target's states.
        self._cache.crop(verified)
        return torch.cat(tokens, dim=1)

    def _best(self, hidden: Tensor) -> Tensor:
        draft_ids = self._draft.logits(hidden).argmax(-1)
        return draft_ids + self._d2t[draft_ids]


class PromptLookupProposer:
    """Continues as the text did after its last tokens stood there before; the longest match counts, then the latest.

    Args:
        max_ngram: longest match that is looked for.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        self._max_ngram = max_ngram

    def start(self, batch_size: int) -> None:
        """Nothing to forget."""

    def propose(self, contexts: Sequence[Sequence[int]], settled: Settled, num_tokens: int) -> Tensor:  # noqa: ARG002
        """[B, num_tokens] target ids, -1 where nothing was found; see `Proposer`."""
        rows = [self._lookup(context)[:num_tokens] for context in contexts]
        return torch.tensor([[*row, *[NO_TOKEN] * (num_tokens - len(row))] for row in rows])

    def _lookup(self, context: Sequence[int]) -> list[int]:
        ids = list(context)
        for size in range(min(self._max_ngram, len(ids) - 1), 0, -1):
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start : start + size] == ids[-size:]:
                    return ids[start + size :]
        return []
