"""Requests that wait for a target, the forwards that answer them, and the answers until their last byte is sent."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch.nn.functional import pad

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import EaglefeedError, TargetError, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.producer.engine import Captured, Eagle3Target
from eaglefeed.producer.work import BatcherStats, Deliver, TokenRows, Work
from eaglefeed.schema.batch import Eagle3TargetBatch

__all__ = ["Batcher"]

_WAIT_S = 1.0
_LEAST_TOKENS = 2
log = get_logger(__name__)


class Batcher:
    """Feeds one target from many clients: `submit` and `release` in any thread, `run` in the target's own.

    Args:
        target: runs the forwards; in no other thread meanwhile.
        batch_tokens: requests that are neither exact nor packed share a forward up to this many tokens, with padding.
        max_in_flight: answers in memory at a time, from before their forward until their last byte is sent.
        max_waiting: requests that may wait.
        clock: measures deadlines.
    """

    def __init__(
        self,
        target: Eagle3Target,
        *,
        batch_tokens: int,
        max_in_flight: int,
        max_waiting: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._target, self._clock = target, clock
        self._batch_tokens, self._max_in_flight, self._max_waiting = batch_tokens, max_in_flight, max_waiting
        self._waiting: dict[Work, None] = {}
        self._in_flight: set[Work] = set()
        self._stats = BatcherStats()
        self._changed = threading.Condition()
        self._warm = self._closed = self._stopped = False
        self.failure: EaglefeedError | None = None
        """Why `run` has ended by itself: every forward fails."""

    def warm_up(self, num_tokens: int = _LEAST_TOKENS) -> None:
        """Run a forward of one row, which may compile.

        Args:
            num_tokens: of the row; at the start as many as rows are to have, so that a lack of memory shows then.

        Raises:
            EaglefeedError: it failed; others would.
        """
        ids = torch.arange(num_tokens)[None] % 2
        rows = TokenRows(ids, torch.ones_like(ids), torch.ones_like(ids))
        try:
            self._target.supervise(self._target.capture(*rows), None)
        except Exception as error:
            raise _failure(error, "warm-up") from error
        self._warm = True

    @property
    def is_ready(self) -> bool:
        """Whether it is warm, and takes requests."""
        return self._warm and not self._closed

    def submit(self, work: Work) -> Work:
        """Have a request wait for its forward; `release` of what comes back must follow, whatever becomes of it.

        Returns:
            The work, or that of the same request from before, which has its place, or its forward, and now delivers
            here: a client that asks again does not have its rows run twice.

        Raises:
            TargetUnavailable: no room to wait, or the server ends.
        """
        with self._changed:
            before = next((each for each in (*self._in_flight, *self._waiting) if work.is_again(each)), None)
            if before is None:
                self._admit(work)
                return work
            earlier, is_waited_for = before.deliver, not before.released
            before.deliver, before.deadline_s, before.released = work.deliver, work.deadline_s, False
        if is_waited_for:
            earlier(_busy(work.request, "it was asked again"))
        return before

    def _admit(self, work: Work) -> None:
        if self._closed or len(self._waiting) >= self._max_waiting:
            self._count(refused=1)
            raise _busy(work.request, "the server ends" if self._closed else "too many requests wait")
        self._waiting[work] = None
        self._changed.notify_all()

    def release(self, work: Work, deliver: Deliver | None = None) -> None:
        """Nobody waits for this request any more: its answer is sent, or given up.

        Args:
            work: the request.
            deliver: of whoever does not wait; where the same request came again meanwhile, it delivers to another.
        """
        with self._changed:
            if deliver is not None and work.deliver != deliver:
                return
            work.released = True
            if work in self._waiting:
                del self._waiting[work]
                self._count(cancelled=1)
            elif work.computed:
                self._in_flight.discard(work)
            self._changed.notify_all()

    def step(self) -> int:
        """Run one forward if a request waits and there is room for its answer; how many requests it was for."""
        self._drop_late()
        with self._changed:
            taken = self._take()
        if taken:
            self._answer(taken)
        return len(taken)

    def run(self) -> None:
        """Run forwards until `stop`, or until every one of them fails."""
        while not self._stopped:
            if self.step() == 0:
                with self._changed:
                    self._changed.wait_for(self._has_work, _WAIT_S)

    def close(self) -> None:
        """Take no more requests; those that wait are answered."""
        with self._changed:
            self._closed = True

    def stop(self) -> None:
        """Have `run` return after the forward in hand; whatever waits is refused."""
        with self._changed:
            self._closed = self._stopped = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._count(refused=len(refused))
            self._changed.notify_all()
        for work in refused:
            work.deliver(_busy(work.request, "the server ends"))

    def stats(self) -> BatcherStats:
        """Numbers so far."""
        with self._changed:
            return replace(self._stats, waiting=len(self._waiting), in_flight=len(self._in_flight))

    def _count(self, **more: float) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})

    def _has_work(self) -> bool:
        return self._stopped or (bool(self._waiting) and len(self._in_flight) < self._max_in_flight)

    def _drop_late(self) -> None:
        with self._changed:
            late = [work for work in self._waiting if self._is_late(work)]
            for work in late:
                del self._waiting[work]
        for work in late:
            self._drop(work)

    def _take(self) -> list[Work]:
        free = self._max_in_flight - len(self._in_flight)
        taken = list(islice(self._waiting, min(free, 1)))
        if taken and not taken[0].is_alone:
            for work in islice(self._waiting, 1, None):
                if len(taken) < free and not work.is_alone and _num_tokens([*taken, work]) <= self._batch_tokens:
                    taken.append(work)
        for work in taken:
            del self._waiting[work]
        self._in_flight.update(taken)
        return taken

    def _answer(self, works: Sequence[Work]) -> None:
        """Answer requests by one forward; if it fails for several, by one each, so that none fails for another's."""
        failure: EaglefeedError | None = None
        started_s = self._clock.monotonic()
        try:
            captured = self._capture(works)
        except Exception as error:  # noqa: BLE001  whatever an engine raises is the request's end, not the server's
            failure = _failure(error, works[0].request)
        else:
            self._supervise(works, captured)
        with self._changed:
            self._count(forwards=1, forward_s=self._clock.monotonic() - started_s)
        if failure is not None and len(works) > 1:
            self._answer_each(works)
        elif failure is not None:
            self._fail(works[0], self._judged(failure))

    def _judged(self, failure: EaglefeedError) -> EaglefeedError:
        """What to say of a request that failed alone: where a small forward fails too, the target is at fault.

        A device that had an error of its own fails everything from then on: this server ends, others answer.
        """
        if type(failure) is not TargetError:
            return failure
        try:
            self.warm_up()
        except EaglefeedError as error:
            self.failure = error
            self.stop()
            fix = "start its server again; another one answers meanwhile"
            return TargetUnavailable("every forward fails now", subject=failure.subject, got=error, fix=fix)
        return failure

    def _answer_each(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.released or self._is_late(work):
                self._drop(work)
            else:
                self._answer([work])

    def _capture(self, works: Sequence[Work]) -> Captured:
        if len(works) == 1:
            return self._target.capture(*works[0].rows)
        rows = [work.rows for work in works]
        length = max(row.input_ids.shape[1] for row in rows)
        columns = zip(*((row.input_ids, row.attention_mask, row.loss_mask) for row in rows), strict=True)
        return self._target.capture(
            *(torch.cat([pad(part, (0, length - part.shape[1])) for part in column]) for column in columns)
        )

    def _supervise(self, works: Sequence[Work], captured: Captured) -> None:
        first = 0
        for work in works:
            num_rows, length = work.rows.input_ids.shape
            if work.released:
                self._drop(work)
            else:
                own = None if len(works) == 1 else slice(first, first + num_rows)
                self._supervise_one(work, captured, own, length)
            first += num_rows

    def _supervise_one(self, work: Work, captured: Captured, own: slice | None, length: int) -> None:
        """Answer one request out of its rows of a forward, which are all of them if `own` is None."""
        try:
            part = captured if own is None else captured.part(own, length)
            batch = self._target.supervise(part, work.selected)
            batch = batch if work.on_device else batch.to("cpu")
        except Exception as error:  # noqa: BLE001  as above
            self._fail(work, _failure(error, work.request))
        else:
            self._finish(work, batch)

    def _finish(self, work: Work, batch: Eagle3TargetBatch) -> None:
        with self._changed:
            work.computed = True
            self._count(answered=1, num_tokens=work.rows.input_ids.numel())
            if work.released:
                self._in_flight.discard(work)
                return
            deliver = work.deliver
        deliver(batch)

    def _fail(self, work: Work, error: EaglefeedError) -> None:
        log.warning("request_failed", request=work.request, reason=str(error))
        self._end(work, failed=1)
        work.deliver(error)

    def _is_late(self, work: Work) -> bool:
        return work.deadline_s <= self._clock.monotonic()

    def _drop(self, work: Work) -> None:
        """It was given up, or is late."""
        with self._changed:
            is_given_up = work.released
            self._end(work, **{"cancelled" if is_given_up else "timed_out": 1})
        if not is_given_up:
            work.deliver(_busy(work.request, "its time was over before its turn came"))

    def _end(self, work: Work, **counted: int) -> None:
        """Take note that the target has done with it, and that it has no answer to keep."""
        with self._changed:
            work.computed = True
            self._in_flight.discard(work)
            self._count(**counted)


def _num_tokens(works: Sequence[Work]) -> int:
    """B x S of one forward for all of them."""
    shapes = [work.rows.input_ids.shape for work in works]
    return sum(rows for rows, _ in shapes) * max(length for _, length in shapes)


def _busy(request: str, why: str) -> TargetUnavailable:
    return TargetUnavailable(why, subject=request, fix="ask again later, or another server")


def _failure(error: Exception, request: str) -> EaglefeedError:
    if isinstance(error, EaglefeedError):
        return error.with_traceback(None)  # its frames would keep tensors
    return TargetError("the target failed", subject=request, got=f"{type(error).__name__}: {str(error)[:300]}")
