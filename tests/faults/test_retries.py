"""A request that is made again, where its first answer had begun: nothing of that one arrives later."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from coded_target import CodedTarget, check_answer, row
from eaglefeed.storage.pair_group import _GlooPair
from eaglefeed.storage.pair_pool import PairPool
from eaglefeed.storage.wire import Deadline
from faults.fake_target import Handler, Tensors
from faults.remote_bench import FAULTS, Bench, check, cut_short, rows
from http_sides import reset_at_close
from remote_models import closing
from target_servers import serving


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def reset(handler: Handler, _tensors: Tensors, _metadata: dict[str, str]) -> None:
    reset_at_close(handler.connection)
    handler.hang_up()


def reset_in_the_answer(handler: Handler, tensors: Tensors, metadata: dict[str, str]) -> None:
    cut_short(handler, tensors, metadata)
    reset(handler, tensors, metadata)


@pytest.mark.parametrize("fault", [reset, reset_in_the_answer, FAULTS["busy"]], ids=["reset", "in it", "503"])
@pytest.mark.parametrize("times", [2, 3])
def test_a_server_that_fails_several_times_in_a_row_does_not_end_a_run(fault: object, times: int, bench: Bench) -> None:
    bench.server.fault, bench.server.num_faults = fault, times  # type: ignore[assignment]
    model = bench.connect(bench.server, max_retries=3)
    for first in range(11):
        check(model.generate_batch(**rows(first)), rows(first))


def test_after_a_timeout_in_a_transfer_every_later_answer_over_pairs_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server had begun to send when its client stopped waiting: a retry over the same pair would be one behind."""
    torch.set_num_threads(1)
    send, given_up, sent = _GlooPair._send, threading.Event(), list[int]()
    close, closed = PairPool._take_note, list[str]()

    def stands_still_once(pair: _GlooPair, tensors: Sequence[Tensor], guard: Tensor, deadline: Deadline) -> None:
        if len(tensors) > 1:  # an answer's, and not the group's first word
            sent.append(len(tensors))
            if len(sent) == 1:
                for piece in (guard, tensors[0]):
                    pair._group.send([piece], pair._peer, 0).wait()
                assert given_up.wait(30)
                raise RuntimeError("its client has gone")
        send(pair, tensors, guard, deadline)

    def noted(pool: PairPool, pair: object, error: BaseException) -> None:
        closed.append(str(error))
        given_up.set()
        close(pool, pair, error)  # type: ignore[arg-type]

    monkeypatch.setattr(_GlooPair, "_send", stands_still_once)
    monkeypatch.setattr(PairPool, "_take_note", noted)
    target = CodedTarget()
    with serving(target) as server, closing(server.url, data_plane="gloo", in_flight=1, timeout=2.5) as model:
        for first in range(11):
            check_answer(model.generate_batch(*row(first, 5)).tensors(), torch.tensor([[first, 5]]))
    assert len(closed) == 1
    assert len(sent) >= 11
