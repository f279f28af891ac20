"""Any sample of schema version 2 comes back from its stored form, exactly where that is promised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samples
from eaglefeed.errors import SchemaError
from eaglefeed.schema.eagle3_compact import check_stored_specs, decode_compact, encode_compact
from eaglefeed.schema.refs import DTYPE_BYTES, FeatureSpec

DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
"""Each with the step of its rounding, relative to a value."""
SUPERVISION = ("last_hidden_states", "target_argmax")


@st.composite
def sample(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A sample's features; its aux states may reach over all that a float32 of three digits holds."""
    batch, length, hidden = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    exponents = draw(st.sampled_from([(0, 0), (-6, 4), (-4, 4)]))
    spread = torch.rand(batch, length, 1, generator=generator) * (exponents[1] - exponents[0]) + exponents[0]
    aux = torch.randn(batch, length, 3 * hidden, generator=generator) * 10.0**spread
    aux[torch.rand(batch, length, generator=generator) < 0.2] = 0
    loss_share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    ids = torch.randint(0, 100, (2, batch, length), generator=generator)
    return {
        "aux_hidden_states": aux.clamp(-60000, 60000).to(dtype),
        "input_ids": ids[0],
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "loss_mask": (torch.rand(batch, length, generator=generator) < loss_share).long(),
        "last_hidden_states": torch.randn(batch, length, hidden, generator=generator).to(dtype),
        "target_argmax": ids[1].int(),
    }


@settings(max_examples=100, deadline=None)
@given(features=sample(), fp8_aux=st.booleans(), supervised_rows=st.booleans())
def test_a_sample_comes_back_from_its_stored_form(
    features: dict[str, torch.Tensor], fp8_aux: bool, supervised_rows: bool
) -> None:
    ref = samples.ref(features)
    before = {name: tensor.clone() for name, tensor in features.items()}
    stored = encode_compact(features, fp8_aux=fp8_aux, supervised_rows=supervised_rows)
    check_stored_specs(samples.specs(stored), ref)
    back = decode_compact(stored, ref.feature_specs, sample_id=ref.sample_id)
    assert samples.specs(back) == dict(ref.feature_specs)
    assert all(torch.equal(before[name], features[name]) for name in features)
    keeps = features["loss_mask"].bool() | (not supervised_rows)
    for name, tensor in features.items():
        if name in SUPERVISION:
            assert torch.equal(back[name][keeps], tensor[keeps])
            assert not back[name][~keeps].any()
        elif name == "aux_hidden_states" and fp8_aux:
            check_error(tensor, back[name])
        else:
            assert torch.equal(back[name], tensor)


def check_error(wanted: torch.Tensor, got: torch.Tensor) -> None:
    """The bound that the module states, and the rounding to the decoded dtype."""
    values, error = wanted.double(), (got.double() - wanted.double()).abs()
    scale = values.abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(values.abs() / 16, scale / 1024) * (1 + 1e-6)
    rounding = (values.abs() + bound) * DTYPES[wanted.dtype] + torch.finfo(wanted.dtype).tiny * DTYPES[wanted.dtype]
    assert (error <= bound + rounding).all()
    assert (error <= scale * 16 * (1 + 1e-6) + rounding).all()
    assert not got[(wanted == 0).all(-1)].any()


@settings(max_examples=100, deadline=None)
@given(
    features=sample(),
    forms=st.tuples(st.booleans(), st.booleans()),
    change=st.sampled_from(["dtype", "longer", "rank", "gone", "renamed"]),
    data=st.data(),
)
def test_no_changed_spec_is_taken_for_a_stored_form(
    features: dict[str, torch.Tensor], forms: tuple[bool, bool], change: str, data: st.DataObject
) -> None:
    found = samples.specs(encode_compact(features, fp8_aux=forms[0], supervised_rows=forms[1]))
    name = data.draw(st.sampled_from(sorted(found)))
    spec = found.pop(name)
    if change == "dtype":
        others = [dtype for dtype in DTYPE_BYTES if dtype != spec.dtype]
        found[name] = FeatureSpec(spec.shape, data.draw(st.sampled_from(others)))
    elif change == "longer":
        found[name] = FeatureSpec((spec.shape[0] + 1, *spec.shape[1:]), spec.dtype)
    elif change == "rank":
        found[name] = FeatureSpec((*spec.shape, 1), spec.dtype)
    elif change == "renamed":
        found[f"{name}_"] = spec
    with pytest.raises(SchemaError, match=r"^a-1: "):
        check_stored_specs(found, samples.ref(features))
