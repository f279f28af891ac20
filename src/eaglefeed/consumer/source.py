"""BatchSource: where a training loop takes its batches."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.state import StreamState
from eaglefeed.schema.batch import Eagle3TargetBatch

__all__ = ["BatchSource"]


class BatchSource(Protocol):
    """A SampleStream, a RoundStream or a BackendStream, which say what each of these does."""

    @property
    def stats(self) -> StreamStats:
        """What became of its samples."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    @property
    def drained(self) -> bool:
        """Whether all that there is has come."""

    @property
    def commit_due(self) -> bool:
        """Whether somebody waits for a commit."""

    def take(self, n: int, *, wait_s: float | None = None) -> list[Eagle3TargetBatch]:
        """Up to `n` batches, or none."""

    @property
    def round_ids(self) -> tuple[str, ...]:
        """The ids of the samples that were taken last, by all ranks."""

    def ack(self, step: int | None = None, sample_ids: Sequence[str] | None = None) -> int:
        """What was taken was trained on in this step, or those samples of it."""

    def commit(self, step: int, /) -> int:
        """No checkpoint before this step can be restored any more."""

    def state_dict(self) -> StreamState:
        """What a checkpoint keeps of the stream."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a checkpoint, before the first take."""

    def stop(self) -> None:
        """Let nothing more come."""

    def close(self) -> None:
        """Give back what it holds."""
