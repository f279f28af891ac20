import inspect
from dataclasses import replace

import pytest
import torch

import samples
from eaglefeed.errors import SchemaError, SchemaVersionError
from eaglefeed.schema import eagle3
from eaglefeed.schema.eagle3 import (
    default_aux_layer_ids,
    eagle3_logits_feature_specs,
    eagle3_logits_tensors,
    validate_eagle3_packing_inputs,
    validate_eagle3_ref,
)
from eaglefeed.schema.refs import FeatureAlgorithm, FeatureSpec

PACKING = ("position_ids", "seq_lens", "doc_remaining")


def _changed(name: str, spec: FeatureSpec | None) -> object:
    features = samples.tensors()
    found = samples.specs(features) | ({name: spec} if spec else {})
    if spec is None:
        found.pop(name)
    return samples.ref(
        features,
        feature_specs=found,
        feature_keys=dict.fromkeys(found, "00/a.1.safetensors"),
        estimated_bytes=sum(each.num_bytes for each in found.values()),
    )


def test_the_constants_are_those_that_users_know() -> None:
    assert eagle3.EAGLE3_SCHEMA_VERSION == 1
    assert eagle3.EAGLE3_CORE_FEATURES == ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask")
    assert eagle3.EAGLE3_LOGITS_SUPERVISION == ("logits",)
    assert eagle3.EAGLE3_DRAFT_VOCAB_SUPERVISION == ("target_probs", "position_mask")
    assert eagle3.EAGLE3_PACKING_FEATURES == PACKING
    assert eagle3.EAGLE3_SUPERVISION_ENCODINGS == (
        "aux_hidden_states",
        "input_ids",
        "attention_mask",
        "loss_mask",
        "logits",
    )


def test_packers_keep_the_order_and_their_parameters() -> None:
    order = ["aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits", *PACKING]
    for packer in (eagle3_logits_tensors, eagle3_logits_feature_specs):
        assert list(inspect.signature(packer).parameters) == order
    tensors = {name: torch.zeros(1) for name in reversed(order)}
    assert list(eagle3_logits_tensors(**tensors)) == order
    spec = FeatureSpec((1,), "int64")
    assert list(eagle3_logits_feature_specs(*[spec] * 5)) == order[:5]


@pytest.mark.parametrize("missing", PACKING)
def test_packing_is_all_three_features_or_none(missing: str) -> None:
    given = dict.fromkeys(PACKING, 1) | {missing: None}
    with pytest.raises(ValueError, match=missing):
        validate_eagle3_packing_inputs(**given)
    tensors = {name: torch.zeros(1) for name in (*eagle3.EAGLE3_SUPERVISION_ENCODINGS, *PACKING)}
    with pytest.raises(SchemaError, match=missing):
        eagle3_logits_tensors(**(tensors | {missing: None}))
    validate_eagle3_packing_inputs(**dict.fromkeys(PACKING, 1))
    validate_eagle3_packing_inputs(**dict.fromkeys(PACKING))


@pytest.mark.parametrize("supervision", ["logits", "target_probs"])
def test_both_encodings_are_valid(supervision: str) -> None:
    validate_eagle3_ref(samples.ref(samples.tensors(supervision=supervision)))


@pytest.mark.parametrize(
    "name", ["aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "position_mask", "target_probs"]
)
def test_a_missing_feature_is_refused(name: str) -> None:
    with pytest.raises(SchemaError):
        validate_eagle3_ref(_changed(name, None))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("logits", FeatureSpec((2, 6, samples.V), "float32")),  # a second encoding
        ("hidden", FeatureSpec((2, 6), "float32")),  # unknown
        ("input_ids", FeatureSpec((2, 6), "int32")),
        ("input_ids", FeatureSpec((2, 5), "int64")),
        ("input_ids", FeatureSpec((2, 6, 1), "int64")),
        ("loss_mask", FeatureSpec((3, 6), "int64")),
        ("aux_hidden_states", FeatureSpec((2, 6, 13), "bfloat16")),  # not three layers
        ("aux_hidden_states", FeatureSpec((2, 6, 12), "float64")),
        ("position_mask", FeatureSpec((2, 6, 2), "bool")),
        ("position_mask", FeatureSpec((2, 6, 1), "int64")),
        ("position_ids", FeatureSpec((2, 6), "int64")),  # packing, but not all of it
        ("target_probs", FeatureSpec((2, 6, 0), "float32")),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(name: str, spec: FeatureSpec) -> None:
    with pytest.raises(SchemaError):
        validate_eagle3_ref(_changed(name, spec))


def test_another_schema_version_is_refused_by_its_own_class() -> None:
    with pytest.raises(SchemaVersionError, match="wanted 1, got 2"):
        validate_eagle3_ref(samples.ref(schema_version=2))


@pytest.mark.parametrize("algorithm", [FeatureAlgorithm.DFLASH, FeatureAlgorithm.DSPARK])
def test_known_algorithms_that_are_not_there_yet_say_so(algorithm: FeatureAlgorithm) -> None:
    with pytest.raises(SchemaError, match="not supported yet"):
        validate_eagle3_ref(samples.ref(algorithm=algorithm))


def test_sizes_are_checked_against_the_specs() -> None:
    with pytest.raises(SchemaError, match="estimated_bytes"):
        validate_eagle3_ref(samples.ref(estimated_bytes=1))
    with pytest.raises(SchemaError, match="num_tokens"):
        validate_eagle3_ref(samples.ref(num_tokens=13))
    with pytest.raises(SchemaError, match="keys"):
        validate_eagle3_ref(replace(samples.ref(), feature_keys={"logits": "x"}))


@pytest.mark.parametrize(
    ("num_layers", "ids"), [(32, (1, 15, 28)), (30, (1, 14, 26)), (7, (1, 2, 3)), (80, (1, 39, 76))]
)
def test_default_layers(num_layers: int, ids: tuple[int, int, int]) -> None:
    assert default_aux_layer_ids(num_layers) == ids


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_a_shallow_model_needs_explicit_layers(num_layers: int) -> None:
    with pytest.raises(SchemaError, match="aux_layer_ids"):
        default_aux_layer_ids(num_layers)
