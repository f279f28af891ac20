"""What the demo finds out once training is done: equal batches, and how many tokens a verifying forward gives."""

import os
from typing import TYPE_CHECKING, Any

import torch

from eaglefeed.cli.demo_run import DemoInputs
from eaglefeed.cli.train import build_trainer
from eaglefeed.config import Settings
from eaglefeed.consumer.checkpoint import latest_checkpoint, load_checkpoint
from eaglefeed.consumer.evaluate import evaluate
from eaglefeed.consumer.proposers import DraftProposer, PromptLookupProposer
from eaglefeed.consumer.run import load_run_assets
from eaglefeed.producer.chat import parse_chat
from eaglefeed.producer.conversations import read_conversations, to_prompt
from eaglefeed.producer.jsonl import ReadReport, read_rows
from eaglefeed.producer.rendering import render
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.base import FeatureStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["MAX_NEW_TOKENS", "evaluate_drafts", "held_out_prompts", "same_as_colocated"]

_NUM_PROMPTS = 12
MAX_NEW_TOKENS = 48


def same_as_colocated(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    inputs: DemoInputs,
    streamed: list[Eagle3TargetBatch],
    settings: Settings,
) -> bool:
    """Whether the target in this process gives the very bits that came through store and queue."""
    backend = HFEagle3TargetModel(model, settings.target.aux_layer_ids)
    mapping = VocabMapping.load(inputs.vocab)
    backend.set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
    wanted = {batch.sample_ids[0]: batch for batch in streamed}
    rows = read_conversations(inputs.train, tokenizer, ReadReport(), max_length=settings.feed.max_length)
    compared = 0
    for row in rows:
        if row.sample_id not in wanted:
            continue
        prompt = to_prompt([row], tokenizer_fingerprint="", template_fingerprint="", max_length=1)
        colocated, came = backend.generate_batch(**pad_prompt(prompt)).tensors(), wanted[row.sample_id].tensors()
        if list(colocated) != list(came) or not all(torch.equal(colocated[name], came[name]) for name in came):
            return False
        compared += 1
    return compared == len(wanted) > 0


def held_out_prompts(inputs: DemoInputs, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Token ids of the first held-out prompts, ready to be answered."""
    chats = [parse_chat(row.data) for row in read_rows(inputs.held_out, ReadReport())][:_NUM_PROMPTS]
    texts = [render(tokenizer, chat, len(chat.messages) - 1) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def evaluate_drafts(
    model: "PreTrainedModel", prompts: list[list[int]], settings: Settings, store: FeatureStore
) -> dict[str, Any]:
    """Acceptance lengths of the trained draft, the same draft before training, and prompt lookup."""
    torch.set_num_threads(os.cpu_count() or 1)
    assets = load_run_assets(store)
    mapping = VocabMapping.from_ids(assets.tensors["t2d"].nonzero().flatten(), vocab_size=assets.contract.vocab_size)
    untrained, trained = build_trainer(settings, assets), build_trainer(settings, assets)
    load_checkpoint(latest_checkpoint(settings.train_output), trained, contract=assets.contract.id)
    results = evaluate(
        model,
        {
            "accept_length": DraftProposer(trained.draft, mapping.d2t),
            "accept_length_untrained": DraftProposer(untrained.draft, mapping.d2t),
            "accept_length_prompt_lookup": PromptLookupProposer(),
        },
        prompts,
        aux_layer_ids=assets.contract.aux_layer_ids,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    lengths: dict[str, Any] = {name: round(result.accept_length, 4) for name, result in results.items()}
    return lengths | {"mismatches": sum(result.mismatches for result in results.values())}
