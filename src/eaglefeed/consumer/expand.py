"""TargetHead: target_probs and position_mask of last hidden states, made where they are trained on.

B batch · S sequence · H target hidden size · V target vocabulary · D draft vocabulary
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from eaglefeed.errors import ContractMismatch, SampleCorrupt, SchemaError
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import ASSETS_FILE, RunContract
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SUPERVISION
from eaglefeed.schema.head import LogitRule, head_digest
from eaglefeed.schema.refs import SampleRef

__all__ = ["TargetHead", "as_trained_on", "head_of_run"]

_CHUNK_ROWS = 256
_LAST, _ARGMAX = EAGLE3_COMPACT_SUPERVISION


class TargetHead:
    """The part of the target's head that says the draft vocabulary.

    Equal last hidden states give equal probabilities, bit for bit, whatever way they came. Those that a producer makes
    itself (target_probs) come from a product of other shapes, and differ from these by rounding.

    Args:
        tensors: the run's assets: `lm_head.weight` [V, H] and, where there is one, `lm_head.bias` [V].
        metadata: theirs, with the numbers of a LogitRule.
        t2d: [V] bool, the draft vocabulary.
        device: where batches are expanded.

    Raises:
        SchemaError: the vocabulary map is another target's, or the metadata is damaged.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        t2d: Tensor,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        weight, bias = tensors["lm_head.weight"], tensors.get("lm_head.bias")
        if t2d.shape != weight.shape[:1]:
            wanted, got = list(weight.shape[:1]), list(t2d.shape)
            raise SchemaError("the vocabulary map is another target's", wanted=wanted, got=got)
        if t2d.dtype != torch.bool:  # numbers would pick rows of the head, and not fail
            raise SchemaError("t2d is no mask", wanted="bool [V]", got=str(t2d.dtype))
        chosen = t2d.to(weight.device)
        self._weight = weight[chosen].to(device)
        self._bias = None if bias is None else bias[chosen].to(device)
        self._t2d = t2d.to(device)
        self._rule = LogitRule.from_metadata(metadata)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self._t2d)

    def check(self, ref: SampleRef) -> None:
        """Check that a sample's last hidden states fit this head.

        Args:
            ref: a valid ref of schema version 2.

        Raises:
            SampleCorrupt: they have another width or dtype.
        """
        spec = ref.feature_specs[_LAST]
        wanted = (self._weight.shape[1], str(self._weight.dtype).removeprefix("torch."))
        if (spec.shape[-1], spec.dtype) != wanted:
            raise SampleCorrupt(ref.sample_id, "not the run's head's last hidden states", wanted=wanted, got=spec)

    @torch.no_grad()
    def expand(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put `target_probs` and `position_mask` in the place of `last_hidden_states` and `target_argmax`.

        Probabilities are a float32 softmax, stored in the states' dtype, as a producer makes them; zero where loss_mask
        is 0. The position mask is exactly a producer's.

        Args:
            features: decoded features of schema version 2, on this head's device.

        Returns:
            The features in the contract's order, with target_probs [B, S, D] and position_mask [B, S, 1].
        """
        last, best = features[_LAST], features[_ARGMAX]
        loss = features["loss_mask"].bool()
        probs = last.new_zeros(*loss.shape, len(self._weight))
        states_nh, probs_nd = last.flatten(0, 1), probs.view(-1, probs.shape[-1])
        supervised = loss.flatten().nonzero().flatten()
        for start in range(0, len(supervised), _CHUNK_ROWS):
            rows = supervised[start : start + _CHUNK_ROWS]
            logits = self._rule(nn.functional.linear(states_nh[rows], self._weight, self._bias))
            probs_nd[rows] = logits.float().softmax(-1).to(probs.dtype)
        mask = (self._t2d[best.long()] & loss)[..., None]
        made = {_LAST: ("target_probs", probs), _ARGMAX: ("position_mask", mask)}
        return dict(made.get(name, (name, tensor)) for name, tensor in features.items())


def as_trained_on(batch: Eagle3TargetBatch, head: TargetHead | None) -> Eagle3TargetBatch:
    """What a draft reads. Not made earlier: probabilities take several times the room of last hidden states."""
    if head is None:
        return batch
    return Eagle3TargetBatch(**head.expand(batch.tensors()), sample_ids=batch.sample_ids)


def head_of_run(
    contract: RunContract,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    t2d: Tensor,
    *,
    device: torch.device | str = "cpu",
) -> TargetHead | None:
    """The head that a run's samples need; None where they hold logits or probabilities already.

    Args:
        contract: the run's.
        tensors: its assets.
        metadata: theirs.
        t2d: [V] bool, the draft vocabulary.
        device: where batches are expanded.

    Raises:
        ContractMismatch: the assets hold another head than the one that the samples were made for.
        SchemaError: see TargetHead.
    """
    if contract.supervision != "last_hidden_states":
        return None
    got = head_digest(tensors, metadata)
    if got != contract.head_digest:
        what = "another head than the run's contract says"
        raise ContractMismatch(what, subject=ASSETS_FILE, wanted=contract.head_digest, got=got)
    return TargetHead(tensors, metadata, t2d, device=device)
