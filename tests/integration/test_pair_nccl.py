"""Pair groups over NCCL: two GPUs, one a process."""

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import structlog
import torch

import pair_sides
from eaglefeed.errors import PeerGone
from eaglefeed.storage.control import ControlClient
from eaglefeed.storage.pair_group import RECEIVER, SENDER, PairGroup, join_pair
from eaglefeed.storage.pair_nccl import _spared_process
from eaglefeed.storage.pair_pool import PairPool
from eaglefeed.storage.pair_store import MeetingPlace, store_at

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NUM_BYTES = 64 * 2**20
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("before", [None, "3"])
def test_torch_leaves_errors_to_us_only_for_the_groups_that_are_ours(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with _spared_process():
        assert os.environ[NAME] == "0"
    assert os.environ.get(NAME) == before


def test_a_client_without_nccl_says_so_once_and_uses_the_body() -> None:
    client = ControlClient("http://127.0.0.1:1")
    pool = PairPool(client, backend="nccl", device=pair_sides.CPU, max_pairs=4, timeout_s=1.0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            with pool.borrow() as pair:
                assert pair is None
    assert [line["wanted"] for line in logs] == ["nccl"]
    pool.close()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_an_error_of_ours() -> None:
    with pytest.raises(PeerGone, match="no nccl pair group"):
        join_pair(torch.distributed.HashStore(), backend="nccl", rank=SENDER, timeout_s=1.0)


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    opened = MeetingPlace("127.0.0.1", 0)
    yield opened
    opened.close()


def _nccl_side(pipe: Connection, port: int, key: str, cuda: int) -> None:
    """Send 0, 1, 2, … of NUM_BYTES whenever told to."""
    store = store_at("127.0.0.1", port, key, 30.0)
    device = torch.device("cuda", cuda)
    group = join_pair(store, backend="nccl", rank=SENDER, timeout_s=60.0, device=device)
    for label in iter(pipe.recv, b""):
        data = torch.arange(NUM_BYTES, device=device).to(torch.uint8)
        group.send([data[:1000], data], label=label, timeout_s=60.0)
        pipe.send("sent")
    group.close()


def _joined(place: MeetingPlace, key: str) -> PairGroup:
    device = torch.device("cuda", 1)
    return join_pair(place.store(key, 30.0), backend="nccl", rank=RECEIVER, timeout_s=60.0, device=device)


def _memories() -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8, device="cuda:1") for size in (1000, NUM_BYTES)]


def _is_right(memories: list[torch.Tensor]) -> bool:
    return all(torch.equal(memory.cpu(), torch.arange(memory.numel()).to(torch.uint8)) for memory in memories)


@pytest.mark.gpu
@needs_two
def test_tensors_go_from_one_gpu_to_another(place: MeetingPlace) -> None:
    with pair_sides.process(_nccl_side, place.port, "a", 0) as (_child, pipe):
        group = _joined(place, "a")
        for label in (b"first", b"second"):
            pipe.send(label)
            memories = _memories()
            group.receive(memories, label=label, timeout_s=60.0)
            assert _is_right(memories)
            assert pipe.recv() == "sent"
        pipe.send(b"")
        group.close()


@pytest.mark.gpu
@needs_two
def test_a_killed_sender_ends_the_transfer_and_not_the_receivers_process(place: MeetingPlace) -> None:
    with pair_sides.process(_nccl_side, place.port, "a", 0) as (child, _pipe):
        group = _joined(place, "a")
        child.kill()
        with pytest.raises(PeerGone):
            group.receive(_memories(), label=b"", timeout_s=10.0)
    with pair_sides.process(_nccl_side, place.port, "b", 0) as (_child, pipe):
        group = _joined(place, "b")
        pipe.send(b"again")
        memories = _memories()
        group.receive(memories, label=b"again", timeout_s=60.0)
        assert _is_right(memories)
        group.close()


@pytest.mark.gpu
@needs_two
def test_another_transfer_is_refused_before_any_of_it_is_written(place: MeetingPlace) -> None:
    with pair_sides.process(_nccl_side, place.port, "a", 0) as (_child, pipe):
        group = _joined(place, "a")
        pipe.send(b"one")
        memories = _memories()
        with pytest.raises(PeerGone):
            group.receive(memories, label=b"another", timeout_s=10.0)
        assert not any(memory.any() for memory in memories)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_peer_that_never_comes_does_not_block_beyond_the_deadline(place: MeetingPlace) -> None:
    with pytest.raises(PeerGone):
        join_pair(place.store("alone", 5.0), backend="nccl", rank=SENDER, timeout_s=3.0, device=torch.device("cuda", 0))
