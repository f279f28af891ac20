"""The final norm stands between last states and logits once, wherever a model applies it and however it is stored.

Its weights are around 3, so that it shows where it is left out; and not all the same, so that it shows where it is
applied twice: with equal ones the second time changes nothing.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from eaglefeed.consumer.expand import TargetHead
from eaglefeed.errors import TargetMismatch
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.batch import Eagle3TargetBatch
from tiny_target import LAYOUTS, tiny_model

torch.set_num_threads(1)
AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12]])
ONES = torch.ones_like(IDS)
MASK = torch.arange(64) % 3 != 0
CHOSEN = MASK.nonzero().flatten()


class Outside(hf.LlamaForCausalLM):
    """Its backbone ends before the final norm, which the model applies itself; `times` says how often."""

    times = 1

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        norm, self.model.norm = self.model.norm, nn.Identity()
        try:
            last = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        finally:
            self.model.norm = norm
        for _ in range(self.times):
            last = norm(last)
        return hf.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(last))


def loud(kind: Any = None) -> Any:
    model = tiny_model(LAYOUTS["llama"]())
    model.model.norm.weight.data.copy_(torch.linspace(1, 5, 32))
    if kind is None:
        return model
    other = kind(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other


def wanted_of(model: Any) -> Tensor:
    """The model's own logits, shifted by one."""
    with torch.no_grad():
        return model(input_ids=IDS).logits[:, 1:]


def asked(target: HFEagle3TargetModel) -> Eagle3TargetBatch:
    return target.generate_batch(IDS, ONES, ONES)


def test_logits_and_probabilities_are_those_of_the_models_own_logits() -> None:
    model = loud()
    target, wanted = HFEagle3TargetModel(model, AUX), wanted_of(model)
    logits = asked(target).logits
    assert logits is not None
    assert (logits[:, :-1] - wanted).abs().max() < 1e-4
    target.set_vocab_mapping(CHOSEN, MASK)
    probs = asked(target).target_probs
    assert probs is not None
    assert (probs[:, :-1] - wanted[..., CHOSEN].softmax(-1)).abs().max() < 1e-4


def test_last_hidden_states_are_those_after_the_norm_and_become_the_same_probabilities() -> None:
    model = loud()
    target, wanted = HFEagle3TargetModel(model, AUX, compact=True), wanted_of(model)
    batch = asked(target)
    assert batch.last_hidden_states is not None
    with torch.no_grad():
        logits = model.lm_head(batch.last_hidden_states[:, :-1])
    assert (logits - wanted).abs().max() < 1e-4
    probs = TargetHead(*target.target_assets(), MASK).expand(batch.tensors())["target_probs"]
    assert (probs[:, :-1] - wanted[..., CHOSEN].softmax(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("times", [0, 2])
def test_a_model_whose_logits_are_not_its_backbones_states_through_its_head_gives_its_own_logits(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outside, "times", times)
    model = loud(Outside)
    logits = asked(HFEagle3TargetModel(model, AUX)).logits
    assert logits is not None
    assert (logits[:, :-1] - wanted_of(model)).abs().max() < 1e-4
    assert (wanted_of(model) - wanted_of(loud())).abs().max() > 1
    with pytest.raises(TargetMismatch, match="its logits are more than its head, scale and softcap"):
        HFEagle3TargetModel(model, AUX, compact=True)
