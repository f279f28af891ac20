"""A client of target servers that come and go, and requests that are given up."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack

import pytest
import structlog
import torch

from eaglefeed.consumer import servers
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import SchemaError, TargetError, TargetMismatch, TargetUnavailable
from eaglefeed.schema.protocol import DISCONNECT, MODEL_INFO, READY, SET_VOCAB_MAPPING
from faults.fake_target import INFO, FakeTarget, V, answer_to, fake_target, honest
from faults.processes import wait_until
from faults.remote_bench import FAULTS, Bench, check, refused, rows, said, stalled, with_map


@pytest.fixture(autouse=True)
def probed_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is out stays out, however slow the machine is."""
    monkeypatch.setattr(servers, "PROBE_EVERY_S", 1e9)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


@pytest.fixture
def probed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PROBE_EVERY_S", 0.05)


@pytest.mark.usefixtures("probed_often")
def test_a_server_that_died_is_used_again_when_it_is_back_with_the_map_that_it_lost(bench: Bench) -> None:
    with fake_target() as mortal:
        port = int(mortal.server_address[1])
        model = with_map(bench.connect(mortal, bench.server))
        check(model.generate_batch(**rows()), rows(), 3)
    for first in range(4):
        check(model.generate_batch(**rows(first)), rows(first), 3)
    back = bench.stack.enter_context(fake_target(port))
    wait_until(lambda: ask_until_used(model, back))
    assert back.num_asked(SET_VOCAB_MAPPING) == 1
    assert back.num_asked() >= 1


def ask_until_used(model: RemoteEagle3TargetModel, server: FakeTarget) -> bool:
    check(model.generate_batch(**rows()), rows(), 3)
    return server.num_asked() > 1


@pytest.mark.usefixtures("probed_often")
@pytest.mark.parametrize("answers_first", [False, True], ids=["comes up later", "comes back"])
def test_a_server_that_comes_with_another_target_is_out_while_another_is_well(
    answers_first: bool, bench: Bench
) -> None:
    with fake_target() as mortal:
        port = int(mortal.server_address[1])
        model = bench.connect(bench.server, mortal)
        if answers_first:
            model.model_info()
    model.generate_batch(**rows())
    wait_until(lambda: bool(model.generate_batch(**rows())) and len(model._fleet.well()) == 1)
    with structlog.testing.capture_logs() as logs:
        back = bench.stack.enter_context(fake_target(port))
        back.info = INFO.model_copy(update={"target_fingerprint": "1" * 16})
        wait_until(lambda: bool(model.generate_batch(**rows())) and back.num_asked(MODEL_INFO) > 2)
        for first in range(8):
            check(model.generate_batch(**rows(first)), rows(first))
        with_map(model)
        model.model_info()
    assert (back.num_asked(), back.num_asked(SET_VOCAB_MAPPING)) == (0, 0)
    said = [entry for entry in logs if entry["log_level"] == "warning" and entry["server"] == back.url]
    assert len(said) == 1
    assert "target_fingerprint=" in said[0]["reason"]
    assert not [entry for entry in logs if entry["event"] == "target_server_back"]


def test_another_target_alone_is_an_error_when_no_server_is_well(bench: Bench) -> None:
    bench.other.info = INFO.model_copy(update={"target_fingerprint": "1" * 16})
    with fake_target() as mortal:
        model = bench.connect(mortal, bench.other)
        model.generate_batch(**rows())
    with pytest.raises(TargetMismatch, match="target_fingerprint"):
        model.generate_batch(**rows())


@pytest.mark.usefixtures("probed_often")
def test_a_server_that_is_not_ready_is_not_used_again_yet(bench: Bench) -> None:
    bench.server.fault, bench.server.num_faults = FAULTS["busy"], 1
    bench.server.broken[READY] = FAULTS["busy"]
    model = bench.connect(bench.server, bench.other)

    def is_probed_twice() -> bool:
        model.generate_batch(**rows())
        return bench.server.num_asked(READY) >= 2

    wait_until(is_probed_twice)
    assert bench.server.num_asked() == 1
    del bench.server.broken[READY]
    wait_until(lambda: bool(model.generate_batch(**rows())) and bench.server.num_asked() > 1)


def test_a_server_that_forgot_the_map_is_told_again_and_the_request_is_not_lost(bench: Bench) -> None:
    model = with_map(bench.connect(bench.server))
    bench.server.sessions.clear()
    check(model.generate_batch(**rows()), rows(), 3)
    assert (bench.server.num_asked(SET_VOCAB_MAPPING), bench.server.num_asked()) == (2, 2)


def test_a_server_that_never_knows_the_map_is_out(bench: Bench) -> None:
    model = with_map(bench.connect(bench.server))
    bench.server.sessions.clear()
    bench.server.broken[SET_VOCAB_MAPPING] = said(204, b"")
    with pytest.raises(TargetUnavailable, match="unknown session"):
        model.generate_batch(**rows())
    assert bench.server.num_asked() == 4


@pytest.mark.usefixtures("probed_often")
def test_a_map_reaches_every_server_and_one_that_is_out_gets_it_later(bench: Bench) -> None:
    bench.other.broken[SET_VOCAB_MAPPING] = FAULTS["busy"]
    model = with_map(bench.connect(bench.server, bench.other))
    assert (bench.server.num_asked(SET_VOCAB_MAPPING), bench.other.num_asked(SET_VOCAB_MAPPING)) == (1, 1)
    bench.other.broken.clear()
    wait_until(lambda: bool(model.generate_batch(**rows())) and bool(bench.other.sessions))
    assert bench.server.num_asked(SET_VOCAB_MAPPING) == 1


def test_a_map_that_no_server_takes_is_not_used(bench: Bench) -> None:
    model = bench.connect(bench.server)
    bench.server.broken[SET_VOCAB_MAPPING] = refused(SchemaError("another target's"))
    with pytest.raises(SchemaError, match="another target's"):
        with_map(model)
    check(model.generate_batch(**rows()), rows())


def test_a_request_is_answered_over_the_map_it_was_made_with(bench: Bench) -> None:
    model, go = with_map(bench.connect(bench.server)), threading.Event()
    bench.server.fault = lambda handler, tensors, metadata: (go.wait(10), honest(handler, tensors, metadata))[1]
    before = model.generate_batch_async(**rows())
    wait_until(lambda: bench.server.num_asked() == 1)
    smaller = torch.zeros(V, dtype=torch.bool)
    smaller[2] = True
    model.set_vocab_mapping(torch.tensor([2]), smaller)
    after = model.generate_batch_async(**rows())
    go.set()
    check(before.result(10), rows(), 3)
    check(after.result(10), rows(), 1)
    assert bench.server.num_asked(DISCONNECT) == 1


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_a_cancelled_request_ends_and_disturbs_no_other(is_in_flight: bool, bench: Bench) -> None:
    go = threading.Event()
    bench.server.fault = lambda handler, tensors, metadata: (go.wait(10), honest(handler, tensors, metadata))[1]
    model = bench.connect(bench.server, in_flight=1)
    first, second = (model.generate_batch_async(**rows(first)) for first in (0, 5))
    wait_until(lambda: bench.server.num_asked() == 1)
    cancelled, kept, asked = (first, second, rows(5)) if is_in_flight else (second, first, rows(0))
    assert cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.result(0)
    go.set()
    check(kept.result(10), asked)
    assert not kept.cancel()
    check(kept.result(0), asked)
    assert bench.server.num_asked() == (2 if is_in_flight else 1)


def test_cancelling_a_request_does_not_take_the_server_out(bench: Bench) -> None:
    bench.server.fault, bench.server.num_faults = stalled, 1
    model = bench.connect(bench.server, bench.other, in_flight=1)
    handle = model.generate_batch_async(**rows())
    wait_until(lambda: bench.server.num_asked() == 1)
    handle.cancel()
    for first in range(4):
        check(model.generate_batch(**rows(first)), rows(first))
    assert bench.server.num_asked() == 3
    assert bench.server.num_asked(READY) == 0


def test_a_result_that_is_late_can_be_waited_for_again(bench: Bench) -> None:
    go = threading.Event()
    bench.server.fault = lambda handler, tensors, metadata: (go.wait(10), honest(handler, tensors, metadata))[1]
    handle = bench.connect(bench.server).generate_batch_async(**rows())
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    go.set()
    check(handle.result(10), rows())
    assert bench.server.num_asked() == 1


def test_closing_with_requests_on_their_way_ends_them_and_leaves_no_threads(bench: Bench) -> None:
    bench.server.fault = stalled
    model = with_map(bench.connect(bench.server, in_flight=2, timeout=60.0))
    handles = [model.generate_batch_async(**rows(first)) for first in range(6)]
    wait_until(lambda: bench.server.num_asked() == 2)
    model.close()
    for handle in handles:
        with pytest.raises(TargetError, match="closed"):
            handle.result(0)
    assert bench.server.num_asked() == 2
    assert bench.server.num_asked(DISCONNECT) == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("eaglefeed-remote")]


def test_a_closed_model_is_not_used_any_more(bench: Bench) -> None:
    model = bench.connect(bench.server)
    check(model.generate_batch(**rows()), rows())
    model.close()
    model.close()
    mask = torch.ones(V, dtype=torch.bool)
    for use in (
        lambda: model.generate_batch(**rows()),
        lambda: model.generate_batch_async(**rows()),
        lambda: model.set_vocab_mapping(torch.arange(V), mask),
        model.model_info,
        model.get_input_embeddings,
        model.target_assets,
    ):
        with pytest.raises(TargetError, match="closed"):
            use()
    assert bench.server.num_asked() == 1


def test_a_model_that_nobody_closed_leaves_no_threads(bench: Bench) -> None:
    model = RemoteEagle3TargetModel([bench.server.url], device="cpu")
    check(model.generate_batch(**rows()), rows())
    names = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("eaglefeed-remote") for name in names)
    model._fleet.close()  # or the test would warn of its socket
    del model
    wait_until(lambda: not any(thread.name.startswith("eaglefeed-remote") for thread in threading.enumerate()))


def test_batches_that_are_kept_never_change(bench: Bench) -> None:
    model = bench.connect(bench.server, in_flight=2)
    kept = [model.generate_batch(**rows(first)) for first in range(20)]
    views = [model.generate_batch(**rows(first)).aux_hidden_states[0, :2] for first in range(20)]
    for first in range(20):
        check(kept[first], rows(first))
        assert torch.equal(views[first], answer_to(rows(first))["aux_hidden_states"][0, :2])
