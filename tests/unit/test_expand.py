"""TargetHead makes of last hidden states what the target itself would have said; dropped rows are never trained on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import draft_samples
import samples
from draft_samples import CONFIG, T2D, make_draft
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.expand import TargetHead, head_of_run
from eaglefeed.consumer.loss import DraftOutput
from eaglefeed.errors import ContractMismatch, SampleCorrupt, SchemaError
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3_compact import decode_compact, encode_compact
from eaglefeed.schema.head import head_digest
from eaglefeed.schema.values import validate_eagle3_tensors
from tiny_target import LAYOUTS, tiny_model

V, D, H = draft_samples.V, draft_samples.D, draft_samples.H
AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0]])
REAL = (torch.arange(9) < torch.tensor([[9], [4]])).long()
LOSS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0]])
MASK_OF_D = torch.arange(64) % 3 != 0
IDS_OF_D = MASK_OF_D.nonzero().flatten()
PACKING = {
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2),
    "seq_lens": torch.tensor([[4, 5], [4, 5]]),
    "doc_remaining": torch.tensor([[3, 2, 1, 0, 4, 3, 2, 1, 0]] * 2),
}

torch.set_num_threads(1)


def assets(layout: str, dtype: torch.dtype = torch.float32) -> tuple[Any, TargetHead]:
    """A model, and the head of its assets."""
    model = tiny_model(LAYOUTS[layout]()).to(dtype)
    if layout == "phi":  # its random bias is zero
        model.lm_head.bias.data.normal_()
    return model, TargetHead(*HFEagle3TargetModel(model, AUX).target_assets(), MASK_OF_D)


def colocated(model: Any) -> tuple[Eagle3TargetBatch, Eagle3TargetBatch]:
    """The same rows with last hidden states, and with the producer's own target_probs."""
    compact, projected = HFEagle3TargetModel(model, AUX, compact=True), HFEagle3TargetModel(model, AUX)
    projected.set_vocab_mapping(IDS_OF_D, MASK_OF_D)
    return compact.generate_batch(IDS, REAL, LOSS), projected.generate_batch(IDS, REAL, LOSS)


def by_hand(model: Any, states: Tensor) -> Tensor:
    """Probabilities of one row's last hidden states [H], in double precision."""
    config, bias = model.config, getattr(model.lm_head, "bias", None)
    logits = model.lm_head.weight.double() @ states.double() + (0 if bias is None else bias.double())
    logits = logits * getattr(config, "logit_scale", 1) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if cap is None else (logits / cap).tanh() * cap
    exps = logits[IDS_OF_D].exp()
    return exps / exps.sum()


@pytest.mark.parametrize("layout", ["llama", "gemma2", "phi", "cohere", "granite"])
def test_it_makes_the_producers_own_target_probs_and_exactly_its_position_mask(layout: str) -> None:
    model, head = assets(layout)
    compact, projected = colocated(model)
    expanded = head.expand(compact.tensors())
    assert list(expanded) == list(projected.tensors())
    assert torch.equal(expanded["position_mask"], projected.position_mask)
    assert expanded["position_mask"].any()
    supervised = projected.loss_mask.bool()
    # The producer multiplies by all V rows of the head, and we by D of them: equal up to rounding alone.
    torch.testing.assert_close(
        expanded["target_probs"][supervised], projected.target_probs[supervised], rtol=1e-5, atol=1e-7
    )
    assert expanded["target_probs"].dtype == projected.target_probs.dtype
    assert not expanded["target_probs"][~supervised].any()
    with torch.no_grad():
        for row, t in supervised.nonzero().tolist():
            wanted = by_hand(model, compact.last_hidden_states[row, t])
            torch.testing.assert_close(expanded["target_probs"][row, t].double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_have_the_dtype_that_the_producers_would_have(dtype: torch.dtype) -> None:
    model, head = assets("gemma2", dtype)
    compact, projected = colocated(model)
    expanded = head.expand(compact.tensors())
    assert expanded["target_probs"].dtype == projected.target_probs.dtype == dtype
    assert torch.equal(expanded["position_mask"], projected.position_mask)
    supervised = projected.loss_mask.bool()
    torch.testing.assert_close(
        expanded["target_probs"][supervised], projected.target_probs[supervised], rtol=2**-6, atol=1e-4
    )


@pytest.mark.parametrize("supervised_rows", [False, True])
def test_streamed_states_expand_to_the_colocated_bits(supervised_rows: bool) -> None:
    model, head = assets("gemma2", torch.bfloat16)
    features = colocated(model)[0].tensors()
    stored = encode_compact(features, fp8_aux=False, supervised_rows=supervised_rows)
    came = decode_compact(stored, samples.specs(features), sample_id="s")
    wanted, got = head.expand(features), head.expand(came)
    assert list(got) == list(wanted)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_chunks_of_rows_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = assets("llama")
    features = colocated(model)[0].tensors()
    whole = head.expand(features)["target_probs"]
    monkeypatch.setattr("eaglefeed.consumer.expand._CHUNK_ROWS", 2)
    torch.testing.assert_close(head.expand(features)["target_probs"], whole, rtol=1e-6, atol=1e-8)


def test_supervised_rows_pass_the_checks_of_probabilities() -> None:
    model, head = assets("llama")
    features = colocated(model)[0].tensors()
    every_row = torch.cat([REAL[:, 1:], torch.zeros(2, 1, dtype=torch.int64)], 1)
    expanded = head.expand(features | {"loss_mask": every_row})
    validate_eagle3_tensors(expanded, samples.specs(expanded), sample_id="s", vocab_size=64)


def tiny_head() -> TargetHead:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(3))
    return TargetHead({"lm_head.weight": weight}, {"config": "{}"}, T2D)


def features(seed: int = 0, *, packed: bool = False) -> dict[str, Tensor]:
    """A draft's batch with last hidden states in every row, also where no loss is."""
    draw = torch.Generator().manual_seed(seed)
    batch = draft_samples.make_batch(seed=seed)
    core = ("aux_hidden_states", "input_ids", "attention_mask")
    found = {name: batch.tensors()[name] for name in core}
    found["loss_mask"] = (torch.rand(2, 9, generator=draw) < 0.7).long()
    found["loss_mask"][:, -1] = 0
    found["last_hidden_states"] = torch.randn(2, 9, H, generator=draw)
    found["target_argmax"] = torch.randint(0, V, (2, 9), generator=draw, dtype=torch.int32)
    return found | (PACKING if packed else {})


def trained(draft: Eagle3Draft, batches: list[dict[str, Tensor]]) -> tuple[list[DraftOutput], list[Tensor]]:
    """What the draft says of batches, and the gradient of their summed loss."""
    draft.zero_grad()
    outputs = [draft(**Eagle3TargetBatch(**batch).to_trainer_inputs()) for batch in batches]
    sum(output.loss_sum for output in outputs).backward()
    return outputs, [parameter.grad.clone() for parameter in draft.parameters()]


def same(one: tuple[list[DraftOutput], list[Tensor]], other: tuple[list[DraftOutput], list[Tensor]]) -> bool:
    numbers = (zip(mine, theirs, strict=True) for mine, theirs in zip(one[0], other[0], strict=True))
    return all(torch.equal(a, b) for pair in numbers for a, b in pair) and all(map(torch.equal, one[1], other[1]))


def with_every_row(batch: dict[str, Tensor], fill: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """An expanded batch, with something in the rows that no loss reads as well."""
    masked = ~batch["loss_mask"].bool()
    probs = batch["target_probs"].clone()
    probs[masked] = fill(probs[masked])
    return batch | {"target_probs": probs}


@pytest.mark.parametrize("ttt_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradients_are_bit_for_bit_equal_with_and_without_dropped_rows(ttt_steps: int, packed: bool) -> None:
    draft, head = make_draft(CONFIG.__class__(**vars(CONFIG) | {"ttt_steps": ttt_steps})), tiny_head()
    whole = [features(seed, packed=packed) for seed in range(3)]
    stored = [encode_compact(each, fp8_aux=False, supervised_rows=True) for each in whole]
    assert all(len(each["target_argmax"]) < 2 * 9 for each in stored)
    came = [decode_compact(each, samples.specs(one), sample_id="s") for each, one in zip(stored, whole, strict=True)]
    wanted = trained(draft, [head.expand(each) for each in whole])
    assert sum(output.num_supervised for output in wanted[0])[-1] > 0
    assert any(gradient.any() for gradient in wanted[1])
    assert same(trained(draft, [head.expand(each) for each in came]), wanted)
    # And expanding masked rows would have changed nothing: not even NaN in them reaches a loss.
    for fill in (lambda rows: torch.rand_like(rows).softmax(-1), lambda rows: torch.full_like(rows, torch.nan)):
        filled = [with_every_row(head.expand(each), fill) for each in came]
        assert same(trained(draft, filled), wanted)


def test_a_row_more_or_less_would_be_noticed() -> None:
    draft, head, one = make_draft(), tiny_head(), features()
    t = int((head.expand(one)["position_mask"][0, :, 0]).nonzero()[0])
    other = {name: tensor.clone() for name, tensor in one.items()}
    other["last_hidden_states"][0, t] *= 2
    assert not same(trained(draft, [head.expand(one)]), trained(draft, [head.expand(other)]))


def test_a_sample_that_supervises_nothing_expands_to_zeros() -> None:
    expanded = tiny_head().expand(features() | {"loss_mask": torch.zeros(2, 9, dtype=torch.int64)})
    assert expanded["target_probs"].shape == (2, 9, D)
    assert not expanded["target_probs"].any()
    assert not expanded["position_mask"].any()


def test_the_last_hidden_states_of_another_head_are_refused_by_their_spec() -> None:
    head = tiny_head()
    head.check(samples.ref(features()))
    narrow = features() | {"last_hidden_states": torch.zeros(2, 9, H - 1)}
    half = features() | {"last_hidden_states": torch.zeros(2, 9, H, dtype=torch.float16)}
    for other in (narrow, half):
        with pytest.raises(SampleCorrupt, match="a-1: not the run's head's last hidden states"):
            head.check(samples.ref(other))


def test_another_targets_vocabulary_map_and_damaged_metadata_are_refused() -> None:
    weight = {"lm_head.weight": torch.zeros(V, H)}
    with pytest.raises(SchemaError, match="the vocabulary map is another target's"):
        TargetHead(weight, {}, T2D[:-1])
    with pytest.raises(SchemaError, match=r"t2d is no mask, wanted bool \[V\], got torch.int64"):
        TargetHead(weight, {}, T2D.long())
    with pytest.raises(SchemaError, match="metadata is damaged"):
        TargetHead(weight, {"logit_scale": "two"}, T2D)


def run_contract(**changes: object) -> RunContract:
    names = (
        "target",
        "target_fingerprint",
        "dtype",
        "vocab_map_digest",
        "tokenizer_fingerprint",
        "template_fingerprint",
    )
    numbers = {"hidden_size": H, "vocab_size": V, "aux_layer_ids": (1, 2, 3), "max_length": 9, "schema_version": 1}
    return RunContract(**dict.fromkeys(names, "x") | numbers | {"supervision": "logits"} | changes)


def test_only_runs_of_last_hidden_states_need_a_head_and_it_must_be_theirs() -> None:
    weight = {"lm_head.weight": torch.ones(V, H)}
    assert head_of_run(run_contract(), weight, {}, T2D) is None
    compact = {"supervision": "last_hidden_states", "schema_version": 2}
    mine = run_contract(**compact, head_digest=head_digest(weight, {}))
    head = head_of_run(mine, weight, {}, T2D)
    assert head is not None
    assert head.vocab_size == V
    for other, metadata in (({"lm_head.weight": torch.zeros(V, H)}, {}), (weight, {"logit_scale": "0.5"})):
        with pytest.raises(ContractMismatch, match="another head than the run's contract says"):
            head_of_run(mine, other, metadata, T2D)
