"""RemoteEagle3TargetModel gives what the target in this process gives: numbers, weights, refusals."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from coded_target import CodedTarget, V, check_answer, row
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import SchemaError
from eaglefeed.producer.server import TargetServer
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.exchange import Answer
from eaglefeed.storage.pair_group import _GlooPair
from eaglefeed.storage.wire import Deadline
from remote_models import closing
from target_servers import serving
from tiny_target import tiny_model

TINY_V, D = 259, 40
MAP = VocabMapping.from_ids(torch.arange(3, 3 + 6 * D, 6), vocab_size=TINY_V)
PLANES = ("http", "gloo")


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


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[HFEagle3TargetModel, TargetServer]]:
    """A target in this process, and a server of one like it, which is another object."""
    local, remote = (HFEagle3TargetModel(tiny_model().to(request.param)) for _ in range(2))
    with serving(remote) as started:
        yield local, started


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each answer that came over a pair group."""
    found: list[int] = []
    receive = Answer._receive

    def counted(answer: Answer, *args: Any) -> None:
        receive(answer, *args)
        found.append(answer.num_bytes)

    monkeypatch.setattr(Answer, "_receive", counted)
    return found


def random_rows(seed: int, *, batch: int = 3, length: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    """Whole rows, rows padded on the right, and rows padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY_V, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:2, length - 9 :] = 0
    mask[2:3, :7] = 0
    loss = torch.randint(0, 2, ids.shape, generator=generator)
    return ids, mask, loss


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_remote_target_gives_the_same_numbers_as_one_in_this_process_bit_for_bit(
    plane: str, mapped: bool, pair: tuple[HFEagle3TargetModel, TargetServer], received: list[int]
) -> None:
    local, started = pair
    with closing(started.url, data_plane=plane) as model:
        if mapped:
            model.set_vocab_mapping(MAP.selected_token_ids, MAP.selected_token_mask)
        local._selected = None
        if mapped:
            local.set_vocab_mapping(MAP.selected_token_ids, MAP.selected_token_mask)
        handles = [model.generate_batch_async(*random_rows(seed)) for seed in range(6)]
        for seed, handle in enumerate(handles):
            assert_equal(handle.result(60).tensors(), local.generate_batch(*random_rows(seed)).tensors())
        assert_equal(
            model.generate_batch(*random_rows(9, batch=1, length=1)).tensors(),
            local.generate_batch(*random_rows(9, batch=1, length=1)).tensors(),
        )
    assert len(received) == (7 if plane == "gloo" else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plane", ["auto", "http", "gloo"])
def test_a_remote_target_on_a_gpu_gives_the_same_numbers_on_the_clients_gpu(plane: str) -> None:
    local, remote = (HFEagle3TargetModel(tiny_model().to("cuda:0", torch.bfloat16)) for _ in range(2))
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with serving(remote) as started, closing(started.url, data_plane=plane, device=device) as model:
        for each in (local, model):
            each.set_vocab_mapping(MAP.selected_token_ids.to(device), MAP.selected_token_mask.to(device))
        handles = [model.generate_batch_async(*random_rows(seed)) for seed in range(6)]
        for seed, handle in enumerate(handles):
            found = handle.result(60).tensors()
            assert {tensor.device for tensor in found.values()} == {device}
            wanted = local.generate_batch(*random_rows(seed)).tensors()
            assert_equal({name: tensor.to("cuda:0") for name, tensor in found.items()}, wanted)
        assert model.get_input_embeddings().weight.device == device


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_what_trainers_need_of_the_target_is_the_targets(pair: tuple[HFEagle3TargetModel, TargetServer]) -> None:
    local, started = pair
    with closing(started.url) as model:
        assert torch.equal(model.get_input_embeddings().weight, local.get_input_embeddings().weight)
        assert model.get_input_embeddings() is model.get_input_embeddings()
        tensors, metadata = model.target_assets()
        wanted, wanted_metadata = local.target_assets()
        assert_equal(tensors, wanted)
        assert metadata == wanted_metadata
        info = model.model_info()
        assert (info["hidden_size"], info["vocab_size"], info["dtype"]) == (32, TINY_V, local.dtype)
        assert info["aux_layer_ids"] == local.aux_layer_ids


def test_embeddings_are_fetched_once(target: CodedTarget, model: RemoteEagle3TargetModel) -> None:
    asked: list[int] = []
    get = target.get_input_embeddings
    target.get_input_embeddings = lambda: (asked.append(1), get())[1]  # type: ignore[method-assign]
    for _ in range(3):
        model.get_input_embeddings()
    assert len(asked) == 1


@pytest.mark.parametrize("rows", ["too long", "a hole", "an unknown token", "no tokens", "no mask"])
def test_rows_that_a_target_refuses_are_refused_alike(
    rows: str, pair: tuple[HFEagle3TargetModel, TargetServer]
) -> None:
    ids, mask, loss = random_rows(1)
    if rows == "too long":
        ids, mask, loss = random_rows(1, length=300)
    elif rows == "an unknown token":
        ids[0, 3] = TINY_V
    elif rows == "no mask":
        loss[0, 3] = 2
    else:
        mask[0, 3 if rows == "a hole" else slice(None)] = 0
    local, started = pair
    with pytest.raises(SchemaError) as wanted:
        local.generate_batch(ids, mask, loss)
    with closing(started.url) as model, pytest.raises(SchemaError) as raised:
        model.generate_batch(ids, mask, loss)
    assert raised.value.what == wanted.value.what


def test_a_pair_that_breaks_in_a_transfer_is_opened_again_and_no_answer_is_anothers(
    server: TargetServer, received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = _GlooPair._send, []

    def broken_off(pair: _GlooPair, tensors: Sequence[Tensor], guard: Tensor, deadline: Deadline) -> None:
        if len(tensors) == 5 and len(received) // 4 >= len(broken):  # an answer's, and not the group's first word
            broken.append(1)
            for piece in (guard, tensors[0]):
                pair._group.send([piece], pair._peer, 0).wait()
            raise RuntimeError("broken off")
        whole(pair, tensors, guard, deadline)

    monkeypatch.setattr(_GlooPair, "_send", broken_off)
    with closing(server.url, data_plane="gloo", in_flight=3, timeout=5.0) as model:
        asked = [torch.randint(0, V, (1 + seed % 3, 2 + seed % 11)) for seed in range(20)]
        handles = [model.generate_batch_async(ids, torch.ones_like(ids), torch.ones_like(ids)) for ids in asked]
        for ids, handle in zip(asked, handles, strict=True):
            check_answer(handle.result(60).tensors(), ids)
    assert len(broken) >= 3
    assert len(received) >= 15


def test_a_batch_can_be_trained_on(model: RemoteEagle3TargetModel) -> None:
    batch = model.generate_batch(*row(1, 2, 3))
    weight = torch.ones(3 * 64, requires_grad=True)
    (batch.to_trainer_inputs()["aux_hidden_states"] @ weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, batch.aux_hidden_states.sum((0, 1)))
