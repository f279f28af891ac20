"""Ports: those that are chosen by themselves are never the same; one is free again once its holder is dead."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from eaglefeed.errors import ConfigError
from eaglefeed.ops.exporter import exporting
from eaglefeed.producer.engines.vllm_server import _reserved
from eaglefeed.storage.pair_store import MeetingPlace, store_at
from http_sides import App, serving

MANY = 50


def test_fifty_servers_that_start_at_once_have_fifty_ports() -> None:
    together, end = threading.Barrier(MANY), threading.Event()
    seen = threading.Semaphore(0)
    ports: list[int] = []

    def start(number: int) -> None:
        together.wait(30)
        if number % 2:
            with serving(App()) as server:
                ports.append(server.port)
                seen.release()
                end.wait(60)
        else:
            with exporting(lambda: b"", host="127.0.0.1", port=0) as exporter:
                ports.append(exporter.server_port)
                seen.release()
                end.wait(60)

    with ThreadPoolExecutor(MANY) as pool:
        started = [pool.submit(start, number) for number in range(MANY)]
        try:
            for _ in range(MANY):
                assert seen.acquire(timeout=60)
            for port in ports:
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
        finally:
            end.set()
        for each in started:
            each.result(60)
    assert len(set(ports)) == MANY
    assert 0 not in ports


def test_a_port_that_is_kept_for_an_engine_is_given_to_nobody_else_and_taken_by_the_engine() -> None:
    with ExitStack() as stack:
        kept = [stack.enter_context(_reserved()) for _ in range(MANY)]
        ports = {each.getsockname()[1] for each in kept}
        assert len(ports) == MANY
        others = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(10 * MANY)]
        assert not ports & {each.getsockname()[1] for each in others}
        for port in ports:
            with pytest.raises(ConnectionRefusedError):  # nobody waits for what never comes
                socket.create_connection(("127.0.0.1", port), timeout=10)
            for _ in range(2):  # the engine, and the one that follows it
                with (
                    socket.create_server(("127.0.0.1", port)) as engine,
                    socket.create_connection(("127.0.0.1", port), timeout=10),
                ):
                    engine.settimeout(10)
                    engine.accept()[0].close()


PROGRAM = """
import sys, threading
from eaglefeed.storage.pair_store import MeetingPlace
from http_sides import App, serving
from eaglefeed.storage.serving import HttpServer
server, place = HttpServer(App()), MeetingPlace("127.0.0.1", int(sys.argv[2]))
server.start("127.0.0.1", int(sys.argv[1]))
place.store("key", 10.0).set("a", "b")
print(server.port, place.port, flush=True)
threading.Event().wait()
"""


@contextmanager
def holder(port: int, place: int) -> Iterator[tuple["subprocess.Popen[str]", int, int]]:
    words = [sys.executable, "-c", PROGRAM, str(port), str(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            first, second = map(int, process.stdout.readline().split())
            yield process, first, second
        finally:
            process.kill()


def test_a_server_that_was_killed_with_clients_is_started_again_at_once_on_its_ports() -> None:
    with ExitStack() as stack:
        with holder(0, 0) as (process, port, place):
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(3)]
            joined = store_at("127.0.0.1", place, "key", 10.0)
            assert joined.get("a") == b"b"
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        with holder(port, place) as (_, again, place_again):
            assert (again, place_again) == (port, place)
            assert store_at("127.0.0.1", place, "key", 10.0).get("a") == b"b"
        assert len(clients) == 3


@pytest.mark.parametrize("port", [1 << 16, -1])
def test_a_port_that_is_none_is_refused_where_pairs_meet(port: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}"):
        MeetingPlace("127.0.0.1", port)
