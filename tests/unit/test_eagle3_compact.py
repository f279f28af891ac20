"""Schema version 2: what is legal, what is stored of it, and how far fp8 is from the truth."""

from bisect import bisect_left
from dataclasses import replace

import pytest
import torch

import samples
from eaglefeed.errors import SampleCorrupt, SchemaError, SchemaVersionError
from eaglefeed.schema import eagle3_compact as compact
from eaglefeed.schema.eagle3 import validate_eagle3_ref
from eaglefeed.schema.eagle3_compact import (
    check_stored_specs,
    decode_compact,
    decode_stored,
    encode_compact,
    stored_form,
    stored_specs,
    validate_any_ref,
    validate_eagle3_compact_ref,
    validate_ref,
)
from eaglefeed.schema.refs import FeatureSpec, SampleRef, decode_ref, encode_ref

B, S, H = 2, 6, samples.H
SUPERVISED = 8  # of samples.tensors: rows 1 to 4 of both
E4M3 = sorted(
    {
        sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        for sign in (1, -1)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)


def features() -> dict[str, torch.Tensor]:
    return samples.tensors(supervision="last_hidden_states")


def ref(**changes: object) -> SampleRef:
    return samples.ref(features(), **changes)


def changed(name: str, spec: FeatureSpec | None) -> SampleRef:
    specs = {key: value for key, value in (samples.specs(features()) | {name: spec}).items() if value is not None}
    sizes = sum(each.num_bytes for each in specs.values())
    return ref(feature_specs=specs, feature_keys=dict.fromkeys(specs, "k"), estimated_bytes=sizes)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """What comes back of aux states [B, S, 3H] that were stored in fp8."""
    whole = {"aux_hidden_states": values, "last_hidden_states": values}
    stored = encode_compact(whole, fp8_aux=True, supervised_rows=False)
    return decode_compact(stored, samples.specs(whole), sample_id="s")["aux_hidden_states"]


def test_the_names_are_the_contracts() -> None:
    assert compact.EAGLE3_COMPACT_SCHEMA_VERSION == 2
    assert compact.EAGLE3_COMPACT_SUPERVISION == ("last_hidden_states", "target_argmax")
    core = ["aux_hidden_states", "input_ids", "attention_mask", "loss_mask"]
    packing = ["position_ids", "seq_lens", "doc_remaining"]
    assert list(compact.EAGLE3_COMPACT_FEATURES) == [*core, *compact.EAGLE3_COMPACT_SUPERVISION, *packing]


def test_a_ref_of_version_2_is_valid_and_survives_its_wire_form() -> None:
    checksums = dict.fromkeys((*ref().feature_specs, "aux_scale"), "0" * 32)
    for each in (ref(checksums=checksums), ref()):
        validate_eagle3_compact_ref(each)
        assert decode_ref(encode_ref(each)) == each


def test_each_version_refuses_the_other() -> None:
    one, two = samples.ref(), ref()
    validate_ref(one, 1)
    validate_ref(two, 2)
    for check, wrong in ((validate_eagle3_ref, two), (validate_eagle3_compact_ref, one)):
        with pytest.raises(SchemaVersionError):
            check(wrong)
    for wrong, version in ((one, 2), (two, 1), (one, 3)):
        with pytest.raises(SchemaVersionError):
            validate_ref(wrong, version)


def test_a_tool_takes_every_version_that_is_known() -> None:
    for each in (samples.ref(), ref()):
        validate_any_ref(each)
    with pytest.raises(SchemaVersionError, match="wanted 1 or 2, got 3"):
        validate_any_ref(ref(schema_version=3))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("last_hidden_states", None),
        ("target_argmax", None),
        ("loss_mask", None),
        ("logits", FeatureSpec((B, S, samples.V), "float32")),
        ("aux_scale", FeatureSpec((B, S, 1), "float32")),  # stored, but no feature
        ("target_argmax", FeatureSpec((B, S), "int64")),
        ("target_argmax", FeatureSpec((B, S, 1), "int32")),
        ("target_argmax", FeatureSpec((SUPERVISED,), "int32")),  # a stored form, not a decoded one
        ("last_hidden_states", FeatureSpec((B, S, H + 1), "bfloat16")),  # not a third of the aux states
        ("last_hidden_states", FeatureSpec((B, S + 1, H), "bfloat16")),
        ("last_hidden_states", FeatureSpec((B, S, H), "float8_e4m3fn")),
        ("aux_hidden_states", FeatureSpec((B, S, 3 * H), "float8_e4m3fn")),
        ("position_ids", FeatureSpec((B, S), "int64")),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(name: str, spec: FeatureSpec | None) -> None:
    with pytest.raises(SchemaError):
        validate_eagle3_compact_ref(changed(name, spec))


def test_version_1_specs_under_version_2_are_refused() -> None:
    with pytest.raises(SchemaError, match="unknown features"):
        validate_eagle3_compact_ref(samples.ref(schema_version=2))


@pytest.mark.parametrize("fp8_aux", [False, True])
@pytest.mark.parametrize("supervised_rows", [False, True])
def test_what_is_encoded_is_legal_and_has_the_promised_specs(fp8_aux: bool, supervised_rows: bool) -> None:
    stored = encode_compact(features(), fp8_aux=fp8_aux, supervised_rows=supervised_rows)
    found = samples.specs(stored)
    check_stored_specs(found, ref())
    num_rows = SUPERVISED if supervised_rows else None
    assert found == stored_specs(ref().feature_specs, fp8_aux=fp8_aux, num_rows=num_rows)
    assert ("aux_scale" in found, len(found["target_argmax"].shape) == 1) == (fp8_aux, supervised_rows)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("aux_hidden_states", FeatureSpec((B, S, 3 * H), "float8_e5m2"), "aux_hidden_states is stored"),
        ("aux_hidden_states", FeatureSpec((B, S, 3 * H), "bfloat16"), "aux_hidden_states is stored"),
        ("aux_scale", FeatureSpec((B, S), "float32"), "aux_scale is stored"),
        ("aux_scale", FeatureSpec((B, S, 1), "float16"), "aux_scale is stored"),
        ("aux_scale", None, "aux_hidden_states is stored"),
        ("last_hidden_states", FeatureSpec((SUPERVISED - 1, H), "bfloat16"), "target_argmax is stored"),
        ("last_hidden_states", FeatureSpec((B * S + 1, H), "bfloat16"), "last_hidden_states has too many rows"),
        ("last_hidden_states", FeatureSpec((SUPERVISED, H + 1), "bfloat16"), "last_hidden_states is stored"),
        ("last_hidden_states", FeatureSpec((SUPERVISED, H), "float16"), "last_hidden_states is stored"),
        ("last_hidden_states", FeatureSpec((B, S, H), "bfloat16"), "target_argmax is stored"),
        ("last_hidden_states", FeatureSpec((SUPERVISED * H,), "bfloat16"), "last_hidden_states is stored"),
        ("last_hidden_states", None, "other stored tensors"),
        ("target_argmax", FeatureSpec((B, S), "int32"), "target_argmax is stored"),
        ("target_argmax", FeatureSpec((SUPERVISED,), "int64"), "target_argmax is stored"),
        ("loss_mask", FeatureSpec((SUPERVISED,), "int64"), "loss_mask is stored"),
        ("extra", FeatureSpec((1,), "int64"), "other stored tensors"),
    ],
)
def test_a_stored_form_that_is_not_legal_is_refused_by_name(name: str, spec: FeatureSpec | None, message: str) -> None:
    found = samples.specs(encode_compact(features(), fp8_aux=True, supervised_rows=True)) | {name: spec}
    with pytest.raises(SchemaError, match=f"a-1: {message}"):
        check_stored_specs({key: value for key, value in found.items() if value is not None}, ref())


def test_rows_without_loss_are_dropped_and_come_back_as_zeros() -> None:
    whole = features()
    stored = encode_compact(whole, fp8_aux=False, supervised_rows=True)
    assert stored["target_argmax"].tolist() == [*whole["target_argmax"][0, 1:5], *whole["target_argmax"][1, 1:5]]
    assert torch.equal(stored["last_hidden_states"][4], whole["last_hidden_states"][1, 1])
    back = decode_compact(stored, ref().feature_specs, sample_id="s")
    assert list(back) == list(whole)
    for name in compact.EAGLE3_COMPACT_SUPERVISION:
        assert torch.equal(back[name][:, 1:5], whole[name][:, 1:5])
        assert not back[name][:, [0, 5]].any()
    rest = (name for name in whole if name not in compact.EAGLE3_COMPACT_SUPERVISION)
    assert all(back[name] is whole[name] for name in rest)


def test_a_sample_that_supervises_nothing_stores_no_rows() -> None:
    whole = features() | {"loss_mask": torch.zeros(B, S, dtype=torch.int64)}
    stored = encode_compact(whole, fp8_aux=False, supervised_rows=True)
    assert (stored["last_hidden_states"].shape, stored["target_argmax"].shape) == ((0, H), (0,))
    check_stored_specs(samples.specs(stored), ref())
    assert not decode_compact(stored, ref().feature_specs, sample_id="s")["last_hidden_states"].any()


def test_other_rows_than_the_loss_mask_names_are_corruption() -> None:
    stored = encode_compact(features(), fp8_aux=False, supervised_rows=True)
    stored["loss_mask"] = stored["loss_mask"].clone()
    stored["loss_mask"][0, 0] = 1
    with pytest.raises(SampleCorrupt, match=r"a-1: .*whose loss_mask is 1, wanted 9, got 8"):
        decode_compact(stored, ref().feature_specs, sample_id="a-1")


def test_what_a_store_returns_is_decoded_by_its_refs_version() -> None:
    plain = samples.tensors()
    assert decode_stored(samples.ref(), plain) is plain
    stored = encode_compact(features(), fp8_aux=True, supervised_rows=True)
    assert {name: spec.shape for name, spec in samples.specs(decode_stored(ref(), stored)).items()} == {
        name: spec.shape for name, spec in ref().feature_specs.items()
    }


@pytest.mark.parametrize(
    ("fp8", "rows", "kept"), [(False, False, 6), (False, True, 4), (True, False, 0), (True, True, 0)]
)
def test_a_decoded_sample_lets_go_of_what_was_stored_where_that_is_cheap(fp8: bool, rows: bool, kept: int) -> None:
    wide = {name: tensor.repeat(1, 1, 8) if tensor.ndim == 3 else tensor for name, tensor in features().items()}
    stored = encode_compact(wide, fp8_aux=fp8, supervised_rows=rows)
    memory = {tensor.untyped_storage().data_ptr() for tensor in stored.values()}
    back = decode_compact(stored, samples.specs(wide), sample_id="s")
    assert sum(tensor.untyped_storage().data_ptr() in memory for tensor in back.values()) == kept
    assert stored_form(stored) == ("fp8" if fp8 else "same", "supervised" if rows else "all")


def nearest_e4m3(value: float) -> set[float]:
    """The one or two e4m3 numbers that lie nearest to a value within their range."""
    at = bisect_left(E4M3, value)
    around = E4M3[max(at - 1, 0) : at + 1]
    best = min(abs(each - value) for each in around)
    return {each for each in around if abs(each - value) == best}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_gives_each_token_the_nearest_e4m3_numbers_of_its_own_scale(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    scales = torch.tensor([1.0, 1e-3, 24832.0, 3e-6])[:, None]
    values = (torch.randn(4, 48, generator=draw) ** 3 * scales).clamp(-24832, 24832).to(dtype)
    got = to_fp8(values[None])[0]
    assert got.dtype == dtype
    for token, back in zip(values.double().tolist(), got.tolist(), strict=True):
        scale = torch.tensor(max(map(abs, token)) / 448, dtype=torch.float32).item()
        for value, came in zip(token, back, strict=True):
            near = torch.tensor([value / scale + delta for delta in (-1e-4, 0, 1e-4)]).tolist()
            wanted = {each for some in near for each in nearest_e4m3(max(-448.0, min(448.0, some)))}
            rounded = {torch.tensor(each * scale, dtype=torch.float32).to(dtype).item() for each in wanted}
            assert came in rounded
            assert abs(came - value) <= max(abs(value) / 16, scale / 1024) * (1 + 2**-7)


def test_the_error_of_normal_values_is_2_6_percent_of_their_rms() -> None:
    values = torch.randn(1, 64, 3 * 256, generator=torch.Generator().manual_seed(0))
    error = (to_fp8(values) - values).square().mean().sqrt() / values.square().mean().sqrt()
    assert 0.024 < error < 0.028


def test_tokens_do_not_share_a_scale() -> None:
    values = torch.ones(1, 2, 12)
    values[0, 0, 0] = 24832.0
    assert to_fp8(values)[0, 1].tolist() == pytest.approx([1.0] * 12, rel=1e-6)
    assert to_fp8(values)[0, 0, 0].item() == pytest.approx(24832.0, rel=1e-6)


def test_a_token_of_zeros_has_scale_1_and_stays_zero() -> None:
    aux = torch.zeros(1, 2, 12, dtype=torch.bfloat16)
    aux[0, 1] = 2.0
    stored = encode_compact({"aux_hidden_states": aux}, fp8_aux=True, supervised_rows=False)
    assert stored["aux_scale"].flatten().tolist() == [1.0, pytest.approx(2 / 448)]
    assert torch.equal(to_fp8(aux), aux)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_values_of_any_size_stay_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 4, 1.0, 0.0], dtype=dtype)
    values = torch.stack([*extremes[:, None].expand(-1, 6), extremes])[None]
    got = to_fp8(values)
    assert got.isfinite().all()
    torch.testing.assert_close(got[0, :-1], values[0, :-1], rtol=2**-9, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_never_comes_back_as_a_number(bad: float) -> None:
    values = torch.ones(1, 2, 12)
    values[0, 0, 3] = bad
    assert to_fp8(values).isnan()[0].tolist() == [[True] * 12, [False] * 12]


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_stored_scale_that_would_make_wrong_numbers_is_refused(bad: float) -> None:
    features = samples.tensors(supervision="last_hidden_states")
    stored = encode_compact(features, fp8_aux=True, supervised_rows=False)
    stored["aux_scale"][1, 2, 0] = bad
    with pytest.raises(
        SampleCorrupt, match=rf"a-1: aux_scale: not positive, got 1 such, the first at \[1, 2, 0\]: {bad:g}"
    ):
        decode_compact(stored, samples.specs(features), sample_id="a-1")


def test_the_lookup_of_fp8_numbers_is_torchs_own_cast() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 256)
    mine = compact._from_fp8(numbers, torch.ones(1, 1, 1), "float32")
    torch.testing.assert_close(mine, numbers.float(), rtol=0, atol=0, equal_nan=True)


def test_an_8b_targets_token_takes_33_kb_and_21_kb_in_fp8() -> None:
    length, hidden = 2048, 4096
    shapes = {"aux_hidden_states": (3 * hidden, "bfloat16"), "last_hidden_states": (hidden, "bfloat16")}
    specs = {name: FeatureSpec((1, length, width), dtype) for name, (width, dtype) in shapes.items()}
    specs |= {name: FeatureSpec((1, length), "int64") for name in ("input_ids", "attention_mask", "loss_mask")}
    specs["target_argmax"] = FeatureSpec((1, length), "int32")
    sizes = {
        fp8: sum(spec.num_bytes for spec in stored_specs(specs, fp8_aux=fp8, num_rows=None).values()) / length
        for fp8 in (False, True)
    }
    assert sizes == {False: 32_796, True: 20_512}
    whole = replace(ref(), feature_specs=specs, feature_keys=dict.fromkeys(specs, "k"), num_tokens=length)
    validate_eagle3_compact_ref(replace(whole, estimated_bytes=32_796 * length))
