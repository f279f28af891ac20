"""Requests of RemoteEagle3TargetModel on their way to real target servers on loopback."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
import torch
from torch import Tensor

from coded_target import POSITIONS, CodedTarget, V, check_answer, row
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import ConfigError, SchemaError, TargetError
from eaglefeed.producer.server import TargetServer
from eaglefeed.schema.vocab import VocabMapping
from faults.processes import wait_until
from remote_models import ODD, closing
from target_servers import Asker, serving

TINY_V, D = 259, 40
MAP = VocabMapping.from_ids(torch.arange(3, 3 + 6 * D, 6), vocab_size=TINY_V)
TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def target() -> CodedTarget:
    return CodedTarget()


@pytest.fixture
def server(target: CodedTarget) -> Iterator[TargetServer]:
    with serving(target) as started:
        target.forwards.clear()
        yield started


@pytest.fixture
def model(server: TargetServer) -> Iterator[RemoteEagle3TargetModel]:
    with closing(server.url) as opened:
        yield opened


def test_a_map_of_another_target_is_refused_and_the_one_before_stays(model: RemoteEagle3TargetModel) -> None:
    model.set_vocab_mapping(ODD.selected_token_ids, ODD.selected_token_mask)
    with pytest.raises(SchemaError, match="another target"):
        model.set_vocab_mapping(MAP.selected_token_ids, MAP.selected_token_mask)
    with pytest.raises(SchemaError, match="inconsistent"):
        model.set_vocab_mapping(ODD.selected_token_ids - 1, ODD.selected_token_mask)
    check_answer(model.generate_batch(*row(5, 6, 7)).tensors(), torch.tensor([[5, 6, 7]]), ODD.selected_token_ids)


@pytest.mark.parametrize("exact", [True, False])
def test_many_requests_on_their_way_are_each_answered_with_their_own(exact: bool, target: CodedTarget) -> None:
    with serving(target, max_in_flight=8) as server, closing(server.url, in_flight=8, exact=exact) as model:
        target.forwards.clear()
        target.gate.clear()
        asked = [torch.randint(0, V, (1 + seed % 3, 2 + seed % 11)) for seed in range(60)]
        handles = [model.generate_batch_async(ids, torch.ones_like(ids), torch.ones_like(ids)) for ids in asked]
        target.gate.set()
        for ids, handle in zip(asked, handles, strict=True):
            check_answer(handle.result(30).tensors(), ids)
        assert len(target.forwards) == 60 if exact else len(target.forwards) < 60


def test_a_batch_that_is_kept_never_changes(model: RemoteEagle3TargetModel) -> None:
    asked = [torch.randint(0, V, (2, 9)) for _ in range(30)]
    kept = [model.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids)) for ids in asked]
    for ids, batch in zip(asked, kept, strict=True):
        check_answer(batch.tensors(), ids)


def test_two_servers_are_used_in_turn() -> None:
    targets = [CodedTarget(), CodedTarget()]
    with serving(targets[0]) as one, serving(targets[1]) as two, closing(one.url, two.url) as model:
        for target in targets:
            target.forwards.clear()
        for first in range(10):
            check_answer(model.generate_batch(*row(first, 7)).tensors(), torch.tensor([[first, 7]]))
        assert model.num_remote_servers == 2
        assert model.supports_async
        assert [sorted(int(ids[0, 0]) for ids in target.forwards) for target in targets] == [
            [0, 2, 4, 6, 8],
            [1, 3, 5, 7, 9],
        ]


def test_a_slow_server_does_not_hold_up_a_quick_one() -> None:
    slow, quick = CodedTarget(), CodedTarget()
    with serving(slow) as one, serving(quick) as two, closing(one.url, two.url, in_flight=2) as model:
        slow.gate.clear()
        for target in (slow, quick):
            target.forwards.clear()
        handles = [model.generate_batch_async(*row(first, 7)) for first in range(20)]
        wait_until(lambda: len(quick.forwards) >= 18)
        slow.gate.set()
        for first, handle in enumerate(handles):
            check_answer(handle.result(30).tensors(), torch.tensor([[first, 7]]))
        assert len(slow.forwards) <= 2


def test_two_trainings_share_a_server_each_with_its_map(server: TargetServer, model: RemoteEagle3TargetModel) -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    with closing(server.url) as other:
        model.set_vocab_mapping(ODD.selected_token_ids, ODD.selected_token_mask)
        check_answer(other.generate_batch(*row(3, 4, 5, 6)).tensors(), ids)
    check_answer(model.generate_batch(*row(3, 4, 5, 6)).tensors(), ids, ODD.selected_token_ids)


def test_closing_ends_the_session_and_not_the_server(server: TargetServer) -> None:
    asker = Asker(server.url)
    with closing(server.url) as model:
        for mapping in (ODD, VocabMapping.from_ids(torch.arange(9), vocab_size=V), ODD):
            model.set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
        model.generate_batch(*row(1, 2))
        assert asker.metric("sessions") == 1
    assert asker.metric("sessions") == 0
    check_answer(asker.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))
    asker.close()


def test_a_server_restarted_on_its_port_answers_over_the_map_that_it_lost(target: CodedTarget) -> None:
    with serving(target) as before, closing(before.url, max_retries=0) as model:
        model.set_vocab_mapping(ODD.selected_token_ids, ODD.selected_token_mask)
        model.generate_batch(*row(1, 2))
        before.stop()
        with serving(CodedTarget(), port=int(before.url.rpartition(":")[2])):
            ids = torch.tensor([[5, 6, 7]])
            check_answer(model.generate_batch(*row(5, 6, 7)).tensors(), ids, ODD.selected_token_ids)


def test_a_request_cancelled_before_its_forward_gets_none(
    target: CodedTarget, server: TargetServer, model: RemoteEagle3TargetModel
) -> None:
    asker = Asker(server.url)
    target.gate.clear()
    first = model.generate_batch_async(*row(1, 2))
    wait_until(lambda: len(target.forwards) == 1)
    second, third = (model.generate_batch_async(*row(*ids)) for ids in ((3, 4), (5, 6)))
    wait_until(lambda: asker.metric("waiting") == 2)
    assert second.cancel()
    wait_until(lambda: asker.metric("waiting") == 1)
    target.gate.set()
    check_answer(first.result(30).tensors(), torch.tensor([[1, 2]]))
    check_answer(third.result(30).tensors(), torch.tensor([[5, 6]]))
    with pytest.raises(CancelledError):
        second.result(0)
    assert [ids.tolist() for ids in target.forwards] == [[[1, 2]], [[5, 6]]]
    asker.close()


def test_a_forward_that_fails_fails_its_own_request_alone(target: CodedTarget, model: RemoteEagle3TargetModel) -> None:
    target.poison = {13}
    handles = [model.generate_batch_async(*row(first, 2)) for first in (12, 13, 14)]
    with pytest.raises(TargetError, match="device-side assert"):
        handles[1].result(30)
    for first, handle in ((12, handles[0]), (14, handles[2])):
        check_answer(handle.result(30).tensors(), torch.tensor([[first, 2]]))


def test_requests_wait_for_a_server_that_is_still_warming_up(target: CodedTarget) -> None:
    target.gate.clear()
    with serving(target, ready=False) as server, closing(server.url, max_retries=0) as model:
        handles = [model.generate_batch_async(*row(first, 2)) for first in range(4)]
        wait_until(lambda: len(target.forwards) == 1)
        with pytest.raises(TimeoutError):
            handles[0].result(0.1)
        target.gate.set()
        for first, handle in enumerate(handles):
            check_answer(handle.result(30).tensors(), torch.tensor([[first, 2]]))


def test_a_server_with_a_token_answers_those_who_have_it(target: CodedTarget) -> None:
    with serving(target, token=TOKEN) as server:
        with closing(server.url, token=TOKEN) as model:
            check_answer(model.generate_batch(*row(1, 2)).tensors(), torch.tensor([[1, 2]]))
        for wrong in ("", TOKEN[:-1] + "0"):
            with closing(server.url, token=wrong) as model, pytest.raises(ConfigError, match="token"):
                model.generate_batch(*row(1, 2))


def test_cuda_is_the_device_that_is_current_for_whoever_makes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)  # in the threads that fetch answers it would be 0
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with closing("http://127.0.0.1:1", device="cuda") as model:
        assert model._device == torch.device("cuda", 3)
    with closing("http://127.0.0.1:1", device="cuda:1") as model:
        assert model._device == torch.device("cuda", 1)


@pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_there_is_refused_before_anything_is_asked(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"{device}: no such device, got {count} CUDA devices"):
        RemoteEagle3TargetModel(["http://127.0.0.1:1"], device=device)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_no_clock_can_count_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="a finite timeout > 0"):
        RemoteEagle3TargetModel(["http://127.0.0.1:1"], device="cpu", timeout=timeout)


def test_a_server_on_ipv6_is_reached(target: CodedTarget) -> None:
    if not has_ipv6():
        pytest.skip("no IPv6 on this machine's loopback")
    with serving(target, host="::1") as server, closing(server.url) as model:
        assert "[::1]" in server.url
        check_answer(model.generate_batch(*row(1, 2)).tensors(), torch.tensor([[1, 2]]))


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_memory_stays_flat_over_many_answers() -> None:
    def wide(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows, torch.ones_like(rows), torch.ones_like(rows)

    ids = torch.randint(0, V, (2, POSITIONS))
    answer_bytes = ids.numel() * 4 * (3 * 64 + V)
    with serving(CodedTarget()) as server, closing(server.url) as model:
        for _ in range(20):
            model.generate_batch(*wide(ids))
        before = resident_bytes()
        for handle in [model.generate_batch_async(*wide(ids)) for _ in range(4) for _ in range(4)]:
            handle.result(60)
        for _ in range(150):
            model.generate_batch(*wide(ids))
        assert resident_bytes() - before < 40 * answer_bytes  # 166 came


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123  no file of ours
        return int(file.read().split()[1]) * 4096


def test_closing_leaves_no_threads(server: TargetServer) -> None:
    def mine() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("eaglefeed-remote")]

    with closing(server.url, in_flight=3) as model:
        handles = [model.generate_batch_async(*row(first, 2)) for first in range(5)]
        for handle in handles:
            handle.result(30)
        assert mine()
    assert not mine()
