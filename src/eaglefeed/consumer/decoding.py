"""Greedy speculative decoding of several prompts side by side.

B prompts · n tokens of a forward · V target vocabulary · H target hidden size · T cached slots

Prompts accept different numbers of tokens a round. Their rejected and padded slots stay in the cache as holes that the
attention mask hides, and position ids say where each token really stands; so a round is one forward for all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from eaglefeed.errors import TargetMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Decoded", "Proposer", "Settled", "TargetDecoder", "decode", "end_tokens"]

NO_TOKEN = -1
"""Stands in a proposal where there is none: no target ever agrees with it."""


class Settled(NamedTuple):
    """What a forward of the target settled: n positions a prompt, some of them padding.

    Args:
        next_ids: [B, n] the token that follows each position.
        aux: [B, n, 3H] aux hidden states there.
        positions: [B, n].
        valid: [B, n] bool, false where a draft token was rejected, or nothing stands.
    """

    next_ids: Tensor
    aux: Tensor
    positions: Tensor
    valid: Tensor


class Proposer(Protocol):
    """Guesses what the target will say next."""

    def start(self, batch_size: int) -> None:
        """Forget the prompts before."""
        ...

    def propose(self, contexts: Sequence[Sequence[int]], settled: Settled, num_tokens: int) -> Tensor:
        """Guess the next tokens.

        Args:
            contexts: each prompt's ids, with all that was generated.
            settled: what the last forward added to them.
            num_tokens: how many to guess.

        Returns:
            [B, num_tokens] target ids, -1 for no guess.
        """
        ...


@dataclass(frozen=True)
class Decoded:
    """One prompt's answer.

    Args:
        token_ids: what was generated, up to and with the end token.
        accepted: guesses that each verifying forward accepted, those of the last one that lie beyond the answer's end
            as well, for servers count them too. The prefill verifies nothing.
    """

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]


class TargetDecoder:
    """The target with its cache, over a fixed set of prompts.

    Args:
        model: a Hugging Face causal language model.
        aux_layer_ids: 0-based decoder layers whose outputs are taken, in this order.
    """

    def __init__(self, model: "PreTrainedModel", aux_layer_ids: Sequence[int], batch_size: int) -> None:
        from transformers import DynamicCache

        self._model, self._aux_layer_ids = model, aux_layer_ids
        # transformers 5.24 renamed the argument, and warns where the old name is used.
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self._cache = {name: DynamicCache(config=model.config)}
        self._mask = torch.zeros(batch_size, 0, dtype=torch.long)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Run n more tokens a prompt.

        Args:
            input_ids: [B, n].
            positions: [B, n] where they stand.
            valid: [B, n] bool, false for padding.

        Returns:
            The target's best next tokens [B, n], and aux hidden states [B, n, 3H].
        """
        self._mask = torch.cat([self._mask, valid.long()], dim=1)
        with aux_outputs(self._model, self._aux_layer_ids) as outputs:
            logits = self._model(
                input_ids=input_ids,
                attention_mask=self._mask,
                position_ids=positions,
                use_cache=True,
                **self._cache,
            ).logits
        return logits.argmax(-1), torch.cat([outputs[layer] for layer in self._aux_layer_ids], dim=-1)

    def hide(self, rejected: Tensor) -> None:
        """Never look again at those of the last forward's slots that are true in `rejected` [B, n]."""
        self._mask[:, -rejected.shape[1] :].masked_fill_(rejected, 0)


@torch.inference_mode()
def decode(
    target: TargetDecoder,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: frozenset[int],
    max_new_tokens: int,
    num_draft_tokens: int,
) -> list[Decoded]:
    """Let the target answer, with a proposer's help; the answers are the target's own greedy ones.

    Args:
        target: fresh, of as many prompts.
        proposer: whose guesses are verified.
        prompts: token ids, at least one each.
        end_ids: tokens that end an answer.
        max_new_tokens: most tokens of an answer.
        num_draft_tokens: guesses a round.
    """
    proposer.start(len(prompts))
    answers = [_Answer(list(prompt), end_ids, max_new_tokens) for prompt in prompts]
    settled = _prefill(target, answers)
    while not all(answer.done for answer in answers):
        guesses = proposer.propose([answer.ids for answer in answers], settled, num_draft_tokens)
        settled = _verify(target, answers, guesses)
    return [Decoded(tuple(answer.generated), tuple(answer.accepted)) for answer in answers]


class _Answer:
    """A prompt and its answer so far."""

    def __init__(self, ids: list[int], end_ids: frozenset[int], max_new_tokens: int) -> None:
        self.ids, self.prompt_length = ids, len(ids)
        self.end_ids, self.max_new_tokens = end_ids, max_new_tokens
        self.accepted: list[int] = []

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.max_new_tokens or (bool(self.generated) and self.ids[-1] in self.end_ids)

    def add(self, tokens: list[int]) -> None:
        """Take a forward's tokens, up to the end token and the limit."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.end_ids), len(tokens))
        self.ids += tokens[: min(end, self.max_new_tokens - len(self.generated))]

    def add_round(self, tokens: list[int], num_accepted: int) -> None:
        """Take a verifying forward's accepted guesses and its own token; nothing once it is done."""
        if not self.done:
            self.accepted.append(num_accepted)
            self.add(tokens[: num_accepted + 1])


def _prefill(target: TargetDecoder, answers: Sequence[_Answer]) -> Settled:
    lengths = torch.tensor([len(answer.ids) for answer in answers])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(answer.ids) for answer in answers], batch_first=True)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    valid = positions < lengths[:, None]
    best, aux = target.forward(ids, positions, valid)
    first = best.gather(1, lengths[:, None] - 1)
    for answer, token in zip(answers, first[:, 0].tolist(), strict=True):
        answer.add([token])
    next_ids = ids.roll(-1, dims=1).scatter(1, lengths[:, None] - 1, first)
    return Settled(next_ids, aux, positions, valid)


def _verify(target: TargetDecoder, answers: Sequence[_Answer], guesses: Tensor) -> Settled:
    """One forward over the last token and the guesses; the leading guesses that the target shares are accepted."""
    last = torch.tensor([[answer.ids[-1]] for answer in answers])
    steps = torch.arange(guesses.shape[1] + 1)
    # A finished answer runs along, and nothing of it is kept.
    positions = torch.tensor([[len(answer.ids) - 1] for answer in answers]) + steps
    ids = torch.cat([last, guesses.clamp(min=0)], dim=1)
    best, aux = target.forward(ids, positions, torch.ones_like(ids, dtype=torch.bool))
    num_accepted = (guesses == best[:, :-1]).long().cumprod(1).sum(1)
    valid = steps <= num_accepted[:, None]
    target.hide(~valid)
    for answer, tokens, count in zip(answers, best.tolist(), num_accepted.tolist(), strict=True):
        answer.add_round(tokens, count)
    return Settled(best, aux, positions, valid)


@contextmanager
def aux_outputs(model: "PreTrainedModel", layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect what the decoder layers `layer_ids` put out while the block runs."""
    layers, outputs = _decoder_layers(model), dict[int, Tensor]()

    def keep(layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
            outputs[layer_id] = output[0] if isinstance(output, tuple | list) else output

        return hook

    handles = [layers[layer_id].register_forward_hook(keep(layer_id)) for layer_id in layer_ids]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    wanted = model.config.get_text_config().num_hidden_layers
    # The decoder first: what sees images may have as many layers.
    parts = (part for part in (model.get_decoder(), model) if isinstance(part, nn.Module))
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise TargetMismatch("no list of decoder layers found", subject=type(model).__name__, wanted=f"{wanted} layers")


def end_tokens(model: "PreTrainedModel") -> frozenset[int]:
    """Every end token of the generation config, or else of the config."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()
