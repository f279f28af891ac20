"""What training is worth, checkpoint by checkpoint: acceptance length and accuracy on held-out conversations."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eaglefeed.cli.common import opened_store
from eaglefeed.cli.targets import target_model, target_tokenizer
from eaglefeed.cli.train import build_trainer
from eaglefeed.config import Settings
from eaglefeed.consumer.checkpoint import list_checkpoints, load_checkpoint, step_of
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.evaluate import Evaluation, evaluate
from eaglefeed.consumer.proposers import DraftProposer, PromptLookupProposer
from eaglefeed.consumer.run import RunAssets, load_run_assets
from eaglefeed.producer.chat import parse_chat
from eaglefeed.producer.conversations import Conversation, read_conversations, to_prompt
from eaglefeed.producer.jsonl import ReadReport, read_rows
from eaglefeed.producer.rendering import render
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.vocab import VocabMapping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HeldOut", "measure_checkpoints", "report_on"]

_LOOKUP = "prompt_lookup"
_BATCH_SIZE = 32


class HeldOut(NamedTuple):
    """Conversations that were not trained on: ids, the prompts' token ids, and the whole ones."""

    sample_ids: list[str]
    prompts: list[list[int]]
    conversations: list[Conversation]


def measure_checkpoints(settings: Settings, held_out: Path, *, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Decode held-out prompts with every checkpoint that is kept, with the draft before training, and by prompt lookup.

    Args:
        settings: of the run that was trained; the target is loaded in float32.
        held_out: JSONL with the target's answers; its first conversations are taken.
        num_prompts: how many.
        max_new_tokens: most tokens of an answer.

    Returns:
        `curve`: a row a checkpoint with its step, accept_length and accuracies by depth (of the positions whose best
        token the draft vocabulary holds); `accept_length` of the last and `prompt_lookup`, each for all prompts and
        for each kind of them (the ids' first words); `mismatches` with the target's own answers.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    exact = settings.target.model_copy(update={"dtype": "float32", "num_threads": 0})
    settings = settings.model_copy(update={"target": exact})
    model, found = target_model(settings), _held_out(settings, held_out, num_prompts)
    with opened_store(settings) as store:
        assets = load_run_assets(store)
    mapping = VocabMapping.from_ids(assets.tensors["t2d"].nonzero().flatten(), vocab_size=assets.contract.vocab_size)
    drafts = _kept_drafts(settings, assets)
    results = evaluate(
        model,
        {str(step): DraftProposer(draft, mapping.d2t) for step, draft in drafts.items()}
        | {_LOOKUP: PromptLookupProposer()},
        found.prompts,
        aux_layer_ids=assets.contract.aux_layer_ids,
        max_new_tokens=max_new_tokens,
        batch_size=_BATCH_SIZE,
    )
    accuracies = _accuracies(model, drafts, mapping, assets, found)
    return report_on(results, accuracies, found)


def _held_out(settings: Settings, path: Path, num_prompts: int) -> HeldOut:
    tokenizer = target_tokenizer(settings)
    chats = [parse_chat(row.data) for row in read_rows(path, ReadReport())][:num_prompts]
    texts = [render(tokenizer, chat, len(chat.messages) - 1) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = list(read_conversations(path, tokenizer, ReadReport(), max_length=settings.feed.max_length))
    return HeldOut([chat.sample_id for chat in chats], prompts, rows[:num_prompts])


def _kept_drafts(settings: Settings, assets: RunAssets) -> dict[int, Eagle3Draft]:
    """Step → draft, from the untrained one on."""
    drafts = {0: build_trainer(settings, assets).draft}
    for path in list_checkpoints(settings.train_output):
        trainer = build_trainer(settings, assets)
        load_checkpoint(path, trainer, contract=assets.contract.id)
        drafts[step_of(path)] = trainer.draft
    return drafts


@torch.inference_mode()
def _accuracies(
    model: "PreTrainedModel",
    drafts: Mapping[int, Eagle3Draft],
    mapping: VocabMapping,
    assets: RunAssets,
    found: HeldOut,
) -> dict[int, list[float]]:
    backend = HFEagle3TargetModel(model, assets.contract.aux_layer_ids)
    backend.set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
    sums: dict[int, Tensor] = {}
    for row in found.conversations:
        prompt = to_prompt([row], tokenizer_fingerprint="", template_fingerprint="", max_length=len(row.input_ids))
        inputs = backend.generate_batch(**pad_prompt(prompt)).to_trainer_inputs()
        for step, draft in drafts.items():
            output = draft(**inputs)
            sums[step] = sums.get(step, 0) + torch.stack([output.num_correct, output.num_supervised])
    return {step: (right / total.clamp(min=1)).tolist() for step, (right, total) in sums.items()}


def report_on(
    results: Mapping[str, Evaluation], accuracies: Mapping[int, list[float]], found: HeldOut
) -> dict[str, Any]:
    """What `measure_checkpoints` returns, of evaluations by step and "prompt_lookup" and accuracies by step."""
    curve = [
        {
            "step": step,
            "accept_length": round(results[str(step)].accept_length, 4),
            "accuracies": [round(accuracy, 4) for accuracy in accuracies[step]],
        }
        for step in sorted(accuracies)
    ]
    return {
        "num_prompts": len(found.prompts),
        "accept_length": _by_kind(results[str(curve[-1]["step"])], found.sample_ids),
        _LOOKUP: _by_kind(results[_LOOKUP], found.sample_ids),
        "curve": curve,
        "mismatches": sum(result.mismatches for result in results.values()),
    }


def _by_kind(result: Evaluation, sample_ids: list[str]) -> dict[str, float]:
    """Kind → acceptance length; "all" is that of all prompts together."""
    groups = {"all": list(result.prompts)}
    for sample_id, prompt in zip(sample_ids, result.prompts, strict=True):
        groups.setdefault(sample_id.replace("-", ".").split(".")[0], []).append(prompt)
    return {kind: round(Evaluation(tuple(prompts)).accept_length, 4) for kind, prompts in groups.items()}
