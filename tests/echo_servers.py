"""A target that answers asynchronously, as servers do, without any: a test says what comes of each request."""

from collections.abc import Callable

import torch
from torch import Tensor

import pipeline
from eaglefeed.clock import ManualClock
from eaglefeed.schema.batch import BatchHandle, Eagle3TargetBatch

Answer = Callable[[int, Eagle3TargetBatch], Eagle3TargetBatch | None]
"""A request's number, from 0, and its answer → what comes instead: a batch, None as long as none comes, or an error."""


class EchoHandle:
    """One request to EchoServers."""

    def __init__(self, servers: "EchoServers", number: int, rows: tuple[Tensor, ...]) -> None:
        self._servers, self.number, self._rows = servers, number, rows

    def result(self, timeout: float | None = None) -> Eagle3TargetBatch:
        try:
            answer = self._servers.answer(self.number, self._servers.generate_batch(*self._rows))
        except BaseException:
            self._servers.under_way.discard(self.number)
            raise
        if answer is None:
            self._servers.clock.advance(timeout or 0.0)
            raise TimeoutError
        self._servers.under_way.discard(self.number)
        return answer

    def cancel(self) -> bool:
        self._servers.cancelled.append(self.number)
        self._servers.under_way.discard(self.number)
        return True


class EchoServers(pipeline.EchoTarget):
    """Answers like pipeline.EchoTarget; `under_way` are the numbers of requests that are asked and not answered."""

    supports_async = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.asked = 0
        self.most_under_way = 0
        self.under_way: set[int] = set()
        self.cancelled: list[int] = []
        self.answer: Answer = lambda _number, answer: answer

    def generate_batch_async(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> BatchHandle:
        number, self.asked = self.asked, self.asked + 1
        self.under_way.add(number)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return EchoHandle(self, number, (input_ids, attention_mask, loss_mask))


def first_token(batch: Eagle3TargetBatch) -> int:
    """The first token of the prompt that a batch was made of: that of `p-<index>` is index + 1."""
    return int(batch.aux_hidden_states[0, 0, 0])


def with_nan(batch: Eagle3TargetBatch) -> Eagle3TargetBatch:
    """The same batch with one value that is no number."""
    states = batch.aux_hidden_states.clone()
    states[0, 1, 2] = torch.nan
    return Eagle3TargetBatch(**(batch.tensors() | {"aux_hidden_states": states}))
