"""BackendStream: batches straight from a target, for the training loops that a SampleStream feeds."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.state import StreamState, already_begun, read_place, require_first
from eaglefeed.consumer.target_outage import Postponed, TargetOutage
from eaglefeed.consumer.walk import Walked, walk
from eaglefeed.errors import EaglefeedError, SampleCorrupt, SchemaError, StorageError, TargetError, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.schema.batch import BatchHandle, Eagle3TargetBackend, Eagle3TargetBatch
from eaglefeed.schema.eagle3 import validate_eagle3_specs
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt
from eaglefeed.schema.values import validate_eagle3_rows, validate_eagle3_tensors
from eaglefeed.storage.base import Verify, is_verified
from eaglefeed.storage.shard import spec_of

__all__ = ["BackendStream"]

_POLL_S = 0.5

log = get_logger(__name__)


class _Asked(NamedTuple):
    prompt: Prompt
    place: str
    handle: BatchHandle
    num_outages: int
    """How many were over when it was asked."""


class _Ready(NamedTuple):
    place: str
    batch: Eagle3TargetBatch


class _Taken(NamedTuple):
    place: str
    sample_id: str


class _InPlace:
    """The handle of a target that answers in place: it runs when it is waited for."""

    def __init__(self, answer: Callable[[], Eagle3TargetBatch]) -> None:
        self._answer = answer

    def result(self, timeout: float | None = None) -> Eagle3TargetBatch:  # noqa: ARG002  a forward is not cut short
        return self._answer()

    def cancel(self) -> bool:
        return True


class BackendStream:
    """A target's answers to prompts, in the prompts' order; used as SampleStream's docstring shows, without a queue.

    What was learned stands in checkpoints alone: the `state_dict()` of one is loaded again, and the stream goes on
    behind what was acknowledged by then. Steps are made of the same samples whenever it was stopped, and whatever
    `depth` is: a step that is not complete when it stops is not handed out.

    A prompt that the target refuses, or whose answer breaks the contract, is counted (`stats.dead`), logged and passed.

    Args:
        target: answers; the handles of a target with `supports_async` have deadlines.
        prompts: in an order that is the same at every start.
        depth: samples that the target works on while the loop trains; 0 for a target that answers in place. At most
            depth + 1 and a step's samples are in memory, beside those that the loop keeps.
        values: whose values are checked: every sample's, 1 in 16, or none.
        vocab_size: V; ids are held against it. None where the target is not known.
        device: where batches go.
        outage_s: how long no server may answer, as when the only one restarts; until then they are asked again.
        clock: what waits are measured with.
    """

    def __init__(
        self,
        target: Eagle3TargetBackend,
        prompts: Iterable[Prompt],
        *,
        depth: int = 1,
        values: Verify = "always",
        vocab_size: int | None = None,
        device: torch.device | str = "cpu",
        outage_s: float = 120.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stats = StreamStats()
        self._target, self._depth = target, depth if target.supports_async else 0
        self._values, self._vocab_size, self._device, self._clock = values, vocab_size, device, clock
        self._outage = TargetOutage(outage_s, clock)
        self._prompts, self._place, self._step = prompts, "", 0
        self._walk: Iterator[Walked] | None = None
        self._asked: deque[_Asked] = deque()
        self._ready: list[_Ready] = []
        self._taken: list[_Taken] = []
        self.round_ids: tuple[str, ...] = ()
        self._stop = threading.Event()
        self._walked = self._failed = self._gave_up = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: all prompts were answered, an error ended it, or it was stopped."""
        return self._stop.is_set() or self._failed or self.drained

    @property
    def drained(self) -> bool:
        """Whether the target has answered all prompts, and all answers were taken."""
        return self._walked and not (self._asked or self._ready or self._gave_up)

    @property
    def commit_due(self) -> bool:
        """Never: there is no queue that waits for room."""
        return False

    def take(self, n: int, *, wait_s: float | None = None) -> list[Eagle3TargetBatch]:
        """The next `n` batches; fewer only at the end, and none when they did not all come in `wait_s`.

        Raises:
            InputError: the prompts are not those that `seen` is about.
            TargetError: the target was away for `outage_s`, is another one or failed; the stream has ended then.
        """
        started_s = self._clock.monotonic()
        try:
            self._collect(n, math.inf if wait_s is None else started_s + wait_s)
        except EaglefeedError:
            self._failed = True
            self._cancel()
            raise
        finally:
            self.stats.wait_s += self._clock.monotonic() - started_s
        is_last = self._walked and not self._asked
        if self._stop.is_set() or self._failed or (len(self._ready) < n and not is_last):
            return []
        taken, self._ready = self._ready[:n], self._ready[n:]
        self._taken += [_Taken(ready.place, ready.batch.sample_ids[0]) for ready in taken]
        self.round_ids = tuple(ready.batch.sample_ids[0] for ready in taken)
        self.stats.delivered += len(taken)
        return [ready.batch for ready in taken]

    def ack(self, step: int | None = None, sample_ids: Sequence[str] | None = None) -> int:
        """What was taken was trained on, or those that were taken first; returns how many samples.

        Raises:
            ConfigError: they are others: a place in a walk has only trained samples before it.
        """
        if sample_ids is not None:
            require_first(sample_ids, [taken.sample_id for taken in self._taken])
        count = len(self._taken) if sample_ids is None else len(sample_ids)
        self._place = self._taken[count - 1].place if count else self._place
        self._taken, self._step = self._taken[count:], self._step if step is None else step
        self.stats.acked += count
        if self._stop.is_set():  # a server need not go on while the last checkpoint is written
            self._cancel()
        return count

    def commit(self, _step: int, /) -> int:
        """Nothing to settle: no queue holds what was trained on."""
        return 0

    def state_dict(self) -> StreamState:
        """What a checkpoint keeps: the step, and the place behind the last sample that was acknowledged."""
        return StreamState(run="", queue="", step=self._step, seen=[self._place] if self._place else [])

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on behind what a checkpoint has seen.

        Raises:
            ConfigError: batches were taken already.
            ContractMismatch: it is of a training on a queue.
            SchemaError: it is no stream's state.
        """
        if self._walk is not None:
            raise already_begun()
        self._place, self._step = read_place(state)

    def stop(self) -> None:
        """Make `take` return nothing from now on. Safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Give up what was asked for; the target stays open. Safe to repeat."""
        self._stop.set()
        self._cancel()

    def __enter__(self) -> "BackendStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, n: int, deadline_s: float) -> None:
        """Make `n` samples ready, if there are as many and they come in time."""
        while len(self._ready) < n and not self.ended:
            self._ask_ahead()
            if not self._asked:
                return
            asked = self._asked[0]
            left_s = deadline_s - self._clock.monotonic()
            try:
                batch = self._answer(asked, max(0.0, min(left_s, _POLL_S)))
            except TimeoutError:
                if left_s <= _POLL_S:
                    return
                continue
            except TargetUnavailable as error:
                self._asked[0] = self._asked_again(asked, error)
                continue
            except (SchemaError, SampleCorrupt) as error:
                self._refuse(asked.prompt.sample_id, error)
            else:
                self._ready.append(_Ready(asked.place, batch))
            self._outage.answered()
            self._asked.popleft()

    def _ask_ahead(self) -> None:
        """Have `depth` samples under way behind the one that is waited for."""
        while not self._walked and len(self._asked) <= self._depth and not self._stop.is_set():
            self._walk = self._walk or walk(self._prompts, self._place)
            walked = next(self._walk, None)
            if walked is None:
                self._walked = True
            elif walked.is_new:
                handle = self._ask(walked.prompt)
                self._asked.append(_Asked(walked.prompt, walked.place, handle, self._outage.num_over))

    def _asked_again(self, asked: _Asked, error: TargetUnavailable) -> _Asked:
        """The same request anew: at once where it failed in an outage that is over, else when the outage says."""
        num_over = self._outage.num_over
        if asked.num_outages < num_over:
            return asked._replace(handle=self._ask(asked.prompt), num_outages=num_over)
        self._outage.failed(error)
        handle = Postponed(partial(self._ask, asked.prompt), self._outage.retry_at_s, self._clock)
        return asked._replace(handle=handle)

    def _ask(self, prompt: Prompt) -> BatchHandle:
        rows = pad_prompt(prompt)
        if self._target.supports_async:
            return self._target.generate_batch_async(**rows)
        return _InPlace(lambda: self._target.generate_batch(**rows))

    def _answer(self, asked: _Asked, timeout_s: float) -> Eagle3TargetBatch:
        batch = self._result(asked, timeout_s)
        tensors = batch.tensors()
        specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        validate_eagle3_specs(specs, asked.prompt.sample_id)
        validate_eagle3_rows(tensors, pad_prompt(asked.prompt), sample_id=asked.prompt.sample_id)
        if is_verified(self._values, asked.prompt.sample_id):
            validate_eagle3_tensors(tensors, specs, sample_id=asked.prompt.sample_id, vocab_size=self._vocab_size)
        return replace(batch, sample_ids=(asked.prompt.sample_id,)).to(self._device)

    def _result(self, asked: _Asked, timeout_s: float) -> Eagle3TargetBatch:
        try:
            return asked.handle.result(timeout_s)
        except SampleCorrupt:
            raise
        except StorageError as error:  # it broke on its way, again and again
            raise TargetUnavailable(error.what, subject=asked.prompt.sample_id, got=error.got, fix=error.fix) from error
        except RuntimeError as error:  # torch's, also when it is out of memory
            fix = "take the conversation out of the file, or make room, and start again"
            got = f"{type(error).__name__}: {error}"[:500]
            raise TargetError("the target failed on it", subject=asked.prompt.sample_id, got=got, fix=fix) from error

    def _refuse(self, sample_id: str, error: EaglefeedError) -> None:
        reason = f"{type(error).__name__}: {error}"[:1000]
        log.error("sample_refused", sample_id=sample_id, final=True, reason=reason)
        self.stats.dead += 1

    def _cancel(self) -> None:
        while self._asked:
            self._gave_up = True
            self._asked.popleft().handle.cancel()
