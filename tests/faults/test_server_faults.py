"""A target server whose clients hang up, dawdle, die or have no token, whose target fails, and that is told to stop."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from coded_target import POSITIONS, CodedTarget, V, check_answer, row
from eaglefeed.errors import ConfigError, TargetError, TargetUnavailable
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer
from eaglefeed.schema.protocol import GENERATE, HEALTH, MODEL_INFO, READY, TIMEOUT_HEADER
from eaglefeed.storage.control import Abort, Refused
from faults.processes import wait_until
from target_servers import Asker, rows_body, serving

TOKEN = "a token of a test's own"[2:].replace(" ", "-")
ANSWER_BYTES = 32 * POSITIONS * 1024
TESTS = Path(__file__).parents[1]


@pytest.fixture
def target() -> CodedTarget:
    torch.set_num_threads(1)
    return CodedTarget()


def wide_rows(num_rows: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows whose answer, 1 KiB a token, is larger than any socket's buffers."""
    ids = torch.arange(num_rows * POSITIONS).reshape(num_rows, POSITIONS) % V
    return ids, torch.ones_like(ids), torch.ones_like(ids)


def raw_request(
    url: str, body: bytes | bytearray, *, timeout_s: float = 60.0, length: int | None = None
) -> socket.socket:
    """A client that has sent its request and reads nothing."""
    port = int(url.rpartition(":")[2])
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    size = len(body) if length is None else length
    head = f"POST {GENERATE} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n{TIMEOUT_HEADER}: {timeout_s}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_a_failing_forward_fails_its_own_request_only(target: CodedTarget):
    target.poison = {13}
    with serving(target, max_in_flight=8) as server, ThreadPoolExecutor(8) as pool, Asker(server.url) as client:

        def ask(index: int) -> None:
            if index % 4:
                check_answer(client.ask(row(1, 2, index)).tensors, row(1, 2, index)[0])
                return
            with pytest.raises(Refused) as refused:
                client.ask(row(1, 2, 13))
            assert (refused.value.status, type(refused.value.error)) == (500, TargetError)
            assert "device-side assert" in str(refused.value.error)

        list(pool.map(ask, [index for index in range(1, 41) if index != 13]))


def test_more_than_may_wait_are_told_to_come_again_with_when(target: CodedTarget):
    limits = {"max_in_flight": 1, "max_waiting": 2}
    with serving(target, **limits) as server, ThreadPoolExecutor(3) as pool, Asker(server.url) as client:
        target.gate.clear()
        asked = [pool.submit(client.ask, row(0, 1))]
        wait_until(lambda: client.metric("in_flight") == 1)
        asked += [pool.submit(client.ask, row(index, 1)) for index in (1, 2)]
        wait_until(lambda: client.metric("waiting") == 2)
        with pytest.raises(Refused) as refused:
            client.ask(row(5, 1))
        assert (refused.value.status, type(refused.value.error)) == (503, TargetUnavailable)
        with raw_request(server.url, rows_body(row(5, 1))) as sock:
            head = sock.recv(4096)
        assert re.search(rb"(?i)^HTTP/1.1 503 .*\r\nretry-after: 1\r\n", head, re.DOTALL)
        target.gate.set()
        for index, future in enumerate(asked):
            check_answer(future.result(30).tensors, torch.tensor([[index, 1]]))


def test_work_whose_client_hangs_up_never_reaches_the_forward(target: CodedTarget):
    with serving(target, max_in_flight=1) as server, ThreadPoolExecutor(2) as pool, Asker(server.url) as client:
        target.gate.clear()
        first = pool.submit(client.ask, row(1, 2))
        wait_until(lambda: client.metric("in_flight") == 1)
        abort = Abort()
        body = rows_body(row(40, 41))
        given_up = pool.submit(client.call, GENERATE, body, timeout_s=300, abort=abort)
        wait_until(lambda: client.metric("waiting") == 1)
        abort.set()
        assert isinstance(given_up.exception(30), TargetUnavailable)
        wait_until(lambda: client.metric("waiting") == 0)
        assert client.metric("cancelled_total") == 1
        target.gate.set()
        first.result(30)
        client.ask(row(3, 4))
        assert all(40 not in ids for ids in target.forwards)


def test_work_that_is_late_never_reaches_the_forward(target: CodedTarget):
    with serving(target, max_in_flight=1) as server, ThreadPoolExecutor(1) as pool, Asker(server.url) as client:
        target.gate.clear()
        first = pool.submit(client.ask, row(1, 2))
        wait_until(lambda: client.metric("in_flight") == 1)
        with raw_request(server.url, rows_body(row(40, 41)), timeout_s=0.3) as sock:
            assert sock.recv(12) == b"HTTP/1.1 503"
        target.gate.set()
        first.result(30)
        client.ask(row(3, 4))
        assert all(40 not in ids for ids in target.forwards)


def test_a_client_that_reads_nothing_holds_the_others_no_longer_than_its_own_deadline(target: CodedTarget):
    with serving(target, max_in_flight=1) as server, Asker(server.url) as client:
        slow = raw_request(server.url, rows_body(wide_rows()), timeout_s=1.5)
        wait_until(lambda: client.metric("answered_total") == 1)
        assert client.metric("in_flight") == 1
        check_answer(client.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))
        wait_until(lambda: client.metric("in_flight") == 0)
        with slow:
            assert sum(iter(lambda: len(slow.recv(2**20)), 0)) < ANSWER_BYTES


@pytest.mark.parametrize("read_bytes", [0, 200_000])
def test_a_client_that_hangs_up_in_its_answer_frees_its_place(target: CodedTarget, read_bytes: int):
    with serving(target, max_in_flight=1) as server, Asker(server.url) as client:
        for _ in range(3):
            with raw_request(server.url, rows_body(wide_rows())) as leaver:
                left = read_bytes
                while left > 0:
                    left -= len(leaver.recv(left))
        check_answer(client.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))
        wait_until(lambda: client.metric("in_flight") == 0)


def test_a_body_cut_short_or_too_large_costs_nobody_anything(target: CodedTarget):
    body = rows_body(row(1, 2))
    with serving(target, max_request_bytes=len(body)) as server, Asker(server.url) as client:
        raw_request(server.url, body[:-1], length=len(body)).close()
        with raw_request(server.url, b"", length=10 * 2**30) as sock:
            assert sock.recv(12) == b"HTTP/1.1 413"
        check_answer(client.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))
        assert len(target.forwards) == 2


def test_without_its_token_nothing_but_health_is_answered(target: CodedTarget):
    with serving(target, token=TOKEN) as server:
        with Asker(server.url, token=TOKEN) as client:
            check_answer(client.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))
        for token in ("", TOKEN[:-1], TOKEN + "x"):
            with Asker(server.url, token=token) as client:
                assert client.call(HEALTH, method="GET", timeout_s=10).status == 200
                for ask in (lambda c: c.ask(row(1, 2)), lambda c: c.call(MODEL_INFO, timeout_s=10)):
                    with pytest.raises(Refused) as refused:
                        ask(client)
                    assert (refused.value.status, type(refused.value.error)) == (401, ConfigError)
        assert len(target.forwards) == 2


def test_it_listens_beyond_this_machine_only_with_a_token(target: CodedTarget):
    server = TargetServer(target, info_of(target, "test"), host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"access\.token_file"):
        server.start()


def test_a_port_in_use_is_said_with_what_to_do(target: CodedTarget):
    with serving(target) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"cannot listen.*another host or port"):
            TargetServer(target, info_of(target, "test"), port=port).start()


def test_a_warm_up_that_fails_ends_the_server_with_its_reason(target: CodedTarget):
    target.poison = {1}
    server = TargetServer(target, info_of(target, "test"))
    server.start()
    with pytest.raises(TargetError, match="warm-up"):
        server.wait_ready(30)
    with Asker(server.url) as client, pytest.raises(Refused) as refused:
        client.ask(row(1, 2))
    assert refused.value.status == 503
    server.stop()


def takes_requests(url: str) -> bool:
    with Asker(url) as client:
        try:
            return client.call(READY, method="GET", timeout_s=10).status == 200
        except (Refused, TargetUnavailable):
            return False


def test_stopping_refuses_new_requests_and_answers_those_that_are_there(target: CodedTarget):
    with serving(target, max_in_flight=1) as server, ThreadPoolExecutor(3) as pool, Asker(server.url) as client:
        target.gate.clear()
        asked = [pool.submit(client.ask, row(index, 1)) for index in range(2)]
        wait_until(lambda: client.metric("waiting") == 1)
        stopped = pool.submit(server.stop, 30.0)
        wait_until(lambda: not takes_requests(server.url))
        target.gate.set()
        for index, future in enumerate(asked):
            check_answer(future.result(30).tensors, torch.tensor([[index, 1]]))
        assert stopped.result(30).answered == 2


@contextmanager
def server_process(forward_s: float = 0.0, max_in_flight: int = 2) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own process, and its address."""
    words = [sys.executable, "-m", "faults.target_process", str(forward_s), str(max_in_flight)]
    # Or malloc would keep what was freed, for later, and what the server holds could not be told from outside.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=TESTS, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_sigterm_drains_and_ends_well():
    with server_process(forward_s=1.0) as (process, url), ThreadPoolExecutor(2) as pool, Asker(url) as client:
        asked = [pool.submit(client.ask, row(index, 1)) for index in range(2)]
        wait_until(lambda: (client.metric("in_flight"), client.metric("waiting")) == (1, 1))
        process.send_signal(signal.SIGTERM)
        for index, future in enumerate(asked):
            assert future.result(30).tensors["input_ids"].tolist() == [[1, 0]]
            assert future.result().tensors["aux_hidden_states"][0, :, 0].tolist() == [index + 1, index + 2]
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out.strip()) == (0, "2")


CLIENT = """
import sys
from coded_target import row
from target_servers import Asker
Asker(sys.argv[1]).ask(row(40, 41))
"""


@pytest.mark.parametrize("moment", ["waiting", "in its forward"])
def test_a_client_that_is_killed_leaves_a_server_that_serves_the_next_in_time(target: CodedTarget, moment: str):
    with serving(target, max_in_flight=1) as server, ThreadPoolExecutor(1) as pool, Asker(server.url) as client:
        target.gate.clear()
        first = pool.submit(client.ask, row(1, 2)) if moment == "waiting" else None
        wait_until(lambda: client.metric("in_flight") == (first is not None))
        words = [
            sys.executable,
            "-c",
            CLIENT,
            server.url,
        ]
        with subprocess.Popen(words, cwd=TESTS) as killed:
            wait_until(lambda: client.metric("waiting" if first else "in_flight") == 1)
            killed.kill()
        target.gate.set()
        if first:
            first.result(30)
        check_answer(client.ask(row(3, 4)).tensors, torch.tensor([[3, 4]]))
        wait_until(lambda: client.metric("in_flight") == 0)


def memory_kib(process: subprocess.Popen[str], name: str) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found
    return int(found[1])


def test_memory_grows_by_no_more_than_the_answers_in_flight_and_not_with_the_number_of_requests():
    with server_process(max_in_flight=2) as (process, url), ThreadPoolExecutor(8) as pool, Asker(url) as client:

        def ask(rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], times: int) -> None:
            list(pool.map(lambda _: client.ask(rows).tensors.clear(), range(times)))

        small, large = row(*range(20)), wide_rows(8)
        ask(small, 100)
        before = memory_kib(process, "VmRSS")
        ask(small, 500)
        assert memory_kib(process, "VmRSS") - before < 4 * 1024
        answer_kib = sum(tensor.nbytes for tensor in client.ask(large).tensors.values()) // 1024
        assert answer_kib > 48 * 1024
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        before = memory_kib(process, "VmRSS")
        ask(large, 16)
        assert memory_kib(process, "VmHWM") - before < 2.5 * answer_kib  # two, and the last hidden states of one
