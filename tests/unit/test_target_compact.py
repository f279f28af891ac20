"""Supervision by last hidden states: what the target gives, and which targets cannot give it."""

import pytest
import torch

from eaglefeed.errors import TargetMismatch
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.head import LogitRule, head_digest
from eaglefeed.schema.refs import FeatureSpec
from eaglefeed.schema.values import validate_eagle3_tensors
from tiny_target import LAYOUTS, Louder, tiny_model

AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0]])
LENGTHS = (9, 4)
REAL = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
LOSS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0]])


@pytest.fixture(scope="module", params=LAYOUTS)
def target(request: pytest.FixtureRequest) -> HFEagle3TargetModel:
    torch.set_num_threads(1)
    return HFEagle3TargetModel(tiny_model(LAYOUTS[request.param]()), AUX, compact=True)


@pytest.fixture(scope="module")
def llama() -> HFEagle3TargetModel:
    torch.set_num_threads(1)
    return HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), AUX, compact=True)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_it_is_what_the_head_reads_and_the_best_of_all_tokens(target: HFEagle3TargetModel):
    batch = target.generate_batch(IDS, REAL, LOSS)
    assert list(batch.tensors())[-2:] == ["last_hidden_states", "target_argmax"]
    assert (batch.target_argmax.dtype, batch.target_argmax.shape) == (torch.int32, (2, 9))
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            out = target.model(IDS[row : row + 1, :length], output_hidden_states=True)
        close(batch.last_hidden_states[row, : length - 1], out.hidden_states[-1][0, 1:])
        assert batch.target_argmax[row, : length - 1].tolist() == out.logits[0, 1:].argmax(-1).tolist()
        assert not batch.last_hidden_states[row, length - 1 :].any()
        assert not batch.target_argmax[row, length - 1 :].any()


def test_the_rest_of_a_batch_is_as_with_other_supervision(llama: HFEagle3TargetModel):
    batch = llama.generate_batch(IDS, REAL, LOSS).tensors()
    other = HFEagle3TargetModel(llama.model, AUX).generate_batch(IDS, REAL, LOSS).tensors()
    assert all(torch.equal(batch[name], other[name]) for name in other if name != "logits")


def test_long_rows_are_read_over_more_than_one_chunk(llama: HFEagle3TargetModel, monkeypatch: pytest.MonkeyPatch):
    whole = llama.generate_batch(IDS, REAL, LOSS)
    monkeypatch.setattr("eaglefeed.producer.supervision._CHUNK_TOKENS", 3)
    assert torch.equal(llama.generate_batch(IDS, REAL, LOSS).target_argmax, whole.target_argmax)


def test_it_is_the_same_for_any_vocabulary_map(llama: HFEagle3TargetModel):
    before = llama.generate_batch(IDS, REAL, LOSS).tensors()
    llama.set_vocab_mapping(torch.tensor([3]), torch.arange(64) == 3)
    after = llama.generate_batch(IDS, REAL, LOSS).tensors()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_has_the_models_dtype_and_passes_the_checks(dtype: torch.dtype):
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()).to(dtype), AUX, compact=True)
    tensors = target.generate_batch(IDS, REAL, LOSS).tensors()
    assert tensors["last_hidden_states"].dtype == dtype
    specs = {name: FeatureSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    validate_eagle3_tensors(tensors, specs, sample_id="x", vocab_size=64)


def test_a_target_whose_logits_are_more_than_its_head_is_refused():
    with pytest.raises(TargetMismatch, match=r"Louder: its logits are more than its head.*supervision=target_probs"):
        HFEagle3TargetModel(Louder(LAYOUTS["llama"]()).eval(), AUX, compact=True)


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": "2.0"}),
        ("cohere", {"logit_scale": "0.25"}),
        ("granite", {"logits_scaling": "3.0"}),
    ],
)
def test_the_assets_say_what_is_done_to_the_heads_outputs(layout: str, numbers: dict[str, str]):
    _, metadata = HFEagle3TargetModel(tiny_model(LAYOUTS[layout]()), AUX).target_assets()
    assert {name: text for name, text in metadata.items() if name != "config" and text} == numbers
    assert LogitRule.from_metadata(metadata).metadata() == {
        name: metadata[name] for name in metadata if name != "config"
    }


def test_a_heads_digest_is_of_its_weight_its_bias_and_its_numbers():
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["phi"]()), AUX)
    tensors, metadata = target.target_assets()
    first = target.head_digest()
    assert head_digest(tensors, metadata) == first
    assert head_digest({name: t for name, t in tensors.items() if "embed" not in name}, metadata) == first
    for name in ("lm_head.weight", "lm_head.bias"):
        assert head_digest(tensors | {name: tensors[name] + 1}, metadata) != first
        assert head_digest({key: t for key, t in tensors.items() if key != name}, metadata) != first
    for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"):
        assert head_digest(tensors, metadata | {name: "2.0"}) != first
