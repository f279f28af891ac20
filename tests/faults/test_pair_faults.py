"""Processes on one side of a pair group that are killed or stand still, and what the other side makes of it.

Deadlines are far beyond a test's own timeout where the fault must show by itself.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pair_sides
from eaglefeed.errors import PeerGone
from eaglefeed.storage.pair_group import RECEIVER, SENDER
from faults.processes import wait_until
from pair_sides import is_answer

LARGE = 64 * 2**20
NUMEL = LARGE // 4
NEVER_S, SHORT_S = 3600.0, 0.5


def _memory() -> torch.Tensor:
    return torch.zeros(LARGE, dtype=torch.uint8)


def test_a_receiver_notices_that_an_idle_sender_was_killed() -> None:
    with pair_sides.pair_with_process(SENDER, LARGE, NEVER_S) as (group, child, _pipe):
        child.kill()
        with pytest.raises(PeerGone):
            group.receive([_memory()], label=b"", timeout_s=NEVER_S)


def test_a_sender_notices_that_an_idle_receiver_was_killed() -> None:
    with pair_sides.pair_with_process(RECEIVER, LARGE, NEVER_S) as (group, child, _pipe):
        child.kill()
        with pytest.raises(PeerGone):
            group.send([_memory()], label=b"", timeout_s=NEVER_S)


def test_a_receiver_notices_that_the_sender_was_killed_in_mid_transfer() -> None:
    assert _strikes(lambda: _struck(signal.SIGKILL, NEVER_S))


def test_a_sender_notices_that_the_receiver_was_killed_in_mid_transfer() -> None:
    with pair_sides.pair_with_process(RECEIVER, LARGE, NEVER_S, signal.SIGKILL) as (group, _child, pipe):
        pipe.send("go")
        with pytest.raises(PeerGone):
            group.send([_memory()], label=b"", timeout_s=NEVER_S)


def test_a_receiver_of_a_sender_that_stands_still_gives_up_at_its_deadline() -> None:
    before = pair_sides.held()
    assert _strikes(lambda: _struck(signal.SIGSTOP, SHORT_S))
    wait_until(lambda: pair_sides.nothing_left_since(before))


def test_a_sender_to_a_receiver_that_stands_still_gives_up_at_its_deadline() -> None:
    before = pair_sides.held()
    with pair_sides.pair_with_process(RECEIVER, LARGE, NEVER_S, signal.SIGSTOP) as (group, _child, pipe):
        pipe.send("go")
        with pytest.raises(PeerGone):
            group.send([_memory()], label=b"", timeout_s=SHORT_S)
        assert group.broken
    wait_until(lambda: pair_sides.nothing_left_since(before))


def test_both_processes_survive_sizes_that_disagree() -> None:
    with pair_sides.pair_with_process(SENDER, LARGE, NEVER_S) as (group, child, pipe):
        pipe.send("go")
        with pytest.raises(PeerGone):
            group.receive([_memory()[1:]], label=b"", timeout_s=NEVER_S)
        assert pipe.recv() == "PeerGone"
        assert child.is_alive()


def test_a_receiver_that_gives_up_frees_the_sender() -> None:
    with pair_sides.pair_with_process(SENDER, LARGE, NEVER_S) as (group, _child, pipe):
        pipe.send("go")
        with pytest.raises(PeerGone):
            group.receive([_memory()], label=b"", timeout_s=0.001)
        assert pipe.recv() == "PeerGone"


def test_a_server_killed_in_mid_transfer_is_a_retryable_error_and_the_next_server_answers() -> None:
    def is_cut() -> bool:
        with pair_sides.process(pair_sides.serve_in_process) as (child, pipe), pair_sides.asking(pipe.recv()) as client:
            request = client.exchange.open(
                "/t", pair_sides.asked(1, NUMEL), timeout_s=NEVER_S, subject="answer", max_bytes=2 * LARGE
            )
            try:
                with request as answer:
                    answer.read(memoryview(bytearray(answer.num_bytes)), lambda _done: child.kill())
            except PeerGone as error:
                return error.retryable
            return False

    assert _strikes(is_cut)
    with pair_sides.serving() as server, pair_sides.asking(server.url) as another:
        assert is_answer(another.ask(2), 2, 10)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_serves_on_when_a_client_dies_or_stands_still_in_mid_transfer(kind: signal.Signals) -> None:
    with pair_sides.serving(pair_timeout_s=NEVER_S if kind is signal.SIGKILL else 1.0) as server:
        with pair_sides.asking(server.url) as client:
            client.ask(0)
            before = pair_sides.held()
            with pair_sides.process(pair_sides.ask_and_signal_self, server.url, NUMEL, kind) as (_child, _pipe):
                wait_until(lambda: len(server.over) == 2)
                assert is_answer(client.ask(2), 2, 10)
                wait_until(lambda: len(server.pairs._pairs) == 1)
                assert is_answer(client.ask(3), 3, 10)
            wait_until(lambda: pair_sides.nothing_left_since(before))
        assert set(server.over) == {"pair"}


def test_after_an_interrupted_transfer_comes_the_next_epoch_and_the_right_answer() -> None:
    with pair_sides.serving() as server, pair_sides.asking(server.url) as client:
        for epoch in (1, 2, 3):
            request = client.exchange.open(
                "/t", pair_sides.asked(epoch, NUMEL // 8), timeout_s=0.5, subject="answer", max_bytes=LARGE
            )
            with pytest.raises(_GivenUpError), request as answer:
                answer.read(memoryview(bytearray(answer.num_bytes)), _give_up)
            assert client.epochs() == [epoch]
            if epoch == 3:
                assert is_answer(client.ask(7, NUMEL // 8), 7, NUMEL // 8)
        assert client.epochs() == [4]
        assert set(server.over) == {"pair"}


def test_the_memory_of_an_answer_is_given_back_when_its_client_dies() -> None:
    with pair_sides.serving() as server:
        peaks = []
        for _ in range(3):
            with pair_sides.process(pair_sides.ask_and_signal_self, server.url, NUMEL, signal.SIGKILL):
                wait_until(lambda: len(server.over) > len(peaks))
                wait_until(lambda: not server.pairs._pairs)
            peaks.append(_resident_bytes())
        assert peaks[2] < peaks[0] + LARGE


def _strikes(is_cut: Callable[[], bool]) -> bool:
    """Whether a fault hits its transfer in the middle, in one of some attempts: on a busy machine all may be there."""
    return any(is_cut() for _ in range(8))


def _struck(kind: signal.Signals, timeout_s: float) -> bool:
    """Receive from a process that gets a signal as soon as something is there; whether that broke the transfer."""
    with pair_sides.pair_with_process(SENDER, LARGE, NEVER_S) as (group, child, pipe):
        pipe.send("go")
        try:
            group.receive(
                [_memory()], label=b"", timeout_s=timeout_s, arrived=lambda _done: os.kill(child.pid or 0, kind)
            )
        except PeerGone:
            return group.broken
        return False


class _GivenUpError(Exception):
    pass


def _give_up(_done: int) -> None:
    raise _GivenUpError


def _resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024
