"""How much of the pipeline from queue to training step is measured."""

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Load", "PipelinePlan"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """A training step, and what its samples are like; B is 1.

    Args:
        tokens: S of a sample.
        hidden: H.
        draft_vocab: D, of its target_probs.
        dtype: of aux states and target_probs.
        step_s: what a step sleeps, as one does that waits for an accelerator; None trains the reference draft.
        steps: that are timed, a round,
        warm_up: and before them.
        produced_ahead: whether the producer has made all samples before the first step, and has ended.
    """

    tokens: int
    hidden: int
    draft_vocab: int
    dtype: str
    step_s: float | None
    steps: int
    warm_up: int = 5
    produced_ahead: bool = False

    @property
    def num_samples(self) -> int:
        """One a step."""
        return self.warm_up + self.steps


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Sizes of every measurement.

    Args:
        rounds: how often each is repeated; in a round every load is timed from memory and from the stream.
        draft: a draft of a 0.1B target, trained on one thread of the processor while a producer works.
        device: samples of an 8B target, and a step that only waits.
        high_count: samples that the queue has room for while a producer works.
        quick: the sizes are too small for figures that mean something.
    """

    rounds: int = 5
    draft: Load = Load(tokens=256, hidden=576, draft_vocab=4096, dtype="float32", step_s=None, steps=30)
    device: Load = Load(
        tokens=512, hidden=4096, draft_vocab=32_000, dtype="bfloat16", step_s=0.1, steps=40, produced_ahead=True
    )
    high_count: int = 32
    quick: bool = False


FULL = PipelinePlan()
QUICK = PipelinePlan(
    rounds=1,
    draft=Load(tokens=64, hidden=64, draft_vocab=256, dtype="float32", step_s=None, steps=5, warm_up=2),
    device=Load(
        tokens=64,
        hidden=256,
        draft_vocab=512,
        dtype="bfloat16",
        step_s=0.01,
        steps=5,
        warm_up=2,
        produced_ahead=True,
    ),
    quick=True,
)
