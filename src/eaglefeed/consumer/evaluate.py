"""How much a draft helps: acceptance length over prompts, and proof that the answers are the target's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eaglefeed.consumer.decoding import Decoded, Proposer, TargetDecoder, decode, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NUM_DRAFT_TOKENS", "TIE_GAP", "Evaluation", "PromptEvaluation", "evaluate"]

NUM_DRAFT_TOKENS = 4
TIE_GAP = 1e-3
"""Logits closer than this may change places with the order of the sums; such a flip is a tie."""


@dataclass(frozen=True)
class PromptEvaluation:
    """One prompt: its answer, and where it was not the target's best token, by a tie or not at all."""

    decoded: Decoded
    ties: int
    mismatches: int


@dataclass(frozen=True)
class Evaluation:
    """A proposer over all prompts.

    `accept_length` is 1 + num_accepted / num_rounds, what vLLM's log calls the mean acceptance length: tokens that a
    verifying forward gives, its own after the accepted guesses included. The prefill verifies nothing and is no round.
    A forward that had nothing to verify is one here, and not for vLLM; that happens to prompt lookup, never to a draft.
    """

    prompts: tuple[PromptEvaluation, ...]

    @property
    def num_prompts(self) -> int:
        """Prompts that were answered."""
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated, end tokens included."""
        return sum(len(prompt.decoded.token_ids) for prompt in self.prompts)

    @property
    def num_rounds(self) -> int:
        """Verifying forwards, counted for each prompt that was not at its end."""
        return sum(len(prompt.decoded.accepted) for prompt in self.prompts)

    @property
    def num_accepted(self) -> int:
        """Accepted guesses, those beyond the end of an answer included."""
        return sum(sum(prompt.decoded.accepted) for prompt in self.prompts)

    @property
    def accept_length(self) -> float:
        """Tokens a verifying forward; 1.0, as without guesses, where there was none."""
        return 1 + self.num_accepted / max(self.num_rounds, 1)

    @property
    def ties(self) -> int:
        """Tokens that are not the target's best, by less than TIE_GAP."""
        return sum(prompt.ties for prompt in self.prompts)

    @property
    def mismatches(self) -> int:
        """Tokens that are not the target's own; anything but 0 is a fault."""
        return sum(prompt.mismatches for prompt in self.prompts)


def evaluate(
    model: "PreTrainedModel",
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Sequence[int]],
    *,
    aux_layer_ids: Sequence[int],
    max_new_tokens: int,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    batch_size: int = 8,
) -> dict[str, Evaluation]:
    """Answer every prompt with every proposer's help, and check each answer against the target alone.

    Args:
        model: the target, in f32: in less precision its own answers depend on the batch.
        proposers: by name.
        prompts: token ids, the generation prompt included.
        aux_layer_ids: 0-based decoder layers whose outputs the draft reads.
        max_new_tokens: most tokens of an answer.
        num_draft_tokens: guesses a round.
        batch_size: prompts that are decoded side by side; the answers do not depend on it.
    """
    check = _AnswerCheck(model)
    results: dict[str, list[PromptEvaluation]] = {name: [] for name in proposers}
    for start in range(0, len(prompts), batch_size):
        some = prompts[start : start + batch_size]
        for name, proposer in proposers.items():
            decoded = decode(
                TargetDecoder(model, aux_layer_ids, len(some)),
                proposer,
                some,
                end_ids=end_tokens(model),
                max_new_tokens=max_new_tokens,
                num_draft_tokens=num_draft_tokens,
            )
            results[name] += [check(prompt, answer) for prompt, answer in zip(some, decoded, strict=True)]
    return {name: Evaluation(tuple(result)) for name, result in results.items()}


class _AnswerCheck:
    """Compares answers with the target's own greedy choice, in one plain forward over prompt and answer.

    If every token is the best one after those before it, then the answer is the greedy one: no second decoding needed.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}

    def __call__(self, prompt: Sequence[int], decoded: Decoded) -> PromptEvaluation:
        key = (tuple(prompt), decoded.token_ids)
        if key not in self._known:
            self._known[key] = self._faults(*key)
        return PromptEvaluation(decoded, *self._known[key])

    @torch.inference_mode()
    def _faults(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[int, int]:
        ids = torch.tensor([[*prompt, *answer]])
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[
            0, -len(answer) - 1 : -1
        ]
        gaps = logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return int(((gaps > 0) & (gaps < TIE_GAP)).sum()), int((gaps >= TIE_GAP).sum())
