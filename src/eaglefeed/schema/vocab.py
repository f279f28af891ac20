"""VocabMapping: which target tokens a draft can say. V target vocabulary · D draft vocabulary."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eaglefeed.errors import ConfigError, SchemaError

__all__ = ["VocabMapping"]

_TOKENIZER = "tokenizer_fingerprint"


@dataclass(frozen=True, eq=False)
class VocabMapping:
    """A draft vocabulary, in ascending order of target ids.

    Args:
        t2d: [V] bool, true at the target ids the draft has.
        d2t: [D] int64 offsets: target id = draft id + d2t[draft id].
        tokenizer_fingerprint: digest of the tokenizer whose ids these are; "" where the map's maker did not say.

    Raises:
        SchemaError: the two do not describe the same vocabulary.
    """

    t2d: Tensor
    d2t: Tensor
    tokenizer_fingerprint: str = ""

    def __post_init__(self) -> None:
        """Check that both describe one vocabulary."""
        if self.t2d.dtype != torch.bool or self.d2t.dtype != torch.int64 or self.t2d.ndim != 1 or self.d2t.ndim != 1:
            got = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (self.t2d, self.d2t)]
            raise SchemaError("not a vocabulary map", wanted="t2d bool [V], d2t int64 [D]", got=got)
        selected = self.t2d.nonzero().flatten()
        if not torch.equal(selected, torch.arange(len(self.d2t)) + self.d2t) or len(selected) == 0:
            fix = "d2t holds offsets, not ids; make the map again with `eaglefeed vocab`"
            raise SchemaError("t2d and d2t disagree", wanted="nonzero(t2d) == arange(D) + d2t", fix=fix)

    @classmethod
    def from_counts(
        cls,
        counts: Tensor,
        *,
        draft_vocab_size: int,
        vocab_size: int,
        always: Iterable[int] = (),
        never: Iterable[int] = (),
    ) -> "VocabMapping":
        """The most frequent tokens, of equal ones those with the lower ids first.

        Args:
            counts: [up to V] how often each id stood at a loss position.
            draft_vocab_size: D.
            vocab_size: V, the width of the target's head (a tokenizer may know fewer ids).
            always: ids that are in the map however rare: special tokens, end of turn, single bytes.
            never: ids that no token has; they fill up a map that is larger than all tokens together, and no other.

        Raises:
            ConfigError: D does not fit between the ids in `always` and V.
            SchemaError: an id outside the vocabulary, or counts that are none.
        """
        if counts.ndim != 1 or counts.is_floating_point() or (counts < 0).any():
            got = f"{counts.dtype} {list(counts.shape)}"
            raise SchemaError("not counts of tokens", wanted="whole numbers from 0 on, [up to V]", got=got)
        kept = sorted(set(always))
        if not max(1, len(kept)) <= draft_vocab_size <= vocab_size:
            wanted = f"{max(1, len(kept))} (special and byte tokens) to {vocab_size} (the target's)"
            raise ConfigError("impossible draft_vocab_size", wanted=wanted, got=draft_vocab_size)
        if len(counts) > vocab_size or (kept and not (kept[0] >= 0 and kept[-1] < vocab_size)):
            raise SchemaError("token ids beyond the target's vocabulary", wanted=f"below {vocab_size}")
        rank = torch.zeros(vocab_size, dtype=torch.int64)
        rank[: len(counts)] = counts
        rank[torch.tensor([*never], dtype=torch.int64)] = -1
        rank[torch.tensor(kept, dtype=torch.int64)] = torch.iinfo(torch.int64).max
        # A stable sort keeps ids in order, so ties and unseen ids that fill up the rest go to the lowest ids.
        order = torch.sort(rank, descending=True, stable=True).indices
        return cls.from_ids(order[:draft_vocab_size], vocab_size=vocab_size)

    @classmethod
    def from_ids(cls, token_ids: Tensor, *, vocab_size: int) -> "VocabMapping":
        """The map of these target ids, [D] in any order.

        Raises:
            SchemaError: an id outside the vocabulary, or twice.
        """
        selected = torch.sort(token_ids).values
        if len(selected) and not (selected[0] >= 0 and selected[-1] < vocab_size):
            got = f"{int(selected[0])} to {int(selected[-1])}"
            raise SchemaError("token ids outside the target's vocabulary", wanted=f"0 to {vocab_size - 1}", got=got)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[selected] = True
        return cls(t2d=t2d, d2t=selected - torch.arange(len(selected)))

    @classmethod
    def load(cls, path: Path, *, vocab_size: int | None = None) -> "VocabMapping":
        """Read a map.

        Raises:
            ConfigError: the file cannot be read.
            SchemaError: it is no map, or not one of a target with `vocab_size` tokens.
        """
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys() if name in ("t2d", "d2t")}  # noqa: SIM118
                fingerprint = (file.metadata() or {}).get(_TOKENIZER, "")
        except (OSError, SafetensorError) as error:
            fix = "make one with `eaglefeed vocab`"
            raise ConfigError("no vocabulary map can be read", subject=str(path), got=error, fix=fix) from None
        if len(found) != len(("t2d", "d2t")):
            raise SchemaError("not a vocabulary map", subject=str(path), wanted="t2d and d2t", got=sorted(found))
        mapping = cls(**found, tokenizer_fingerprint=fingerprint)
        if vocab_size is not None and mapping.vocab_size != vocab_size:
            what = "the vocabulary map is another target's"
            raise SchemaError(what, subject=str(path), wanted=f"{vocab_size} tokens", got=mapping.vocab_size)
        return mapping

    def save(self, path: Path) -> None:
        """Write the map, whole or not at all.

        Raises:
            ConfigError: it cannot be written there.
        """
        partial = path.with_name(f".{path.name}.partial")
        try:
            metadata = {"format": "eaglefeed-vocab-1", _TOKENIZER: self.tokenizer_fingerprint}
            partial.write_bytes(save({"t2d": self.t2d, "d2t": self.d2t}, metadata=metadata))
            partial.replace(path)
        except OSError as error:
            raise ConfigError("cannot be written", subject=str(path), got=error.strerror) from None

    def of_tokenizer(self, fingerprint: str) -> "VocabMapping":
        """The same map, whose ids are this tokenizer's.

        Raises:
            SchemaError: they are another's: of as many tokens, and of other ones.
        """
        if self.tokenizer_fingerprint not in ("", fingerprint):
            what, fix = "the vocabulary map is another tokenizer's", "make one with `eaglefeed vocab` for this target"
            raise SchemaError(what, wanted=fingerprint, got=self.tokenizer_fingerprint, fix=fix)
        return replace(self, tokenizer_fingerprint=fingerprint)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.t2d)

    @property
    def draft_vocab_size(self) -> int:
        """D."""
        return len(self.d2t)

    @property
    def selected_token_ids(self) -> Tensor:
        """[D] int64 target ids, ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    @property
    def selected_token_mask(self) -> Tensor:
        """[V] bool, the same as t2d."""
        return self.t2d

    @property
    def digest(self) -> str:
        """Digest of V and the selected ids."""
        return xxhash.xxh3_64_hexdigest(f"{self.vocab_size} {self.selected_token_ids.tolist()}".encode())

    def coverage(self, counts: Tensor) -> float:
        """The share of counted tokens that the draft has, 0 to 1."""
        total = int(counts.sum())
        return int(counts[self.t2d[: len(counts)]].sum()) / total if total else 0.0
