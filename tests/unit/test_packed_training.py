"""Packing from target to draft: documents know nothing of each other, in states, in losses and in gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import samples
from draft_samples import CONFIG, make_batch, make_draft
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.loss import DraftOutput
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.collate import collate
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.schema.values import validate_eagle3_tensors
from tiny_target import LAYOUTS, tiny_model

AUX = (4, 0, 2)
LENGTHS = (5, 2, 7, 1)
EVEN = (torch.arange(0, 64, 2), torch.arange(64) % 2 == 0)

torch.set_num_threads(1)


def document(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def prompt(*rows: tuple[tuple[int, ...], ...], packed: bool = True) -> Prompt:
    """Rows of documents, with loss on every token, the first ones too."""
    made = []
    for row in rows:
        ids = tuple(token for each in row for token in each)
        made.append(PromptRow(ids, (1,) * len(ids), tuple(map(len, row)) if packed else ()))
    return Prompt(sample_id="a", rows=tuple(made), tokenizer_fingerprint="t", template_fingerprint="p", max_length=99)


DOCUMENTS = tuple(document(seed, length) for seed, length in enumerate(LENGTHS))


@pytest.fixture(scope="module", params=LAYOUTS)
def target(request: pytest.FixtureRequest) -> HFEagle3TargetModel:
    return HFEagle3TargetModel(tiny_model(LAYOUTS[request.param]()), AUX)


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_document_changes_no_bit_of_the_others_states(target: HFEagle3TargetModel, changed: int) -> None:
    others = [*DOCUMENTS]
    others[changed] = tuple((token + 7) % 64 for token in DOCUMENTS[changed])
    one, two = (target.generate_batch(**pad_prompt(prompt(tuple(row)))).tensors() for row in (DOCUMENTS, others))
    start = sum(LENGTHS[:changed])
    own = slice(start, start + LENGTHS[changed])
    for name in ("aux_hidden_states", "logits"):
        differs = (one[name] != two[name]).any(-1)[0]
        if "moe" in target.model.config.model_type:  # an expert's product is rounded by how many tokens come to it
            differs = ~one[name].isclose(two[name], rtol=1e-4, atol=1e-5).all(-1)[0]
        shifted = 0 if name == "aux_hidden_states" else 1
        inside = slice(max(own.start - shifted, 0), own.stop - shifted)
        assert differs[inside].any() or own.stop - shifted <= 0
        differs[inside] = False
        assert not differs.any(), name


def test_states_and_supervision_of_packed_documents_are_those_of_each_alone(target: HFEagle3TargetModel) -> None:
    packed = target.generate_batch(**pad_prompt(prompt(DOCUMENTS))).tensors()
    start = 0
    for each in DOCUMENTS:
        alone = target.generate_batch(**pad_prompt(prompt((each,), packed=False))).tensors()
        rows = slice(start, start + len(each))
        torch.testing.assert_close(packed["aux_hidden_states"][:, rows], alone["aux_hidden_states"], rtol=0, atol=2e-5)
        torch.testing.assert_close(packed["logits"][:, rows][:, :-1], alone["logits"][:, :-1], rtol=1e-4, atol=1e-4)
        assert torch.equal(packed["loss_mask"][:, rows], alone["loss_mask"])
        start = rows.stop


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_what_a_target_makes_of_packed_rows_passes_the_checks_of_the_trainer(compact: bool, mapped: bool) -> None:
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX, compact=compact)
    if mapped:
        target.set_vocab_mapping(*EVEN)
    rows = prompt(DOCUMENTS, DOCUMENTS[1:3], DOCUMENTS[:1])
    tensors = target.generate_batch(**pad_prompt(rows)).tensors()
    validate_eagle3_tensors(tensors, samples.specs(tensors), sample_id="a", vocab_size=64)


# losses

DRAFT = DraftConfig(
    hidden_size=32,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=64,
    vocab_size=64,
    draft_vocab_size=32,
    ttt_steps=4,
)


def small_draft(target: HFEagle3TargetModel) -> Eagle3Draft:
    draft = Eagle3Draft(DRAFT)
    weights = {"embed_tokens": target.get_input_embeddings().weight, "lm_head": target.parts.head.weight}
    draft.initialize_from_target(**weights, t2d=EVEN[1])  # type: ignore[arg-type]
    return draft


def learned(draft: Eagle3Draft, batches: list[Eagle3TargetBatch]) -> tuple[DraftOutput, list[Tensor]]:
    """Sums over batches, and the gradient of their loss."""
    draft.zero_grad()
    outputs = [draft(**batch.to_trainer_inputs()) for batch in batches]
    sums = DraftOutput(*(torch.stack(column).sum(0) for column in zip(*outputs, strict=True)))
    sums.loss_sum.backward()
    return sums, [parameter.grad.clone() for parameter in draft.parameters()]


def same(one: tuple[DraftOutput, list[Tensor]], other: tuple[DraftOutput, list[Tensor]]) -> None:
    torch.testing.assert_close(one[0].loss_sum, other[0].loss_sum, rtol=1e-4, atol=1e-4)
    assert torch.equal(one[0].num_supervised, other[0].num_supervised)
    assert torch.equal(one[0].num_correct, other[0].num_correct)
    for got, wanted in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_draft_learns_from_packed_documents_what_it_learns_from_each_alone(mapped: bool) -> None:
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX)
    if mapped:
        target.set_vocab_mapping(*EVEN)
    draft = small_draft(target)
    alone = [target.generate_batch(**pad_prompt(prompt((each,), packed=False))) for each in DOCUMENTS]
    packed = target.generate_batch(**pad_prompt(prompt(DOCUMENTS[:2], DOCUMENTS[2:])))
    wanted = learned(draft, alone)
    assert (wanted[0].num_supervised > 0).all()
    same(learned(draft, [packed]), wanted)
    same(learned(draft, [collate([packed, alone[2]])]), learned(draft, [*alone, alone[2]]))


def packed_batch(**changes: Any) -> Eagle3TargetBatch:
    """Nine positions: documents of four and five."""
    batch, remaining = make_batch(1, 9), torch.tensor([[3, 2, 1, 0, 4, 3, 2, 1, 0]])
    return replace(
        batch,
        loss_mask=(remaining > 0).long(),
        position_mask=(remaining > 0)[..., None],
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
        seq_lens=torch.tensor([[4, 5]]),
        doc_remaining=remaining,
        **changes,
    )


def loss_of(batch: Eagle3TargetBatch, positions: slice) -> Tensor:
    """The loss of some positions' steps: others' `doc_remaining` is 0, so that no step of theirs is supervised."""
    kept = torch.zeros(1, 9, dtype=torch.int64)
    kept[:, positions] = batch.tensors()["doc_remaining"][:, positions]
    draft = make_draft(replace(CONFIG, ttt_steps=6))
    loss: Tensor = draft(**replace(batch, doc_remaining=kept).to_trainer_inputs()).loss_sum
    return loss


@pytest.mark.parametrize(("mine", "other"), [(slice(0, 4), slice(4, 9)), (slice(4, 9), slice(0, 4))])
def test_no_loss_of_a_document_has_a_gradient_at_another_ones_states_at_any_depth(mine: slice, other: slice) -> None:
    aux = make_batch(1, 9).aux_hidden_states.clone().requires_grad_()
    loss_of(packed_batch(aux_hidden_states=aux), mine).backward()
    assert aux.grad is not None
    assert not aux.grad[:, other].any()
    assert aux.grad[:, mine][:, :-1].any(-1).all()


@pytest.mark.parametrize(("mine", "other"), [(slice(0, 4), slice(4, 9)), (slice(4, 9), slice(0, 4))])
def test_no_loss_of_a_document_depends_on_another_ones_tokens_or_supervision(mine: slice, other: slice) -> None:
    batch = packed_batch()
    probs, ids = batch.tensors()["target_probs"].clone(), batch.input_ids.clone()
    # Shifted: row t is token t + 1, so that the row before a document holds its first token.
    elsewhere = [row for row in range(9) if not mine.start <= row < mine.stop - 1]
    probs[:, elsewhere], ids[:, elsewhere] = probs[:, elsewhere].flip(-1), (ids[:, elsewhere] + 1) % CONFIG.vocab_size
    changed = replace(batch, target_probs=probs, input_ids=ids)
    assert loss_of(changed, mine).item() == loss_of(batch, mine).item() != 0
    assert loss_of(changed, other).item() != loss_of(batch, other).item()


def test_each_depth_supervises_one_position_less_of_each_document() -> None:
    output = make_draft(replace(CONFIG, ttt_steps=6))(**packed_batch().to_trainer_inputs())
    assert output.num_supervised.tolist() == [3 + 4, 2 + 3, 1 + 2, 1, 0, 0]
