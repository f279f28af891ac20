"""What a sample's values must be. A NaN that reaches a trainer is found days later; here it costs one pass."""

from collections.abc import Mapping

import torch
from torch import Tensor

from eaglefeed.errors import SampleCorrupt
from eaglefeed.schema.eagle3 import EAGLE3_FEATURES
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_FEATURES
from eaglefeed.schema.packing import packing_faults
from eaglefeed.schema.refs import FeatureSpec

__all__ = ["shift_left", "validate_eagle3_rows", "validate_eagle3_tensors"]

_FEATURES = {**EAGLE3_FEATURES, **EAGLE3_COMPACT_FEATURES}
_MASKS = ("attention_mask", "loss_mask")
_IDS = ("input_ids", "target_argmax")
_PROBABILITY_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""How far a row's sum may be from 1: rounding of the stored dtype over a vocabulary."""


def validate_eagle3_tensors(
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, FeatureSpec],
    *,
    sample_id: str,
    vocab_size: int | None = None,
) -> None:
    """Check a sample's tensors against their specs and the contract.

    Finite values (a logit may be -inf, a whole row may not), right padding, zeros beyond each row's real length, binary
    masks, loss only on real tokens, ids in range, probabilities that sum to 1; of packed rows documents that fill them,
    positions that restart and remainders that are exact, and no loss from one document to the next.

    Args:
        tensors: the sample's decoded features, of any schema version.
        specs: its ref's specs, already checked by `validate_ref`.
        sample_id: named in every error.
        vocab_size: V; ids are also checked against the width of the logits.

    Raises:
        SampleCorrupt: names the feature, the position and the value of the first fault.
    """
    _check_specs(tensors, specs, sample_id)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            _check_finite(name, tensor, sample_id)
    for name in _MASKS:
        _check_range(name, tensors[name], 2, sample_id)
    _check_padding(tensors, sample_id)
    _check_ids(tensors, vocab_size, sample_id)
    if "target_probs" in tensors:
        _check_probabilities(tensors, sample_id)
    if "seq_lens" in tensors:
        _check_packing(tensors, sample_id)


def validate_eagle3_rows(tensors: Mapping[str, Tensor], rows: Mapping[str, Tensor], *, sample_id: str) -> None:
    """Check that a sample is of the rows that its target was given, and not of others, or of more or fewer tokens.

    Args:
        tensors: the sample's features.
        rows: what the target was given: input_ids, attention_mask and loss_mask, not shifted, padded on the right, and
            the packing features if it is packed.
        sample_id: named in every error.

    Raises:
        SampleCorrupt: names the feature and the first position that differs.
    """
    wanted = dict(rows) | {name: shift_left(rows[name]) for name in ("input_ids", "loss_mask")}
    if "doc_remaining" in rows:  # a document's last token does not learn how the next one begins
        wanted["loss_mask"] = wanted["loss_mask"] * (rows["doc_remaining"] > 0)
    for name, values in wanted.items():
        got = tensors[name].cpu() if name in tensors else None
        if got is None or got.shape != values.shape:
            what, came = (
                f"{name} is not of the rows that were asked for",
                list(got.shape) if got is not None else "none",
            )
            raise SampleCorrupt(sample_id, what, wanted=list(values.shape), got=came)
        _refuse_first(got != values, name, got, "not of the rows that were asked for", sample_id)


def _check_specs(tensors: Mapping[str, Tensor], specs: Mapping[str, FeatureSpec], sample_id: str) -> None:
    if set(tensors) != set(specs):
        raise SampleCorrupt(sample_id, "other features than its ref names", wanted=list(specs), got=list(tensors))
    for name, spec in specs.items():
        tensor = tensors[name]
        got = FeatureSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if got != spec:
            wanted, found = (f"{side.dtype} {list(side.shape)}" for side in (spec, got))
            raise SampleCorrupt(sample_id, f"{name} is not what its ref says", wanted=wanted, got=found)


def _check_finite(name: str, tensor: Tensor, sample_id: str) -> None:
    if name == "logits":
        # The largest of a row is finite only without NaN and +inf, and with one token that is not banned.
        worst = tensor.amax(-1)
        _refuse_first(~worst.isfinite(), name, worst, "no finite largest value in the row", sample_id)
        return
    low, high = tensor.aminmax()
    if not (low.isfinite() and high.isfinite()):
        _refuse_first(~tensor.isfinite(), name, tensor, "not finite", sample_id)


def _check_range(name: str, tensor: Tensor, bound: int, sample_id: str) -> None:
    low, high = (int(end) for end in tensor.aminmax())
    if low < 0 or high >= bound:
        wide = tensor.long()  # the bound may be beyond int32
        _refuse_first((wide < 0) | (wide >= bound), name, tensor, f"not from 0 to {bound - 1}", sample_id)


def _check_padding(tensors: Mapping[str, Tensor], sample_id: str) -> None:
    real = tensors["attention_mask"].bool()
    holes = torch.cat([~real[:, :1], real[:, 1:] & ~real[:, :-1]], dim=1)
    _refuse_first(holes, "attention_mask", real.long(), "not a run of ones from the row's start", sample_id)
    next_real = shift_left(real)
    for name, tensor in tensors.items():
        feature = _FEATURES[name]
        if feature.axes[:2] == ("B", "S") and name not in ("position_ids", "doc_remaining"):
            outside = ~(next_real if feature.shifted else real)
            rows = tensor[outside]
            if rows.any():
                bad = outside.clone()
                bad[outside] = rows.flatten(1).any(-1) if rows.ndim > 1 else rows.bool()
                _refuse_first(bad, name, None, "not zero beyond the row's real length", sample_id)


def shift_left(values: Tensor) -> Tensor:
    """[B, S] moved left by one, with a zero tail: what the contract calls shifted."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)


def _check_ids(tensors: Mapping[str, Tensor], vocab_size: int | None, sample_id: str) -> None:
    widths = [tensors["logits"].shape[-1]] if "logits" in tensors else []
    bound = min([*widths, vocab_size or torch.iinfo(torch.int64).max])
    for name in _IDS:
        if name in tensors:
            _check_range(name, tensors[name], bound, sample_id)


def _check_probabilities(tensors: Mapping[str, Tensor], sample_id: str) -> None:
    probs, loss = tensors["target_probs"], tensors["loss_mask"].bool()
    tolerance = _PROBABILITY_TOLERANCE[probs.dtype]
    low, high = probs.aminmax()
    if low < 0 or high > 1 + tolerance:
        _refuse_first((probs < 0) | (probs > 1 + tolerance), "target_probs", probs, "no probability", sample_id)
    # Added up in float32 and rounded to the stored dtype, by a fifth of the tolerance at most; a float32 result would
    # have torch copy it all to float32 first, which is larger than the sample.
    sums = probs.sum(-1).float()
    wrong = shift_left(tensors["attention_mask"].bool()) & ((sums - 1).abs() > tolerance)
    _refuse_first(wrong, "target_probs", sums, "the row does not sum to 1", sample_id)
    stray = tensors["position_mask"][..., 0] & ~loss
    _refuse_first(stray, "position_mask", None, "set where loss_mask is 0", sample_id)


def _check_packing(tensors: Mapping[str, Tensor], sample_id: str) -> None:
    for name, what, bad, values in packing_faults(tensors, tensors["attention_mask"].sum(-1)):
        _refuse_first(bad, name, values, what, sample_id)
    across = tensors["loss_mask"].bool() & (tensors["doc_remaining"] == 0)
    _refuse_first(across, "loss_mask", None, "set where the next token is another document's", sample_id)


def _refuse_first(bad: Tensor, name: str, values: Tensor | None, what: str, sample_id: str) -> None:
    if not bad.any():
        return
    position = bad.nonzero()[0].tolist()
    got = f"{int(bad.sum())} such, the first at {position}"
    if values is not None:
        got += f": {values[tuple(position)].item():g}"
    raise SampleCorrupt(sample_id, f"{name}: {what}", got=got)
