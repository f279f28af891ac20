"""A target that runs no model, the run that is made with it, and what is done with its samples.

S sequence · H target hidden size · V target vocabulary, of which the D first are the draft's
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eaglefeed.bench.pipeline_plan import Load
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch, EmbeddingHolder
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3 import EAGLE3_SCHEMA_VERSION
from eaglefeed.schema.prompt import Prompt, PromptRow, encode_prompt
from eaglefeed.schema.values import shift_left
from eaglefeed.storage.shard import digest

__all__ = ["PreparedTarget", "Training", "contract_of", "make_batch", "prompts_of"]

_HEADS, _HEAD_DIM = 9, 64
_NAME = "prepared"


class PreparedTarget(Eagle3TargetBackend):
    """Answers every prompt with copies of the same tensors, as a target's answers have memory of their own."""

    def __init__(self, load: Load) -> None:
        self._batch = make_batch(load)

    def generate_batch(
        self,
        input_ids: Tensor,  # noqa: ARG002
        attention_mask: Tensor,  # noqa: ARG002
        loss_mask: Tensor,  # noqa: ARG002
        position_ids: Tensor | None = None,  # noqa: ARG002
        seq_lens: Tensor | None = None,  # noqa: ARG002
        doc_remaining: Tensor | None = None,  # noqa: ARG002
    ) -> Eagle3TargetBatch:
        """A batch of the load's size, whatever is asked."""
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in self._batch.tensors().items()}
        return replace(self._batch, **copies)

    def get_input_embeddings(self) -> EmbeddingHolder:
        """Nobody asks."""
        raise NotImplementedError

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """The map is made up already."""
        raise NotImplementedError


def make_batch(load: Load) -> Eagle3TargetBatch:
    """Random states and probabilities [1, S, …]; every token but the first is learned."""
    draw = torch.Generator().manual_seed(7)
    dtype = getattr(torch, load.dtype)
    real = torch.ones(1, load.tokens, dtype=torch.int64)
    loss = shift_left(real)
    probs = torch.randn(1, load.tokens, load.draft_vocab, generator=draw).softmax(-1) * loss[..., None]
    return Eagle3TargetBatch(
        aux_hidden_states=torch.randn(1, load.tokens, 3 * load.hidden, generator=draw).to(dtype),
        input_ids=shift_left(_ids(load)),
        attention_mask=real,
        loss_mask=loss,
        target_probs=probs.to(dtype),
        position_mask=loss.bool()[..., None],
    )


def _ids(load: Load) -> Tensor:
    """The tokens of every prompt, [1, S] int64."""
    return torch.randint(load.draft_vocab, (1, load.tokens), generator=torch.Generator().manual_seed(8))


def contract_of(load: Load) -> RunContract:
    """Of a run with PreparedTarget."""
    return RunContract(
        target=_NAME,
        target_fingerprint=_NAME,
        dtype=load.dtype,
        hidden_size=load.hidden,
        vocab_size=load.draft_vocab,
        aux_layer_ids=(0, 1, 2),
        supervision="target_probs",
        vocab_map_digest=_NAME,
        tokenizer_fingerprint=_NAME,
        template_fingerprint=_NAME,
        max_length=load.tokens,
        schema_version=EAGLE3_SCHEMA_VERSION,
    )


def prompts_of(load: Load) -> list[QueueItem]:
    """A prompt for each sample."""
    row = PromptRow(tuple(_ids(load)[0].tolist()), (1,) * load.tokens)
    prompts = [
        Prompt(
            sample_id=f"p-{number}",
            rows=(row,),
            tokenizer_fingerprint=_NAME,
            template_fingerprint=_NAME,
            max_length=load.tokens,
        )
        for number in range(load.num_samples)
    ]
    return [QueueItem(prompt.sample_id, encode_prompt(prompt)) for prompt in prompts]


class Training:
    """What is done with a load's samples: a new draft is trained, or somebody waits."""

    def __init__(self, load: Load) -> None:
        self._step_s = load.step_s
        self._trainer = DraftTrainer(Eagle3Draft(_draft_config(load))) if load.step_s is None else None

    def step(self, batch: Eagle3TargetBatch) -> None:
        """One step."""
        if self._trainer is not None:
            self._trainer.step([batch])
        elif self._step_s:
            SYSTEM_CLOCK.sleep(self._step_s)

    def digest(self) -> str:
        """Of all that was learned."""
        return " ".join(digest(tensor) for tensor in self._trainer.state_tensors().values()) if self._trainer else ""


def _draft_config(load: Load) -> DraftConfig:
    return DraftConfig(
        hidden_size=load.hidden,
        intermediate_size=2 * load.hidden,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=2 * load.tokens,
        vocab_size=load.draft_vocab,
        draft_vocab_size=load.draft_vocab,
    )
