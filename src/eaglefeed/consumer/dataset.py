"""SampleDataset: a stream as a torch IterableDataset."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.errors import ConfigError
from eaglefeed.schema.collate import collate

if TYPE_CHECKING:
    from eaglefeed.consumer.source import BatchSource
    from eaglefeed.consumer.state import StreamState

__all__ = ["SampleDataset"]

_DUE_PAUSE_S = 0.1


class SampleDataset(IterableDataset[dict[str, Tensor]]):
    """A draft's inputs, one dict a forward, for a loop of one's own or a DataLoader without workers.

        for inputs in DataLoader(SampleDataset(stream), batch_size=None):
            train_on(inputs)

    Asking for the next dict acknowledges the one before for good. With `ack_on_next=False` the loop acknowledges, as
    one with checkpoints does, and one whose loader fetches ahead. Iterating ends then also when the queue waits for a
    commit, and goes on with the next iteration:

        while not stream.ended:
            for inputs in dataset:
                train_on(inputs)
                step += 1
                dataset.ack(step)
            save(step, dataset.state_dict())
            stream.commit(step)

    `state_dict` and `load_state_dict` are the stream's, by torchdata's names: a StatefulDataLoader saves them too.

    Args:
        stream: where batches come from. A RoundStream's round must be samples_per_batch.
        samples_per_batch: samples that are padded together into one dict; fewer at the end.
        ack_on_next: whether asking for the next one acknowledges.
    """

    def __init__(self, stream: "BatchSource", *, samples_per_batch: int = 1, ack_on_next: bool = True) -> None:
        super().__init__()
        self._stream, self._size, self._ack_on_next = stream, samples_per_batch, ack_on_next
        self._unsettled: deque[tuple[str, ...]] = deque()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield `to_trainer_inputs()` of samples_per_batch samples.

        Raises:
            ConfigError: in a loader's worker process.
        """
        if get_worker_info() is not None:
            raise _in_worker()
        while not self._is_over():
            if batches := self._stream.take(self._size):
                self._unsettled.append(self._stream.round_ids)
                yield collate(batches).to_trainer_inputs()
            elif self._ack_on_next:
                SYSTEM_CLOCK.sleep(_DUE_PAUSE_S)  # another trainer's acknowledgements wait for its commit
            else:
                return

    def ack(self, step: int | None = None, *, num_batches: int = 1) -> int:
        """Acknowledge the oldest dicts that were not yet, as the stream's `ack` does; returns how many samples.

        Args:
            step: the training step that learned them; None settles them for good.
            num_batches: how many dicts.

        Raises:
            ConfigError: there are not as many.
        """
        if num_batches > len(self._unsettled):
            what, fix = "fewer dicts wait for it", "acknowledge each once, after it was trained on"
            raise ConfigError(what, subject="ack", wanted=f"at most {len(self._unsettled)}", got=num_batches, fix=fix)
        ids = [sample_id for _ in range(num_batches) for sample_id in self._unsettled.popleft()]
        return self._stream.ack(step, ids)

    def state_dict(self) -> "StreamState":
        """What a checkpoint keeps."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a checkpoint; before the first iteration."""
        self._stream.load_state_dict(state)

    def _is_over(self) -> bool:
        """Whether nothing more will come; asked before each dict, also after an iteration that was left."""
        if self._ack_on_next and self._unsettled:
            self.ack(num_batches=len(self._unsettled))
        return self._stream.ended

    def __reduce__(self) -> NoReturn:
        raise _in_worker()


def _in_worker() -> ConfigError:
    what = "samples are leased and acknowledged in the training process alone"
    fix = "pass num_workers=0: the stream materializes ahead in a thread of its own"
    return ConfigError(what, subject="SampleDataset", wanted="no worker processes", fix=fix)
