"""Pair groups over gloo, both sides in this process."""

import socket
from functools import partial

import pytest
import torch

import pair_sides
from eaglefeed.errors import ConfigError, PeerGone
from eaglefeed.storage.pair_group import PairGroup, join_pair, pair_backends
from eaglefeed.storage.pair_host import PairHost
from eaglefeed.storage.pair_store import MeetingPlace
from faults.processes import wait_until

PIECE = 4 * 2**20


def _transfer(
    sender: PairGroup, receiver: PairGroup, sent: list[torch.Tensor], sizes: list[int], labels: tuple[bytes, bytes]
) -> tuple[list[torch.Tensor], list[int], list[BaseException | None]]:
    memories, arrived = [torch.zeros(size, dtype=torch.uint8) for size in sizes], list[int]()
    errors = pair_sides.together(
        partial(sender.send, sent, label=labels[0], timeout_s=30.0),
        partial(receiver.receive, memories, label=labels[1], timeout_s=30.0, arrived=arrived.append),
    )
    return memories, arrived, errors


def _random(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def test_tensors_arrive_as_they_were_sent_again_and_again() -> None:
    sender, receiver = pair_sides.joined_pair()
    for sizes in ([1], [PIECE], [PIECE + 1, 3, 2 * PIECE], [], [7] * 20):
        sent = [_random(size) for size in sizes]
        memories, arrived, errors = _transfer(sender, receiver, sent, sizes, (b"x", b"x"))
        assert errors == [None, None]
        assert all(torch.equal(memory, tensor) for memory, tensor in zip(memories, sent, strict=True))
        assert arrived == sorted(arrived)
        assert arrived[-1:] == ([sum(sizes)] if sizes else [])
    sender.close()
    receiver.close()


def test_what_is_said_to_have_arrived_is_there_already() -> None:
    sender, receiver = pair_sides.joined_pair()
    data, memory = torch.full((3 * PIECE,), 9, dtype=torch.uint8), torch.zeros(3 * PIECE, dtype=torch.uint8)
    complete: list[bool] = []
    pair_sides.together(
        lambda: sender.send([data], label=b"", timeout_s=30.0),
        lambda: receiver.receive(
            [memory], label=b"", timeout_s=30.0, arrived=lambda done: complete.append(bool((memory[:done] == 9).all()))
        ),
    )
    assert complete == [True] * 3
    sender.close()
    receiver.close()


@pytest.mark.parametrize("sizes", [[99], [101], [50, 50], []])
def test_sizes_that_disagree_never_reach_gloo_which_would_end_the_process(sizes: list[int]) -> None:
    sender, receiver = pair_sides.joined_pair()
    memories, _, errors = _transfer(sender, receiver, [_random(100)], sizes, (b"x", b"x"))
    assert [type(error) for error in errors] == [PeerGone, PeerGone]
    assert all(not memory.any() for memory in memories)


def test_a_transfer_of_something_else_is_refused_before_any_of_it_is_written() -> None:
    sender, receiver = pair_sides.joined_pair()
    memories, _, errors = _transfer(sender, receiver, [_random(100)], [100], (b"one answer", b"another"))
    assert [type(error) for error in errors] == [PeerGone, PeerGone]
    assert not memories[0].any()


def test_a_broken_group_is_broken_for_good() -> None:
    sender, receiver = pair_sides.joined_pair()
    _transfer(sender, receiver, [_random(100)], [100], (b"one answer", b"another"))
    assert sender.broken
    assert receiver.broken
    _, _, errors = _transfer(sender, receiver, [_random(100)], [100], (b"x", b"x"))
    assert [type(error) for error in errors] == [PeerGone, PeerGone]


def test_a_sender_whose_receiver_does_not_come_gives_up_in_time() -> None:
    sender, receiver = pair_sides.joined_pair()
    with pytest.raises(PeerGone):
        sender.send([_random(100)], label=b"", timeout_s=0.2)
    receiver.close()


def test_a_receiver_whose_sender_does_not_come_gives_up_in_time() -> None:
    sender, receiver = pair_sides.joined_pair()
    with pytest.raises(PeerGone):
        receiver.receive([torch.zeros(9, dtype=torch.uint8)], label=b"", timeout_s=0.2)
    sender.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_joining_alone_gives_up_in_time(rank: int) -> None:
    with pytest.raises(PeerGone):
        join_pair(torch.distributed.HashStore(), backend="gloo", rank=rank, timeout_s=0.3)


def test_a_broken_group_gives_its_sockets_and_threads_back() -> None:
    before = pair_sides.held()
    sender, receiver = pair_sides.joined_pair()
    errors = pair_sides.together(partial(sender.send, [_random(9)], label=b"", timeout_s=0.2))
    receiver.close()
    assert isinstance(errors[0], PeerGone)
    wait_until(lambda: pair_sides.nothing_left_since(before))


def test_without_gloo_in_torch_there_is_no_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair_backends(pair_sides.CPU) == ("gloo",)
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert pair_backends(pair_sides.CPU) == ()
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    assert pair_backends(torch.device("cuda")) == ()


def test_a_port_in_use_is_said_when_the_server_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="nccl-port"):
        PairHost("127.0.0.1", taken.getsockname()[1], ("gloo",))


def test_a_server_without_data_planes_listens_nowhere() -> None:
    assert PairHost("127.0.0.1", 1, ()).port == 0


def test_the_meeting_place_forgets_a_pair_and_no_other() -> None:
    place = MeetingPlace("127.0.0.1", 0)
    one, other = place.store("one", 30.0), place.store("other", 30.0)
    one.set("0/0", "a")
    other.set("0/0", "b")
    place.forget("one")
    assert not one.check(["0/0"])
    assert other.get("0/0") == b"b"
    place.close()


def test_a_meeting_place_that_closes_gives_its_port_back() -> None:
    before = pair_sides.held()
    place = MeetingPlace("127.0.0.1", 0)
    place.store("k", 30.0).set("0/0", "a")
    place.close()
    with socket.create_server(("127.0.0.1", place.port)):
        pass
    wait_until(lambda: pair_sides.nothing_left_since(before))
