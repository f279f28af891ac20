"""A target server whose forward takes longer than its clients wait: it runs each request once."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from coded_target import POSITIONS, CodedTarget, check_answer, row
from eaglefeed.consumer.target_outage import bear_target_outage
from eaglefeed.errors import TargetUnavailable
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.serving_app import TargetApp
from eaglefeed.producer.work import Work
from eaglefeed.schema.protocol import HEALTH, READY
from eaglefeed.storage.control import Refused
from faults.processes import in_thread, wait_until
from remote_models import ODD, closing
from target_servers import Asker, serving

ONCE = [5, 6, 7]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Every request that reached a batcher, each time that it did."""
    seen: list[Work] = []
    submit = Batcher.submit

    def noted(self: Batcher, work: Work) -> Work:
        seen.append(work)
        return submit(self, work)

    monkeypatch.setattr(Batcher, "submit", noted)
    return seen


def runs_of(target: CodedTarget, *ids: int) -> int:
    return sum(forward.tolist() == [list(ids)] for forward in target.forwards)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("with_map", [False, True])
def test_a_request_whose_client_asks_again_and_again_is_run_once(
    exact: bool, with_map: bool, submitted: list[Work]
) -> None:
    target = CodedTarget()
    with serving(target) as server, closing(server.url, timeout=0.4, max_retries=100, exact=exact) as model:
        if with_map:
            model.set_vocab_mapping(ODD.selected_token_ids, ODD.selected_token_mask)
        target.gate.clear()
        handle = model.generate_batch_async(*row(*ONCE))
        wait_until(lambda: len(submitted) >= 4)
        target.gate.set()
        answer = handle.result(30).tensors()
    check_answer(answer, torch.tensor([ONCE]), ODD.selected_token_ids if with_map else None)
    assert len({work.request for work in submitted}) == 1
    assert runs_of(target, *ONCE) == 1


def test_a_first_forward_for_each_shape_that_outlasts_the_clients_time_is_run_once_a_request(
    submitted: list[Work],
) -> None:
    target, compiled = CodedTarget(), set[torch.Size]()
    forward = target._forward

    def compiles_first(rows: Any, *packing: Any) -> tuple[Tensor, Tensor]:
        if rows.input_ids.shape not in compiled and rows.input_ids[0, 0] > 1:  # no warm-up
            compiled.add(rows.input_ids.shape)
            before = len(submitted)
            wait_until(lambda: len(submitted) >= before + 2)  # its client gave up and came again
        return forward(rows, *packing)

    target._forward = compiles_first  # type: ignore[method-assign]
    with serving(target, batch_tokens=1) as server, closing(server.url, timeout=0.5, max_retries=100) as model:
        for ids in (ONCE, [8, 9], [9, 8], [10]):
            check_answer(model.generate_batch(*row(*ids)).tensors(), torch.tensor([ids]))
            assert runs_of(target, *ids) == 1
    assert len(submitted) > 4


@pytest.mark.parametrize(
    ("limits", "wanted"), [({}, POSITIONS), ({"warm_up_tokens": 96}, 96), ({"max_tokens": 64}, 64)]
)
def test_it_is_ready_once_the_longest_row_that_it_is_to_run_went_well(limits: dict[str, int], wanted: int) -> None:
    target = CodedTarget()
    target.gate.clear()
    with serving(target, ready=False, **limits) as server, Asker(server.url) as client:
        assert target.entered.acquire(timeout=10)
        assert client.call(HEALTH, method="GET", timeout_s=10).status == 200
        with pytest.raises(Refused) as refused:
            client.call(READY, method="GET", timeout_s=10)
        assert refused.value.status == 503
        target.gate.set()
        assert server.wait_ready(30)
        assert client.call(READY, method="GET", timeout_s=10).status == 200
    assert [list(ids.shape) for ids in target.forwards] == [[1, wanted]]


def test_a_trainer_does_not_let_its_requests_grow_old_at_a_server_that_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, submitted: list[Work]
) -> None:
    target, asked = CodedTarget(), list[bool]()
    target.gate.clear()
    answer = TargetApp._ready

    async def noted(self: TargetApp, request: Any) -> Any:
        asked.append(self._batcher.is_ready)
        return await answer(self, request)

    monkeypatch.setattr(TargetApp, "_ready", noted)
    with serving(target, ready=False) as server, closing(server.url, timeout=5.0, max_retries=0) as model:
        with pytest.raises(TargetUnavailable, match="not ready"):
            model.check_ready()
        opens = in_thread(lambda: (wait_until(lambda: len(asked) >= 2), target.gate.set()))
        bear_target_outage(model.check_ready, outage_s=60.0, stop=threading.Event())
        opens.join(30)
        assert submitted == []
        check_answer(model.generate_batch(*row(*ONCE)).tensors(), torch.tensor([ONCE]))
    assert asked[0] is False
    assert asked[-1] is True
