"""Answers over gloo pairs, or in the body where no pair can be had: a server and its clients in this process."""

import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import structlog
import torch
from torch import Tensor

import pair_sides
from eaglefeed.errors import EaglefeedError, PeerGone, SampleCorrupt, SchemaError, StorageError, TargetUnavailable
from eaglefeed.schema.protocol import PairGrant, PairRequest
from eaglefeed.storage import pair_pool
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.control import Refused
from eaglefeed.storage.pair_host import PairHost
from faults.processes import wait_until
from pair_sides import PairClient, PairServer, is_answer

LARGE = 3_000_000  # 12 MB of float32: several pieces


@pytest.fixture
def server() -> Iterator[PairServer]:
    with pair_sides.serving() as started:
        yield started


@pytest.fixture
def client(server: PairServer) -> Iterator[PairClient]:
    with pair_sides.asking(server.url) as opened:
        yield opened


@pytest.mark.parametrize("numel", [0, 1, LARGE])
def test_an_answer_over_a_pair_is_the_one_that_was_sent(server: PairServer, client: PairClient, numel: int) -> None:
    for seed in range(3):
        assert is_answer(client.ask(seed, numel), seed, numel)
    assert server.over == ["pair"] * 3
    assert client.epochs() == [1]


def test_without_a_pool_the_answer_comes_in_the_body(server: PairServer) -> None:
    with pair_sides.asking(server.url) as client:
        client.exchange._pool = None
        assert is_answer(client.ask(4), 4, 10)
    assert server.over == ["body"]


def test_clients_in_many_threads_each_get_their_own_answer(server: PairServer, client: PairClient) -> None:
    wrong: list[int] = []

    def ask(first: int) -> None:
        for seed in range(first, first + 20):
            if not is_answer(client.ask(seed, seed * 100), seed, seed * 100):
                wrong.append(seed)

    assert pair_sides.together(*(partial(ask, first) for first in range(0, 160, 20))) == [None] * 8
    assert wrong == []
    assert "pair" in server.over


def test_a_request_waits_for_no_pair_when_all_are_busy(server: PairServer) -> None:
    first_is_in, first_may_go = threading.Event(), threading.Event()

    def before(seed: int) -> None:
        if seed == 1:
            first_is_in.set()
            assert first_may_go.wait(20)

    server.before = before
    with pair_sides.asking(server.url, max_pairs=1) as client:
        first = threading.Thread(target=client.ask, args=(1,))
        first.start()
        assert first_is_in.wait(20)
        assert is_answer(client.ask(2), 2, 10)
        first_may_go.set()
        first.join()
    assert server.over == ["body", "pair"]


def test_tensors_are_received_into_the_ring_and_kept_ones_do_not_change(server: PairServer) -> None:
    ring = BufferRing(1, deadline_s=0.0)
    with pair_sides.asking(server.url, ring=ring) as client:
        kept = client.ask(1, LARGE)
        assert ring.held() == ["answer 1"]
        other = client.ask(2, LARGE)
        assert is_answer(kept, 1, LARGE)
        assert is_answer(other, 2, LARGE)
        del kept, other
        assert ring.held() == []


def test_damage_on_the_way_is_found_and_the_next_answer_is_right(server: PairServer, client: PairClient) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["values"][LARGE // 2] += 1

    server.spoil = spoil
    with pytest.raises(SampleCorrupt, match="checksum of values differs"):
        client.ask(1, LARGE)
    server.spoil = lambda _tensors: None
    assert is_answer(client.ask(2, LARGE), 2, LARGE)


def test_an_answer_that_is_too_large_is_refused_before_any_of_it_comes(server: PairServer, client: PairClient) -> None:
    client.ask(1)
    with pytest.raises(SampleCorrupt, match="not asked for"):
        client.ask(2, LARGE, max_bytes=1000)
    assert is_answer(client.ask(3), 3, 10)
    assert client.epochs() == [2]


def test_a_refusal_leaves_the_pair_as_it_is(server: PairServer, client: PairClient) -> None:
    def refuse(seed: int) -> None:
        if seed == 2:
            raise TargetUnavailable("busy")

    server.before = refuse
    client.ask(1)
    with pytest.raises(Refused):
        client.ask(2)
    assert is_answer(client.ask(3), 3, 10)
    assert client.epochs() == [1]


def test_a_request_given_up_never_shifts_the_next_ones_answer(server: PairServer, client: PairClient) -> None:
    may_go = threading.Event()
    server.before = lambda seed: None if seed != 2 else (may_go.wait(20), None)[1]
    client.ask(1)
    with pytest.raises(TargetUnavailable):
        client.ask(2, LARGE, timeout_s=0.3)
    may_go.set()  # the server now sends what nobody waits for
    assert [is_answer(client.ask(seed, LARGE), seed, LARGE) for seed in (3, 4)] == [True, True]
    assert client.epochs() == [2]


def test_a_server_that_lost_its_pairs_answers_in_the_body_and_then_over_new_ones(
    server: PairServer, client: PairClient
) -> None:
    client.ask(1)
    server.pairs._drop(lambda _pair: True)
    assert [is_answer(client.ask(seed), seed, 10) for seed in (2, 3)] == [True, True]
    assert server.over == ["pair", "body", "pair"]


def test_a_server_without_pairs_is_asked_once_and_said_once(server: PairServer, client: PairClient) -> None:
    server.pairs._backends = ()
    with structlog.testing.capture_logs() as logs:
        answers = [client.ask(seed) for seed in range(3)]
    assert all(is_answer(answer, seed, 10) for seed, answer in enumerate(answers))
    assert server.over == ["body"] * 3
    assert [(line["event"], line["wanted"]) for line in logs] == [("tensors_come_over_http", "gloo")]


def test_a_client_whose_torch_has_no_gloo_says_so_once(
    server: PairServer, client: PairClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_pool, "pair_backends", lambda _device: ())
    with structlog.testing.capture_logs() as logs:
        assert is_answer(client.ask(1), 1, 10)
        assert is_answer(client.ask(2), 2, 10)
    assert [line["event"] for line in logs] == ["tensors_come_over_http"]


def test_a_server_that_grants_pairs_and_does_not_use_them_is_not_asked_again_and_again(
    server: PairServer, client: PairClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.pairs, "backend_of", lambda _name: None)
    assert is_answer(client.ask(1), 1, 10)
    assert is_answer(client.ask(2), 2, 10)
    assert client.epochs() == [1]


def test_what_says_nothing_on_the_stores_port_holds_a_client_up_once(
    server: PairServer, client: PairClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.pool._join_s = 0.3
    with socket.create_server(("127.0.0.1", 0)) as silent:
        grant = PairGrant(port=silent.getsockname()[1], key="k")
        monkeypatch.setattr(server.pairs, "grant", lambda _request: grant)
        with structlog.testing.capture_logs() as logs:
            assert is_answer(client.ask(1), 1, 10)
            client.pool._off_until_s = 0.0  # a minute later
            assert is_answer(client.ask(2), 2, 10)
        assert [line["event"] for line in logs] == ["tensors_come_over_http"]
        assert len(client.pool._late) == 1


def test_nothing_on_the_stores_port_falls_back(
    server: PairServer, client: PairClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.pool._join_s = 0.3
    monkeypatch.setattr(server.pairs, "grant", lambda _request: PairGrant(port=1, key="k"))
    assert is_answer(client.ask(1), 1, 10)


def test_a_pair_that_does_not_come_about_leaves_its_request_time_for_the_body(
    server: PairServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.pairs, "grant", lambda _request: PairGrant(port=1, key="k"))
    with pair_sides.asking(server.url, timeout_s=3.0) as client:
        assert is_answer(client.ask(1, timeout_s=3.0), 1, 10)


def test_a_foreign_connection_to_the_stores_port_disturbs_nobody(server: PairServer, client: PairClient) -> None:
    client.ask(0)
    port = server.pairs.port
    with (
        socket.create_connection(("127.0.0.1", port)) as http,
        socket.create_connection(("127.0.0.1", port)) as noise,
        socket.create_connection(("127.0.0.1", port)),
    ):
        http.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        noise.sendall(bytes(range(256)) * 64)
        client.pool.close()
        with pair_sides.asking(server.url) as another:
            assert is_answer(another.ask(1, LARGE), 1, LARGE)
    assert server.over == ["pair", "pair"]


def test_pairs_end_with_their_pool_on_both_sides(server: PairServer) -> None:
    with pair_sides.asking(server.url) as client:
        client.ask(1)
        assert len(server.pairs._pairs) == 1
    assert server.pairs._pairs == {}


def test_many_pairs_one_after_another_leave_no_threads_sockets_or_keys_behind(server: PairServer) -> None:
    def round_of_pairs(first: int) -> None:
        with pair_sides.asking(server.url) as client:
            for seed in range(first, first + 3):
                assert is_answer(client.ask(seed), seed, 10)
                client.pool._idle[-1].close()  # as if it had broken: the next request opens another epoch

    round_of_pairs(0)
    before = pair_sides.held()
    for turn in range(10):
        round_of_pairs(turn)
    after = pair_sides.held()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2
    assert server.pairs._place is not None
    assert server.pairs._place._store is not None
    assert server.pairs._place._store.list_keys() == []


def test_a_full_server_spares_busy_and_fresh_pairs_and_sends_others_to_the_body() -> None:
    with pair_sides.serving(max_pairs=1) as server, pair_sides.asking(server.url) as first:
        first.ask(1)
        with pair_sides.asking(server.url) as second:
            assert is_answer(second.ask(2), 2, 10)
        assert is_answer(first.ask(3), 3, 10)
        assert server.over == ["pair", "body", "pair"]
        pair = next(iter(server.pairs._pairs.values()))
        wait_until(lambda: pair.is_idle)
        pair.used_s -= 31.0
        with pair_sides.asking(server.url) as third:
            assert is_answer(third.ask(4), 4, 10)
            assert is_answer(first.ask(5), 5, 10)
        assert server.over == ["pair", "body", "pair", "pair", "body"]


@pytest.mark.parametrize(("name", "epoch"), [("x", 1), ("A" * 32, 1), ("a" * 32, -1), ("a" * 33, 1)])
def test_impossible_names_are_refused(name: str, epoch: int) -> None:
    host = PairHost("127.0.0.1", 0, ("gloo",))
    with pytest.raises(SchemaError):
        host.grant(PairRequest(backend="gloo", name=name, epoch=epoch))
    host.close()


def test_pairs_have_secrets_that_differ() -> None:
    host = PairHost("127.0.0.1", 0, ("gloo",), max_pairs=3)
    keys = {host.grant(PairRequest(backend="gloo", name=f"{n:032x}", epoch=1)).key for n in range(3)}
    assert len(keys) == 3
    assert all(len(key) == 32 for key in keys)
    with pytest.raises(StorageError):
        host.grant(PairRequest(backend="gloo", name="f" * 32, epoch=1))
    host.close()


def test_a_pair_that_is_not_there_is_an_error_of_its_own() -> None:
    host = PairHost("127.0.0.1", 0, ("gloo",))
    with pytest.raises(PeerGone):
        host.send("a" * 32 + ":1", [torch.zeros(1, dtype=torch.uint8)], label=b"", timeout_s=1.0)
    host.close()


def test_a_server_out_of_reach_is_not_the_pairs_fault() -> None:
    with pair_sides.serving() as server:
        url = server.url
    with pair_sides.asking(url) as client, structlog.testing.capture_logs() as logs:
        with pytest.raises(EaglefeedError):
            client.ask(1)
        assert client.pool._off_until_s < 0
    assert logs == []


def test_over_ipv6() -> None:
    with pair_sides.serving(host="::1") as server, pair_sides.asking(server.url) as client:
        assert is_answer(client.ask(1, LARGE), 1, LARGE)
        assert server.over == ["pair"]
