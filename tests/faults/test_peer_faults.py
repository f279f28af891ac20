"""Producers that keep their samples, and those who pull them: gone, replaced, foreign, damaged, and guarded."""

import socket
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

import samples as made
from eaglefeed.errors import ConfigError, PeerGone, SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage import peers
from eaglefeed.storage.base import key_of, open_store
from eaglefeed.storage.peer import PeerStore
from faults.processes import in_thread, wait_until
from peers import TOKEN, keeping, port_of, pulling, put


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GONE_S", 0.05)


def _gone(store: PeerStore, ref: SampleRef) -> None:
    with pytest.raises(PeerGone) as caught:
        store.get(ref)
    assert caught.value.retryable


# who answers


def test_a_producer_that_is_gone_is_told_at_once_and_costs_no_second_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GONE_S", 60.0)
    with keeping() as store:
        ref = put(store)
    with pulling() as puller:
        _gone(puller, ref)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers.Peer, "pull", None)
            _gone(puller, ref)
        assert puller.delete(ref) is False


def test_a_producer_that_restarted_on_its_port_is_another_one() -> None:
    with keeping() as store:
        old, port = put(store), port_of(store)
    with keeping(f"127.0.0.1:{port}") as store, pulling() as puller:
        new = put(store)
        assert key_of(new) == key_of(old)
        _gone(puller, old)
        with pytest.raises(PeerGone):
            puller.header(old)
        assert puller.delete(old) is False
        assert puller.get(new).keys() == made.tensors().keys()
        assert puller.delete(new) is True


def test_a_producer_that_was_gone_for_a_moment_is_asked_again() -> None:
    with keeping() as store, pulling() as puller:
        ref, listener = put(store), store._server
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers.Peer, "pull", lambda *_: (_ for _ in ()).throw(PeerGone("a lost cable")))
            _gone(puller, ref)
        wait_until(lambda: _answers(puller, ref))
        assert listener is store._server


def _answers(puller: PeerStore, ref: SampleRef) -> bool:
    try:
        return bool(puller.get(ref))
    except PeerGone:
        return False


def test_whatever_else_listens_there_now_is_taken_for_a_producer_that_is_gone() -> None:
    class Foreign(BaseHTTPRequestHandler):
        replies = iter([(200, b"<html>hello"), (404, b"not found"), (401, b"who are you"), (500, b"{}"), (204, b"")])

        def do_GET(self) -> None:
            status, body = (404, b"") if self.path == "/health" else next(self.replies)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Foreign)
    thread = in_thread(server.serve_forever)
    try:
        ref = replace(_some_ref(server.server_address[1]), stored_bytes=1000)
        for _ in range(5):
            with pulling() as puller:
                _gone(puller, ref)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_port_that_speaks_no_http_is_a_producer_that_is_gone() -> None:
    def greet(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.sendall(b"220 ready\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, pulling() as puller:
        thread = in_thread(lambda: greet(listener))
        _gone(puller, _some_ref(listener.getsockname()[1]))
        thread.join()


def _some_ref(port: int) -> SampleRef:
    return made.ref(store_uri=f"nccl://127.0.0.1:{port}/0123456789abcdef", stored_bytes=100)


def test_a_producer_of_another_run_is_not_asked_for_this_ones_samples() -> None:
    with keeping() as mine, keeping() as theirs, pulling() as puller:
        ref = put(mine)
        put(theirs, seed=1)
        _gone(puller, replace(ref, store_uri=ref.store_uri.replace(str(port_of(mine)), str(port_of(theirs)))))


@pytest.mark.parametrize(
    "uri",
    ["file:///shards", "mem://x", "nccl://", "nccl://host:1", "nccl://host:1/../a", "nccl://a b:1/0123456789abcdef"],
)
def test_a_ref_of_another_kind_of_store_stops_the_trainer_and_costs_no_sample(uri: str) -> None:
    with pulling() as puller, pytest.raises(ConfigError, match="another kind of store"):
        puller.get(made.ref(store_uri=uri))


# the token


def test_a_wrong_token_is_a_mistake_of_settings_and_not_a_dead_producer() -> None:
    with keeping(token=TOKEN) as store:
        ref = put(store)
        for wrong in ("", TOKEN[:-1], TOKEN + "x"):
            with pulling(token=wrong) as puller:
                for ask in (puller.get, puller.header, puller.delete):
                    with pytest.raises(ConfigError, match="token"):
                        ask(ref)
        with pulling(token=TOKEN) as puller:
            assert puller.get(ref).keys() == made.tensors().keys()
        assert [shard.key for shard in store.scan()] == [key_of(ref)]


def test_the_token_of_somebody_elses_producer_on_a_dead_ones_port_does_not_stop_a_trainer() -> None:
    with keeping(token=TOKEN) as store:
        ref, port = put(store), port_of(store)
    with keeping(f"127.0.0.1:{port}", token="somebody-elses-token"), pulling(token=TOKEN) as puller:
        _gone(puller, ref)


def test_a_producer_listens_beyond_its_machine_only_with_a_token() -> None:
    with pytest.raises(ConfigError, match=r"access\.token_file"):
        open_store("nccl://0.0.0.0:0")
    with keeping("0.0.0.0:0", token=TOKEN) as store:
        assert store.uri.startswith(f"nccl://{socket.gethostname()}:")


def test_a_port_in_use_is_named() -> None:
    with keeping() as store, pytest.raises(ConfigError, match=str(port_of(store))):
        open_store(f"nccl://127.0.0.1:{port_of(store)}")


# what is pulled


def test_a_bit_that_flips_in_a_producers_memory_is_found() -> None:
    with keeping() as store, pulling() as puller:
        ref = put(store)
        sample = store._samples.get(key_of(ref))
        assert sample is not None
        sample.writer.tensors["aux_hidden_states"].view(torch.uint8).flatten()[3] ^= 1
        with pytest.raises(SampleCorrupt, match="checksum of aux_hidden_states"):
            puller.get(ref)


def test_a_producer_that_fails_at_one_sample_is_no_dead_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    with keeping() as store, pulling() as puller:
        ref = put(store)
        monkeypatch.setattr("eaglefeed.storage.peer_server._placed", lambda *_: 1 / 0)
        with pytest.raises(StorageError, match="its producer failed") as caught:
            puller.get(ref)
        assert not isinstance(caught.value, PeerGone)


def test_a_sample_that_a_living_producer_does_not_keep_is_missing() -> None:
    with keeping() as store, pulling() as puller:
        ref = put(store)
        store.delete(ref)
        for ask in (puller.get, puller.header):
            with pytest.raises(SampleMissing, match=ref.sample_id):
                ask(ref)


def test_a_reader_that_hangs_up_in_the_middle_keeps_nothing_from_the_next_one() -> None:
    with keeping() as store, pulling() as puller:
        ref = put(store, batch=4, length=20_000)
        path = f"/{store.uri.rpartition('/')[2]}/samples/{key_of(ref)}"
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port_of(store))) as reader:
                reader.sendall(f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
                assert reader.recv(4096).startswith(b"HTTP/1.1 200")
        assert puller.get(ref)["input_ids"].shape == (4, 20_000)
