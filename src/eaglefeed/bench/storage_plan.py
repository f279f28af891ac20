"""How much of the stores is measured."""

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "StoragePlan"]


@dataclass(frozen=True, kw_only=True)
class StoragePlan:
    """Sizes of every measurement of the stores.

    Args:
        rounds: how often each is repeated; in a round all stores follow each other.
        tokens: S of every sample, which is one row; B is 1.
        hidden: H of the target: its aux states are [1, S, 3H].
        vocab: V, of the full logits.
        draft_vocab: D, of target_probs.
        moves: memmoves of the sample that each reading of it is the median of.
        few: files of the store with few residents,
        many: and of the one with many.
        resident_calls: puts and gets of a small sample beside few and many residents, each.
        memory_tokens: S of the samples of a producer and a trainer whose memory is measured.
        memory_samples: how many of them go through.
        quick: the sizes are too small for figures that mean something.
    """

    rounds: int = 7
    tokens: int = 2048
    hidden: int = 4096
    vocab: int = 128_256
    draft_vocab: int = 32_000
    moves: int = 5
    few: int = 100
    many: int = 100_000
    resident_calls: int = 20
    memory_tokens: int = 720
    memory_samples: int = 16
    quick: bool = False


FULL = StoragePlan()
QUICK = StoragePlan(
    rounds=1,
    tokens=720,
    moves=3,
    many=2_000,
    resident_calls=5,
    quick=True,
)
