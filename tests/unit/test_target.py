"""HFEagle3TargetModel on tiny random models of many layouts, against the models' own outputs."""

import json
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from eaglefeed.errors import SchemaError, TargetMismatch
from eaglefeed.producer.probing import decoder_layers
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.refs import FeatureSpec
from eaglefeed.schema.values import validate_eagle3_tensors
from tiny_target import LAYOUTS, Louder, tiny_model, tiny_sizes

AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0]])
LENGTHS = (9, 4)
REAL = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
LOSS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0]])


@pytest.fixture(scope="module", params=LAYOUTS)
def target(request: pytest.FixtureRequest) -> HFEagle3TargetModel:
    torch.set_num_threads(1)
    return HFEagle3TargetModel(tiny_model(LAYOUTS[request.param]()), AUX)


@pytest.fixture(scope="module")
def llama() -> HFEagle3TargetModel:
    torch.set_num_threads(1)
    return HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def alone(target: HFEagle3TargetModel, row: int) -> tuple[Tensor, Tensor]:
    """Aux states and logits of one unpadded row, as the model itself gives them."""
    with torch.no_grad():
        out = target.model(IDS[row : row + 1, : LENGTHS[row]], output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1] for layer in AUX], -1)[0], out.logits[0]


def test_aux_states_are_layer_outputs_and_logits_the_models_own_shifted_by_one(target: HFEagle3TargetModel):
    batch = target.generate_batch(IDS, REAL, LOSS)
    for row, length in enumerate(LENGTHS):
        aux, logits = alone(target, row)
        close(batch.aux_hidden_states[row, :length], aux)
        close(batch.logits[row, : length - 1], logits[1:])
        assert not batch.aux_hidden_states[row, length:].any()
        assert not batch.logits[row, length - 1 :].any()


def test_logits_are_made_in_chunks_wherever_head_scale_and_softcap_make_them(target: HFEagle3TargetModel):
    assert target._head_alone
    louder = Louder(LAYOUTS["llama"]()).eval()
    loud = HFEagle3TargetModel(louder, AUX)
    assert not loud._head_alone
    with torch.no_grad():
        close(loud.generate_batch(IDS, REAL, LOSS).logits[0, :8], louder(IDS[:1]).logits[0, 1:])


def test_lists_inside_a_layer_are_not_taken_for_the_layers():
    layers = nn.ModuleList(nn.Module() for _ in range(3))
    for layer in layers:
        layer.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    backbone = nn.Module()
    backbone.h = layers
    assert decoder_layers(backbone, 3) is layers
    with pytest.raises(TargetMismatch, match="wanted a list of 4"):
        decoder_layers(backbone, 4)


def test_a_second_call_gives_the_same(target: HFEagle3TargetModel):
    first, second = (target.generate_batch(IDS, REAL, LOSS).tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_loss_mask_moves_with_the_ids(llama: HFEagle3TargetModel):
    batch = llama.generate_batch(IDS[:1, :5], torch.ones(1, 5), torch.tensor([[0, 0, 1, 1, 0]]))
    assert batch.input_ids.tolist() == [[9, 33, 2, 60, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1]]
    assert {batch.input_ids.dtype, batch.loss_mask.dtype, batch.attention_mask.dtype} == {torch.int64}


def test_draft_vocabulary_supervision_is_made_of_the_full_logits():
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX)
    full = target.generate_batch(IDS, REAL, LOSS).logits
    best = sorted({int(full[0, row].argmax()) for row in (2, 3)})  # of two supervised positions, so some are in
    ids = torch.tensor(sorted({*best, 0, 1, 17}))
    mask = torch.zeros(64, dtype=torch.bool)
    mask[ids] = True
    target.set_vocab_mapping(ids, mask)
    batch = target.generate_batch(IDS, REAL, LOSS)
    assert batch.logits is None
    assert batch.position_mask.shape == (2, 9, 1)
    for row, length in enumerate(LENGTHS):
        for t in range(9):
            probs = batch.target_probs[row, t]
            if t + 1 < length:
                exps = full[row, t, ids].double().exp()
                close(probs, (exps / exps.sum()).float())
                wanted = bool(LOSS[row, t + 1]) and int(full[row, t].argmax()) in ids
            else:
                assert not probs.any()
                wanted = False
            assert bool(batch.position_mask[row, t, 0]) == wanted
    assert batch.position_mask.any()


def test_long_rows_are_filled_over_more_than_one_chunk(llama: HFEagle3TargetModel, monkeypatch: pytest.MonkeyPatch):
    whole = llama.generate_batch(IDS, REAL, LOSS).logits
    monkeypatch.setattr("eaglefeed.producer.supervision._CHUNK_TOKENS", 3)
    close(llama.generate_batch(IDS, REAL, LOSS).logits, whole)


def test_left_padding_is_moved_to_the_right(target: HFEagle3TargetModel):
    right = target.generate_batch(IDS, REAL, LOSS).tensors()
    moved = [tensor.clone() for tensor in (IDS, REAL, LOSS)]
    for tensor in moved:
        tensor[1] = tensor[1].roll(5)
    left = target.generate_batch(*moved).tensors()
    for name, tensor in right.items():
        close(left[name], tensor)


def test_nothing_of_the_padding_gets_through(llama: HFEagle3TargetModel):
    ids = IDS.clone()
    ids[1, 4:] = 63
    clean, dirty = (llama.generate_batch(value, REAL, LOSS).tensors() for value in (IDS, ids))
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


PACKED = {
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
    "seq_lens": torch.tensor([[5, 4, 0]]),
    "doc_remaining": torch.tensor([[4, 3, 2, 1, 0, 3, 2, 1, 0]]),
}


def test_packed_documents_do_not_see_each_other(target: HFEagle3TargetModel):
    ids = torch.cat([IDS[:1, :5], IDS[1:, :4]], 1)
    other = ids.clone()
    other[0, :5] += 1
    ones = torch.ones_like(ids)
    one, two = (target.generate_batch(value, ones, ones, **PACKED) for value in (ids, other))
    close(one.aux_hidden_states[0, 5:], alone(target, 1)[0])
    close(two.aux_hidden_states[0, 5:], one.aux_hidden_states[0, 5:])
    close(one.logits[0, 5:8], alone(target, 1)[1][1:])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "position_ids",
            torch.arange(9)[None],
            r"position_ids: does not count from 0 in each document, got 5 at \[0, 5\]",
        ),
        ("seq_lens", torch.tensor([[5, 3, 0]]), r"seq_lens: documents do not fill the row of 9, got 8 at \[0\]"),
        ("seq_lens", torch.tensor([[5, 0, 4]]), "seq_lens: a document behind a 0"),
        ("seq_lens", torch.tensor([[10, -1, 0]]), r"seq_lens: not from 0 to 9, got 10 at \[0, 0\]"),
        ("seq_lens", torch.tensor([5, 4]), "packing of other rows"),
        ("seq_lens", torch.zeros(1, 0, dtype=torch.int64), "seq_lens: documents do not fill the row"),
        ("position_ids", torch.arange(9), "packing of other rows"),
        (
            "doc_remaining",
            torch.tensor([[5, 4, 3, 2, 1, 3, 2, 1, 0]]),
            r"doc_remaining: not the number .*5 at \[0, 0\]",
        ),
        ("seq_lens", None, "packing takes all three"),
    ],
)
def test_packing_that_does_not_add_up_is_refused(llama: HFEagle3TargetModel, name: str, value: Any, message: str):
    with pytest.raises(SchemaError, match=message):
        llama.generate_batch(IDS[:1], REAL[:1], LOSS[:1], **(PACKED | {name: value}))


def test_a_model_that_lets_packed_documents_see_each_other_is_refused():
    config = hf.OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=7, num_attention_heads=4)
    config.word_embed_proj_dim, config.max_position_embeddings = 32, 64
    target = HFEagle3TargetModel(tiny_model(config), AUX)
    with pytest.raises(TargetMismatch, match="OPTForCausalLM: the target lets packed documents see each other"):
        target.generate_batch(IDS[:1], REAL[:1], LOSS[:1], **PACKED)


@pytest.mark.parametrize(
    ("ids", "attention", "loss", "message"),
    [
        (IDS, REAL[:, :8], LOSS, "need one shape"),
        (IDS[:0], REAL[:0], LOSS[:0], r"no rows or no tokens, .* got \[0, 9\]"),
        (IDS[:, :0], REAL[:, :0], LOSS[:, :0], r"no rows or no tokens, .* got \[2, 0\]"),
        (IDS + 0.5, REAL, LOSS, "input_ids hold no whole numbers"),
        (IDS, torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1]).expand(2, 9), LOSS, "padding between real tokens"),
        (IDS, REAL * torch.tensor([[1], [0]]), LOSS, "a row without tokens"),
        (IDS, REAL * 2, LOSS, "attention_mask is no mask"),
        (IDS, REAL, LOSS * 3, "loss_mask is no mask"),
        (IDS, REAL, LOSS / 2, "loss_mask is no mask"),
        (IDS + 0.5, REAL, LOSS, "input_ids hold no whole numbers, wanted int64, got torch.float32"),
        (IDS[:, :0], REAL[:, :0], LOSS[:, :0], r"no rows or no tokens, wanted .*, got \[2, 0\]"),
        (IDS[:0], REAL[:0], LOSS[:0], r"no rows or no tokens, wanted .*, got \[0, 9\]"),
        (IDS + 4, REAL, LOSS, "token id outside the target's vocabulary, wanted 0 to 63, got 64"),
        (torch.ones(1, 257), torch.ones(1, 257), torch.ones(1, 257), "row longer than the target's positions"),
    ],
)
def test_rows_the_contract_does_not_allow_are_refused(
    llama: HFEagle3TargetModel, ids: Tensor, attention: Tensor, loss: Tensor, message: str
):
    with pytest.raises(SchemaError, match=message):
        llama.generate_batch(ids, attention, loss)


@pytest.mark.parametrize("layer_ids", [(1, 2), (1, 2, 2), (0, 1, 7), (-1, 1, 2), (1, 2, 3, 4)])
def test_impossible_layer_ids_are_refused_with_what_to_pass(llama: HFEagle3TargetModel, layer_ids: tuple[int, ...]):
    with pytest.raises(SchemaError, match="three distinct aux_layer_ids from 0 to 6"):
        HFEagle3TargetModel(llama.model, layer_ids)


def test_a_shallow_model_needs_explicit_layer_ids():
    model = tiny_model(hf.LlamaConfig(**tiny_sizes(num_hidden_layers=5)))
    with pytest.raises(SchemaError, match=r"for a model of 5 layers.*from 0 to 4"):
        HFEagle3TargetModel(model)
    assert HFEagle3TargetModel(model, (0, 2, 4)).generate_batch(IDS, REAL, LOSS).aux_hidden_states.shape == (2, 9, 96)


def test_the_default_layers_are_the_contracts(llama: HFEagle3TargetModel):
    assert HFEagle3TargetModel(llama.model).aux_layer_ids == (1, 2, 3)


def test_a_vocabulary_map_of_another_target_is_refused(llama: HFEagle3TargetModel):
    mask = torch.zeros(64, dtype=torch.bool)
    mask[[3, 9]] = True
    with pytest.raises(SchemaError, match="another target's"):
        llama.set_vocab_mapping(torch.tensor([3, 9]), mask[:60])
    with pytest.raises(SchemaError, match="inconsistent"):
        llama.set_vocab_mapping(torch.tensor([9, 3]), mask)
    with pytest.raises(SchemaError, match="inconsistent"):
        llama.set_vocab_mapping(torch.tensor([], dtype=torch.int64), mask & False)
    for ids, other in ((torch.tensor([3, 9]), mask.long()), (torch.tensor([3, 9]).int(), mask)):
        with pytest.raises(SchemaError, match=r"not a vocabulary map, wanted ids int64 \[D\], mask bool \[V\]"):
            llama.set_vocab_mapping(ids, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_have_the_models_dtype_and_pass_the_checks(dtype: torch.dtype):
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()).to(dtype), AUX)
    plain = target.generate_batch(IDS, REAL, LOSS)
    target.set_vocab_mapping(torch.arange(0, 64, 2), torch.arange(64) % 2 == 0)
    for batch in (plain, target.generate_batch(IDS, REAL, LOSS)):
        tensors = batch.tensors()
        specs = {name: FeatureSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        assert batch.aux_hidden_states.dtype == dtype
        validate_eagle3_tensors(tensors, specs, sample_id="x", vocab_size=64)


def test_a_result_can_be_trained_on_in_the_same_process(llama: HFEagle3TargetModel):
    batch = llama.generate_batch(IDS, REAL, LOSS)
    weight = torch.ones(96, 1, requires_grad=True)
    (batch.aux_hidden_states @ weight).square().sum().backward()
    assert weight.grad is not None


def test_no_hook_stays_behind(llama: HFEagle3TargetModel):
    llama.generate_batch(IDS, REAL, LOSS)
    assert not any(module._forward_hooks for module in llama._layers)


def test_the_assets_rebuild_the_logits(target: HFEagle3TargetModel):
    tensors, metadata = target.target_assets()
    model = target.model
    with torch.no_grad():
        last = target._backbone(IDS[:1]).last_hidden_state
        logits = last @ tensors["lm_head.weight"].T + tensors.get("lm_head.bias", torch.zeros(64))
        cap = metadata["final_logit_softcapping"]
        logits = torch.tanh(logits / float(cap)) * float(cap) if cap else logits
        logits = logits * float(metadata["logit_scale"] or 1) / float(metadata["logits_scaling"] or 1)
        close(logits, model(IDS[:1]).logits)
    assert tensors["embed_tokens.weight"].shape == (64, 32)
    assert tensors["norm.weight"].shape == (32,)
    assert json.loads(metadata["config"])["model_type"] == model.config.model_type
    assert tensors["lm_head.weight"].data_ptr() != tensors["embed_tokens.weight"].data_ptr()
