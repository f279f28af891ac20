"""The EAGLE-3 contract, schema version 2: supervision by last hidden states, aux states in fp8, dropped rows.

B batch · S sequence · H target hidden size · R rows whose shifted loss mask is 1

What is stored may be smaller than the decoded features, which alone are what `feature_specs` describe:

    feature               decoded          stored, if it is smaller
    aux_hidden_states     [B,S,3H] float   float8_e4m3fn [B,S,3H], and aux_scale float32 [B,S,1]
    last_hidden_states    [B,S,H] float    [R,H], row-major: only the rows whose loss_mask is 1
    target_argmax         [B,S] int32      [R], the same rows

Dropped rows decode as zeros. Training does not see that: step k at position t is scored against row t + k if that row's
own mask is set, so that a row that is masked enters no loss. Last hidden states keep their every bit.

fp8 is lossy. Every token has one scale s = a / 448, with a its largest magnitude, and a value x comes back as x' with
|x' - x| <= max(2^-4 |x|, 2^-10 s): half a step of e4m3, which has three bits after the leading one down to 2^-6 s and
fixed steps of 2^-9 s below. So no value is off by more than 16/448 a = 3.6 % of the token's largest. Rounding to the
decoded dtype comes on top. Normally distributed values come back with an error of 2.6 % of their RMS. Tokens whose
scale would be below float32's smallest normal number have that for s.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from eaglefeed.errors import SampleCorrupt, SchemaError, SchemaVersionError
from eaglefeed.schema.eagle3 import (
    EAGLE3_CORE_FEATURES,
    EAGLE3_DRAFT_VOCAB_SUPERVISION,
    EAGLE3_FEATURES,
    EAGLE3_LOGITS_SUPERVISION,
    EAGLE3_PACKING_FEATURES,
    EAGLE3_SCHEMA_VERSION,
    Feature,
    FeatureTable,
    check_ref,
    validate_eagle3_ref,
)
from eaglefeed.schema.refs import FeatureSpec, SampleRef

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EAGLE3_COMPACT_FEATURES",
    "EAGLE3_COMPACT_SCHEMA_VERSION",
    "EAGLE3_COMPACT_SUPERVISION",
    "SUPERVISION_ENCODINGS",
    "check_stored_specs",
    "decode_compact",
    "decode_stored",
    "encode_compact",
    "stored_form",
    "stored_specs",
    "validate_any_ref",
    "validate_eagle3_compact_ref",
    "validate_ref",
]

EAGLE3_COMPACT_SCHEMA_VERSION = 2
EAGLE3_COMPACT_SUPERVISION = ("last_hidden_states", "target_argmax")
SUPERVISION_ENCODINGS = (EAGLE3_LOGITS_SUPERVISION, EAGLE3_DRAFT_VOCAB_SUPERVISION, EAGLE3_COMPACT_SUPERVISION)
"""The encodings of all versions."""

_AUX, _SCALE, _FP8 = "aux_hidden_states", "aux_scale", "float8_e4m3fn"
_LAST, _ARGMAX = EAGLE3_COMPACT_SUPERVISION
_FLOATS = EAGLE3_FEATURES[_AUX].dtypes

EAGLE3_COMPACT_FEATURES: Mapping[str, Feature] = MappingProxyType(
    {name: EAGLE3_FEATURES[name] for name in EAGLE3_CORE_FEATURES}
    | {
        _LAST: Feature(("B", "S", "H"), _FLOATS, shifted=True),
        _ARGMAX: Feature(("B", "S"), ("int32",), shifted=True),
    }
    | {name: EAGLE3_FEATURES[name] for name in EAGLE3_PACKING_FEATURES}
)
_TABLE = FeatureTable(
    EAGLE3_COMPACT_SCHEMA_VERSION, EAGLE3_COMPACT_FEATURES, (EAGLE3_COMPACT_SUPERVISION,), stored_only=(_SCALE,)
)

_FP8_MAX = 448.0
_MIN_SCALE = 2.0**-126
"""float32's smallest normal number: a smaller scale has too few bits, and 0 has none."""
_MAX_SCALE = 7.59e35
"""Just enough for float32's largest number; one more bit of scale and 448 times it is inf."""
_CHUNK_TOKENS = 32
"""Small enough that a chunk in float32 stays in a core's cache."""


def validate_eagle3_compact_ref(ref: SampleRef) -> None:
    """Check a ref of version 2 against the contract, without its tensors; its checksums name stored tensors.

    Raises:
        SchemaVersionError: another schema version.
        SchemaError: another algorithm, features, specs, keys or sizes that do not fit the contract.
    """
    check_ref(ref, _TABLE)


def validate_ref(ref: SampleRef, schema_version: int) -> None:
    """Check a ref of the one version that this process was started for.

    Raises:
        SchemaVersionError: it is of another version, or nobody knows this one.
        SchemaError: it does not fit the contract.
    """
    validators = {
        EAGLE3_SCHEMA_VERSION: validate_eagle3_ref,
        EAGLE3_COMPACT_SCHEMA_VERSION: validate_eagle3_compact_ref,
    }
    if schema_version not in validators:
        wanted = " or ".join(map(str, validators))
        raise SchemaVersionError("unknown schema version", subject=ref.sample_id, wanted=wanted, got=schema_version)
    validators[schema_version](ref)


def validate_any_ref(ref: SampleRef) -> None:
    """Check a ref by the version that it says it has: for tools that look at samples and train nothing.

    Raises:
        SchemaVersionError: nobody knows that version.
        SchemaError: it does not fit the contract.
    """
    validate_ref(ref, ref.schema_version)


def stored_specs(specs: Mapping[str, FeatureSpec], *, fp8_aux: bool, num_rows: int | None) -> dict[str, FeatureSpec]:
    """Specs of what `encode_compact` makes of decoded features.

    Args:
        specs: of the decoded features.
        fp8_aux: whether aux states are stored in fp8.
        num_rows: R, where only supervised rows are stored; None where all are.
    """
    stored = dict(specs)
    if fp8_aux:
        stored[_AUX] = FeatureSpec(specs[_AUX].shape, _FP8)
        stored[_SCALE] = FeatureSpec((*specs[_AUX].shape[:2], 1), "float32")
    if num_rows is not None:
        stored[_LAST] = FeatureSpec((num_rows, *specs[_LAST].shape[2:]), specs[_LAST].dtype)
        stored[_ARGMAX] = FeatureSpec((num_rows,), specs[_ARGMAX].dtype)
    return stored


def check_stored_specs(found: Mapping[str, FeatureSpec], ref: SampleRef) -> None:
    """Check that stored tensors are one of the legal forms of a ref's decoded features.

    Args:
        found: specs of the stored tensors.
        ref: a valid ref of version 2.

    Raises:
        SchemaError: they are not; says which tensor and how it differs.
    """
    wanted = stored_specs(ref.feature_specs, fp8_aux=_SCALE in found, num_rows=_num_rows(found, ref))
    if set(found) != set(wanted):
        raise SchemaError("other stored tensors", subject=ref.sample_id, wanted=sorted(wanted), got=sorted(found))
    for name, spec in wanted.items():
        if found[name] != spec:
            what = f"{name} is stored with another spec"
            raise SchemaError(what, subject=ref.sample_id, wanted=spec, got=found[name])


def _num_rows(found: Mapping[str, FeatureSpec], ref: SampleRef) -> int | None:
    batch, length, _ = ref.feature_specs[_LAST].shape
    if _LAST not in found or len(found[_LAST].shape) != len(("R", "H")):
        return None
    num_rows = found[_LAST].shape[0]
    if num_rows > batch * length:
        wanted = f"at most {batch * length}"
        raise SchemaError(f"{_LAST} has too many rows", subject=ref.sample_id, wanted=wanted, got=num_rows)
    return num_rows


def stored_form(stored: Mapping[str, "Tensor"]) -> tuple[str, str]:
    """How a sample of any version is stored, in the words of a contract's aux_storage and supervision_rows."""
    is_dropped = _LAST in stored and stored[_LAST].ndim == len(("R", "H"))
    return "fp8" if _SCALE in stored else "same", "supervised" if is_dropped else "all"


def encode_compact(tensors: Mapping[str, "Tensor"], *, fp8_aux: bool, supervised_rows: bool) -> dict[str, "Tensor"]:
    """What is stored of a sample's features; views of them where nothing is encoded.

    Args:
        tensors: decoded features, of finite values; a NaN or inf makes its whole token NaN.
        fp8_aux: store aux states in fp8, with the error that this file's head states.
        supervised_rows: store supervision only where loss_mask is 1; exact.
    """
    stored = dict(tensors)
    if fp8_aux:
        stored[_AUX], stored[_SCALE] = _to_fp8(tensors[_AUX])
    if supervised_rows:
        supervised = tensors["loss_mask"].bool()
        stored |= {name: tensors[name][supervised] for name in EAGLE3_COMPACT_SUPERVISION}
    return stored


def decode_compact(
    stored: Mapping[str, "Tensor"], specs: Mapping[str, FeatureSpec], *, sample_id: str
) -> dict[str, "Tensor"]:
    """A sample's features, in the order of `specs`; views of what is stored where nothing was encoded.

    The rest is copied where it is less than what was decoded, so that the memory of what is stored can go: with fp8 aux
    states of any real width, and never where rows were dropped and no more.

    Args:
        stored: tensors that `check_stored_specs` accepts.
        specs: of the decoded features.
        sample_id: named in the error.

    Raises:
        SampleCorrupt: other rows are stored than those whose loss_mask is 1, or a scale is not positive.
    """
    decoded = dict(stored)
    if _SCALE in stored:
        _check_scale(stored[_SCALE], sample_id)
        decoded[_AUX] = _from_fp8(stored[_AUX], stored[_SCALE], specs[_AUX].dtype)
    if stored[_LAST].ndim != len(specs[_LAST].shape):
        supervised = stored["loss_mask"].bool()
        if (wanted := int(supervised.sum())) != len(stored[_LAST]):
            what = f"{_LAST} does not hold the rows whose loss_mask is 1"
            raise SampleCorrupt(sample_id, what, wanted=wanted, got=len(stored[_LAST]))
        decoded |= {name: _spread(stored[name], supervised) for name in EAGLE3_COMPACT_SUPERVISION}
    views = {name: decoded[name] for name in specs if decoded[name] is stored.get(name)}
    num_view_bytes = sum(tensor.nbytes for tensor in views.values())
    if 2 * num_view_bytes < sum(decoded[name].nbytes for name in specs):
        decoded |= {name: tensor.clone() for name, tensor in views.items()}
    return {name: decoded[name] for name in specs}


def _check_scale(scale: "Tensor", sample_id: str) -> None:
    """A scale that is not finite shows in the values; of one that is not positive they would be wrong numbers."""
    if (bad := scale <= 0).any():
        place = bad.nonzero()[0].tolist()
        got = f"{int(bad.sum())} such, the first at {place}: {scale[tuple(place)].item():g}"
        raise SampleCorrupt(sample_id, f"{_SCALE}: not positive", got=got)


def decode_stored(ref: SampleRef, stored: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """The features of what a store's `get` returned, whichever version the ref is of.

    Raises:
        SampleCorrupt: see `decode_compact`.
    """
    if ref.schema_version != EAGLE3_COMPACT_SCHEMA_VERSION:
        return stored
    return decode_compact(stored, ref.feature_specs, sample_id=ref.sample_id)


def _spread(rows: "Tensor", supervised: "Tensor") -> "Tensor":
    """[R, ...] back to [B, S, ...], zero where nothing was stored."""
    spread = rows.new_zeros(*supervised.shape, *rows.shape[1:])
    spread[supervised] = rows
    return spread


def _to_fp8(aux: "Tensor") -> "tuple[Tensor, Tensor]":
    """[B, S, 3H] → float8_e4m3fn of that shape, and float32 scales [B, S, 1]."""
    import torch

    tokens = aux.flatten(0, 1)
    amax = torch.maximum(tokens.amax(-1, keepdim=True), -tokens.amin(-1, keepdim=True)).float()
    scale = (amax / _FP8_MAX).clamp(_MIN_SCALE, _MAX_SCALE).masked_fill(amax == 0, 1.0)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)  # some casts make inf a number, others do not
    packed = torch.empty_like(tokens, dtype=torch.float8_e4m3fn)
    for start in range(0, len(tokens), _CHUNK_TOKENS):  # so that no whole copy in float32 is made
        chunk = slice(start, start + _CHUNK_TOKENS)
        packed[chunk] = (tokens[chunk].float() / scale[chunk]).to(packed.dtype)
    return packed.view(aux.shape), scale.view(*aux.shape[:2], 1)


def _from_fp8(packed: "Tensor", scale: "Tensor", dtype: str) -> "Tensor":
    import torch

    # A look-up is four times as fast as torch's cast from fp8 on a CPU, and the same.
    numbers = torch.arange(256, dtype=torch.uint8, device=packed.device).view(packed.dtype).float()
    tokens, scales = packed.flatten(0, 1).view(torch.uint8), scale.flatten(0, 1)
    values = torch.empty_like(tokens, dtype=getattr(torch, dtype))
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = slice(start, start + _CHUNK_TOKENS)
        unscaled = numbers.index_select(0, tokens[chunk].int().flatten()).view_as(tokens[chunk])
        values[chunk] = unscaled * scales[chunk]
    return values.view(packed.shape)
