"""The EAGLE-3 contract, schema version 1. One feature table drives the packers, the specs and the validator.

B batch · S sequence · H target hidden size · V target vocabulary · D draft vocabulary
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar

from eaglefeed.errors import SchemaError, SchemaVersionError
from eaglefeed.schema.refs import FeatureAlgorithm, FeatureSpec, SampleRef, assert_no_tensors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EAGLE3_CORE_FEATURES",
    "EAGLE3_DRAFT_VOCAB_SUPERVISION",
    "EAGLE3_FEATURES",
    "EAGLE3_LOGITS_SUPERVISION",
    "EAGLE3_PACKING_FEATURES",
    "EAGLE3_SCHEMA_VERSION",
    "EAGLE3_SUPERVISION_ENCODINGS",
    "NUM_AUX_LAYERS",
    "Feature",
    "FeatureTable",
    "check_ref",
    "check_specs",
    "default_aux_layer_ids",
    "eagle3_logits_feature_specs",
    "eagle3_logits_tensors",
    "eagle3_supervision",
    "validate_eagle3_packing_inputs",
    "validate_eagle3_ref",
    "validate_eagle3_specs",
]

EAGLE3_SCHEMA_VERSION = 1
NUM_AUX_LAYERS = 3
_FLOATS, _INT = ("bfloat16", "float16", "float32"), ("int64",)

T = TypeVar("T")
Encodings = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Feature:
    """One row of the feature table.

    Args:
        axes: names of its axes; a name means the same size in every feature, a number that size.
        dtypes: dtypes that are allowed.
        shifted: whether row t describes token t + 1 (shifted left by one, zero tail).
    """

    axes: tuple[str | int, ...]
    dtypes: tuple[str, ...]
    shifted: bool


EAGLE3_FEATURES: Mapping[str, Feature] = {
    "aux_hidden_states": Feature(("B", "S", "3H"), _FLOATS, shifted=False),
    "input_ids": Feature(("B", "S"), _INT, shifted=True),
    "attention_mask": Feature(("B", "S"), _INT, shifted=False),
    "loss_mask": Feature(("B", "S"), _INT, shifted=True),
    "logits": Feature(("B", "S", "V"), _FLOATS, shifted=True),
    "target_probs": Feature(("B", "S", "D"), _FLOATS, shifted=True),
    "position_mask": Feature(("B", "S", 1), ("bool",), shifted=True),
    "position_ids": Feature(("B", "S"), _INT, shifted=False),
    "seq_lens": Feature(("B", "max_docs"), _INT, shifted=False),
    "doc_remaining": Feature(("B", "S"), _INT, shifted=False),
}

EAGLE3_CORE_FEATURES = ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask")
EAGLE3_LOGITS_SUPERVISION = ("logits",)
EAGLE3_DRAFT_VOCAB_SUPERVISION = ("target_probs", "position_mask")
EAGLE3_PACKING_FEATURES = ("position_ids", "seq_lens", "doc_remaining")
EAGLE3_SUPERVISION_ENCODINGS = EAGLE3_CORE_FEATURES + EAGLE3_LOGITS_SUPERVISION


@dataclass(frozen=True)
class FeatureTable:
    """One version of the contract.

    Args:
        version: its number.
        features: every feature it knows.
        encodings: the features of each supervision encoding it knows.
        stored_only: names that stored tensors have, and decoded features do not.
    """

    version: int
    features: Mapping[str, Feature]
    encodings: Encodings
    stored_only: tuple[str, ...] = ()


_ENCODINGS = (EAGLE3_LOGITS_SUPERVISION, EAGLE3_DRAFT_VOCAB_SUPERVISION)
_TABLE = FeatureTable(EAGLE3_SCHEMA_VERSION, EAGLE3_FEATURES, _ENCODINGS)


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Three 0-based decoder layers whose outputs feed the draft: 1, L//2 - 1 and L - 4.

    Raises:
        SchemaError: a model so shallow that they are not three distinct layers.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if len(set(ids)) < NUM_AUX_LAYERS or not all(0 <= layer < num_layers for layer in ids):
        fix = f"pass three distinct aux_layer_ids from 0 to {num_layers - 1}"
        fix = fix if num_layers >= len(ids) else "too few for three aux_layer_ids: use another target"
        raise SchemaError(f"no default aux layers for a model of {num_layers} layers", got=list(ids), fix=fix)
    return ids


def _given(**features: T | None) -> dict[str, T]:
    packing = {name: features.get(name) for name in EAGLE3_PACKING_FEATURES}
    validate_eagle3_packing_inputs(**packing)
    return {name: value for name, value in features.items() if value is not None}


def eagle3_logits_tensors(
    *,
    aux_hidden_states: "Tensor",
    input_ids: "Tensor",
    attention_mask: "Tensor",
    loss_mask: "Tensor",
    logits: "Tensor",
    position_ids: "Tensor | None" = None,
    seq_lens: "Tensor | None" = None,
    doc_remaining: "Tensor | None" = None,
) -> dict[str, "Tensor"]:
    """The tensors of a sample with encoding 1, in the contract's order.

    Args:
        aux_hidden_states: [B, S, 3H] outputs of the three aux layers, not shifted.
        input_ids: [B, S] int64, shifted left by one.
        attention_mask: [B, S] int64 of 0 and 1, not shifted.
        loss_mask: [B, S] int64 of 0 and 1, shifted left by one.
        logits: [B, S, V] target logits, shifted left by one.
        position_ids: [B, S] int64; packing takes all three of these or none.
        seq_lens: [B, max_docs] int64.
        doc_remaining: [B, S] int64.

    Raises:
        SchemaError: only some of the packing features are given.
    """
    return _given(
        aux_hidden_states=aux_hidden_states,
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        logits=logits,
        position_ids=position_ids,
        seq_lens=seq_lens,
        doc_remaining=doc_remaining,
    )


def eagle3_logits_feature_specs(
    aux_hidden_states: FeatureSpec,
    input_ids: FeatureSpec,
    attention_mask: FeatureSpec,
    loss_mask: FeatureSpec,
    logits: FeatureSpec,
    position_ids: FeatureSpec | None = None,
    seq_lens: FeatureSpec | None = None,
    doc_remaining: FeatureSpec | None = None,
) -> dict[str, FeatureSpec]:
    """The specs of a sample with encoding 1, in the contract's order; see `eagle3_logits_tensors`.

    Raises:
        SchemaError: only some of the packing features are given.
    """
    return _given(
        aux_hidden_states=aux_hidden_states,
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        logits=logits,
        position_ids=position_ids,
        seq_lens=seq_lens,
        doc_remaining=doc_remaining,
    )


def validate_eagle3_packing_inputs(*, position_ids: object, seq_lens: object, doc_remaining: object) -> None:
    """Sequence packing takes all three features or none of them (None means not given).

    Raises:
        SchemaError: some are given and some are not.
    """
    given = dict(zip(EAGLE3_PACKING_FEATURES, (position_ids, seq_lens, doc_remaining), strict=True))
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise SchemaError("packing takes all three of its features or none", wanted=list(given), got=f"no {missing}")


def eagle3_supervision(
    features: Mapping[str, object], sample_id: str = "", encodings: Encodings = _ENCODINGS
) -> tuple[str, ...]:
    """The features of the one supervision encoding that is present, of `encodings` (version 1's by default).

    Raises:
        SchemaError: none, several or a part of one.
    """
    present = [encoding for encoding in encodings if any(name in features for name in encoding)]
    if len(present) != 1 or any(name not in features for name in present[0]):
        got = [name for encoding in encodings for name in encoding if name in features]
        wanted = " or ".join("+".join(encoding) for encoding in encodings)
        raise SchemaError("exactly one supervision encoding is needed", subject=sample_id, wanted=wanted, got=got)
    return present[0]


def validate_eagle3_specs(specs: Mapping[str, FeatureSpec], sample_id: str = "") -> None:
    """Check names, dtypes and shapes against version 1's feature table; axes of one name must agree.

    Raises:
        SchemaError: the first fault, by feature.
    """
    check_specs(specs, _TABLE, sample_id)


def check_specs(specs: Mapping[str, FeatureSpec], table: FeatureTable, sample_id: str = "") -> None:
    """What `validate_eagle3_specs` does, by any version's table.

    Raises:
        SchemaError: the first fault, by feature.
    """
    unknown = [name for name in specs if name not in table.features]
    missing = [name for name in EAGLE3_CORE_FEATURES if name not in specs]
    if unknown or missing:
        fault = f"unknown features {unknown}" if unknown else f"missing features {missing}"
        raise SchemaError(fault, subject=sample_id, wanted=list(EAGLE3_CORE_FEATURES), got=list(specs))
    eagle3_supervision(specs, sample_id, table.encodings)
    validate_eagle3_packing_inputs(**{name: specs.get(name) for name in EAGLE3_PACKING_FEATURES})
    sizes: dict[str | int, tuple[str, int]] = {}
    for name, spec in specs.items():
        _check_feature(name, spec, table.features[name], sizes, sample_id)


def _check_feature(
    name: str, spec: FeatureSpec, feature: Feature, sizes: dict[str | int, tuple[str, int]], sample_id: str
) -> None:
    if spec.dtype not in feature.dtypes:
        raise SchemaError(f"{name} has the wrong dtype", subject=sample_id, wanted=feature.dtypes, got=spec.dtype)
    if len(spec.shape) != len(feature.axes):
        axes = f"[{', '.join(map(str, feature.axes))}]"
        raise SchemaError(f"{name} has the wrong rank", subject=sample_id, wanted=axes, got=list(spec.shape))
    for axis, size in zip(feature.axes, spec.shape, strict=True):
        if axis == "3H" and size % NUM_AUX_LAYERS == 0:
            axis, size = "H", size // NUM_AUX_LAYERS
        first, wanted = sizes.setdefault(axis, (name, axis if isinstance(axis, int) else size))
        if size != wanted:
            fault = f"{name} disagrees on axis {axis}" + (f" with {first}" if first != name else "")
            raise SchemaError(fault, subject=sample_id, wanted=wanted, got=size)
        if size == 0 or axis == "3H":
            raise SchemaError(f"{name}: impossible size of axis {axis}", subject=sample_id, got=size)


def validate_eagle3_ref(ref: SampleRef) -> None:
    """Check a ref of version 1 against the contract, without its tensors.

    Raises:
        SchemaVersionError: another schema version.
        SchemaError: another algorithm, features, specs, keys or sizes that do not fit the contract.
    """
    check_ref(ref, _TABLE)


def check_ref(ref: SampleRef, table: FeatureTable) -> None:
    """What `validate_eagle3_ref` does, by any version's table.

    Raises:
        SchemaVersionError: another schema version.
        SchemaError: another algorithm, features, specs, keys or sizes that do not fit the contract.
    """
    assert_no_tensors(ref)
    if ref.algorithm != FeatureAlgorithm.EAGLE3:
        fault = f"algorithm {ref.algorithm} is not supported yet"
        raise SchemaError(fault, subject=ref.sample_id, wanted=str(FeatureAlgorithm.EAGLE3), got=str(ref.algorithm))
    if ref.schema_version != table.version:
        what = "unknown schema version"
        raise SchemaVersionError(what, subject=ref.sample_id, wanted=table.version, got=ref.schema_version)
    can_be_stored = {*ref.feature_specs, *table.stored_only}
    if set(ref.feature_keys) != set(ref.feature_specs) or not set(ref.checksums) <= can_be_stored:
        what = "feature keys, specs and checksums name different features"
        raise SchemaError(what, subject=ref.sample_id, wanted=list(ref.feature_specs), got=list(ref.feature_keys))
    check_specs(ref.feature_specs, table, ref.sample_id)
    _check_sizes(ref)


def _check_sizes(ref: SampleRef) -> None:
    wanted = sum(spec.num_bytes for spec in ref.feature_specs.values())
    if ref.estimated_bytes != wanted:
        raise SchemaError("wrong estimated_bytes", subject=ref.sample_id, wanted=wanted, got=ref.estimated_bytes)
    most = prod(ref.feature_specs["input_ids"].shape)
    if not 0 < ref.num_tokens <= most:
        raise SchemaError("impossible num_tokens", subject=ref.sample_id, wanted=f"1 to {most}", got=ref.num_tokens)
