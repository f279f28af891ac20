"""One request of a target server's client, and the numbers of many.

B batch · S sequence
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.errors import EaglefeedError
from eaglefeed.producer.engine import Selected
from eaglefeed.schema.batch import Eagle3TargetBatch

__all__ = ["BatcherStats", "Deliver", "TokenRows", "Work"]

Deliver = Callable[[Eagle3TargetBatch | EaglefeedError], None]


class TokenRows(NamedTuple):
    """What a request asks about, [B, S] int64 each, as tokenized and not shifted; packing all three or none."""

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class Work:
    """One request, from its arrival until the last byte of its answer is sent.

    Args:
        request: its id.
        rows: what it asks about.
        deliver: is given the answer, or what went wrong, once at most and in any thread; not if it was released.
        selected: the draft vocabulary it is answered over; None for logits.
        exact: it shares no forward.
        deadline_s: of the clock's monotonic time; no forward of it begins later.
        on_device: its answer stays where the target made it, instead of going to the CPU.
    """

    request: str
    rows: TokenRows
    deliver: Deliver
    selected: Selected | None = None
    exact: bool = False
    deadline_s: float
    on_device: bool = False
    released: bool = False
    """Nobody waits for its answer, or for the rest of it, any more."""
    computed: bool = False
    """The target has done with it."""

    @property
    def is_alone(self) -> bool:
        """Whether it shares no forward: packed rows are full already."""
        return self.exact or self.rows.position_ids is not None

    def is_again(self, other: "Work") -> bool:
        """Whether this is the request `other`, made once more by a client that did not wait for its first answer."""
        if not self.request or self.request != other.request or self.computed or other.computed:
            return False
        is_asked_alike = (self.exact, self.on_device) == (other.exact, other.on_device)
        return is_asked_alike and self.selected is other.selected and all(map(_equal, self.rows, other.rows))


@dataclass(frozen=True)
class BatcherStats:
    """What has happened so far, and what is there now.

    Args:
        waiting: requests that wait for a forward.
        in_flight: requests in a forward, and answers that are not sent yet.
        forwards: that the target ran.
        forward_s: seconds in them and in making answers.
        answered: requests with an answer.
        num_tokens: B x S of those, added up.
        failed: requests whose forward raised.
        refused: requests that found no room to wait.
        timed_out: requests dropped before their forward since they were late.
        cancelled: requests given up before their answer was made.
    """

    waiting: int = 0
    in_flight: int = 0
    forwards: int = 0
    forward_s: float = 0.0
    answered: int = 0
    num_tokens: int = 0
    failed: int = 0
    refused: int = 0
    timed_out: int = 0
    cancelled: int = 0


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
