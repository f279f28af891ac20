"""A target's final norm, found by what it does, and undone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eaglefeed.errors import SchemaError
from eaglefeed.interop.norm import Gain

H = 24


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _norm(kind: Callable[..., nn.Module]) -> nn.Module:
    norm = kind(H).requires_grad_(False)
    norm.weight.copy_(_drawn(1, H) * 0.5 + 2)
    if getattr(norm, "bias", None) is not None:
        norm.bias.copy_(_drawn(2, H))
    return norm


KINDS = {"llama": LlamaRMSNorm, "gemma": Gemma2RMSNorm, "layer norm": nn.LayerNorm}


@pytest.fixture(params=KINDS)
def norm(request: pytest.FixtureRequest) -> nn.Module:
    return _norm(KINDS[request.param])


def test_a_gain_tells_what_came_out_of_its_norm_from_what_went_in(norm: nn.Module) -> None:
    gain, states = Gain.of_norm(norm, H, torch.float32), 3 * _drawn(3, 5, H)
    assert gain.is_of(norm(states))
    assert not gain.is_of(states)
    assert gain.is_harmless(states)
    assert not gain.is_harmless(norm(states))
    assert not Gain.of_norm(_norm(KINDS["llama"]), H, torch.float32).is_of(1.3 * norm(states))


def test_what_undo_gives_becomes_the_same_states_in_the_norm(norm: nn.Module) -> None:
    normed = norm(3 * _drawn(3, 5, H))
    undone = Gain.of_norm(norm, H, torch.float32).undo(normed)
    torch.testing.assert_close(undone.square().mean(-1), torch.ones(5), rtol=1e-4, atol=0)
    torch.testing.assert_close(norm(undone), normed, rtol=1e-4, atol=1e-4)


def test_the_gain_of_a_runs_assets_is_the_norms(norm: nn.Module) -> None:
    normed = norm(3 * _drawn(3, 5, H))
    assets = {f"norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    torch.testing.assert_close(
        Gain.of_assets(assets, normed).undo(normed),
        Gain.of_norm(norm, H, torch.float32).undo(normed),
        rtol=1e-4,
        atol=1e-4,
    )


def test_states_of_another_norm_than_the_assets_are_refused(norm: nn.Module) -> None:
    assets = {"norm.weight": 5 * norm.weight}
    with pytest.raises(SchemaError, match="do not come out of the final norm"):
        Gain.of_assets(assets, norm(_drawn(3, 5, H)))
    with pytest.raises(SchemaError, match=r"norm\.weight"):
        Gain.of_assets({}, norm(_drawn(3, 5, H)))


def test_a_norm_that_changes_nothing_may_be_applied_again() -> None:
    plain = LlamaRMSNorm(H).requires_grad_(False)
    states = plain(3 * _drawn(3, 5, H))
    gain = Gain.of_norm(plain, H, torch.float32)
    assert gain.is_of(states)
    assert gain.is_harmless(states)
