"""A client of target servers that do everything but answer."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from eaglefeed.consumer import servers
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import ConfigError, EaglefeedError, SchemaError, TargetError, TargetMismatch, TargetUnavailable
from eaglefeed.schema.protocol import INIT_NCCL, INPUT_EMBEDDINGS, MODEL_INFO, ModelInfo
from faults.fake_target import INFO, Fault, H, V, fake_target, honest
from faults.remote_bench import FAULTS, Bench, check, refused, rows, said, stalled


@pytest.fixture(autouse=True)
def probed_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is out stays out, however slow the machine is."""
    monkeypatch.setattr(servers, "PROBE_EVERY_S", 1e9)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def num_asked(fault: str) -> int:
    """Requests an attempt: a kept connection that is found closed is replaced by a new one, once."""
    return 2 if fault == "lost" else 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_goes_wrong_is_answered_by_another_server(fault: str, bench: Bench) -> None:
    bench.server.fault = FAULTS[fault]
    model = bench.connect(bench.server, bench.other)
    for first in range(3):
        check(model.generate_batch(**rows(first)), rows(first))
    assert (bench.server.num_asked(), bench.other.num_asked()) == (num_asked(fault), 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_not_seen(fault: str, bench: Bench) -> None:
    bench.server.fault, bench.server.num_faults = FAULTS[fault], 1
    check(bench.connect(bench.server).generate_batch(**rows()), rows())
    assert (
        bench.server.num_asked() == 2
    )  # also where a reply was lost on a kept connection, which is no attempt of its own


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_an_error_that_names_the_server(fault: str, bench: Bench) -> None:
    bench.server.fault = FAULTS[fault]
    with pytest.raises(TargetUnavailable, match=bench.server.url):
        bench.connect(bench.server).generate_batch(**rows())
    assert bench.server.num_asked() == 2 * num_asked(fault)


def test_a_server_that_stalls_costs_the_timeout_and_no_more(bench: Bench) -> None:
    bench.server.fault = stalled
    model = bench.connect(bench.server, bench.other, timeout=0.3)
    for first in range(3):
        check(model.generate_batch(**rows(first)), rows(first))
    assert bench.server.num_asked() == 1


FATAL: dict[str, tuple[Fault, type[EaglefeedError]]] = {
    "a wrong token": (refused(ConfigError("wrong or missing token")), ConfigError),
    "rows that cannot be": (refused(SchemaError("row too long")), SchemaError),
    "a target that fails": (refused(TargetError("out of memory")), TargetError),
    "a page not found": (said(404, b"<html>no such page</html>"), TargetMismatch),
}


@pytest.mark.parametrize("fault", FATAL)
def test_what_no_other_attempt_changes_is_said_at_once(fault: str, bench: Bench) -> None:
    bench.server.fault, error = FATAL[fault]
    with pytest.raises(error) as raised:
        bench.connect(bench.server, bench.other, max_retries=3).generate_batch(**rows())
    assert type(raised.value) is error
    assert (bench.server.num_asked(), bench.other.num_asked()) == (1, 0)


def another(**changes: object) -> ModelInfo:
    return INFO.model_copy(update=changes)


@pytest.mark.parametrize("changes", [{"target_fingerprint": "1" * 16}, {"dtype": "bfloat16"}, {"hidden_size": 4 * H}])
def test_servers_of_different_targets_are_refused_before_either_trains(
    changes: dict[str, object], bench: Bench
) -> None:
    bench.other.info = another(**changes)
    model = bench.connect(bench.server, bench.other)
    check(model.generate_batch(**rows()), rows())
    with pytest.raises(TargetMismatch, match=f"{bench.other.url}.*{next(iter(changes))}"):
        model.generate_batch(**rows())
    with pytest.raises(TargetMismatch, match=bench.other.url):
        model.model_info()
    assert bench.other.num_asked() == 0


def test_a_server_that_comes_back_with_another_target_is_refused(bench: Bench) -> None:
    model = bench.connect(bench.server)
    model.generate_batch(**rows())
    bench.server.info = another(target_fingerprint="1" * 16)
    with pytest.raises(TargetMismatch, match="target_fingerprint"):
        model.generate_batch(**rows())


@pytest.mark.parametrize("reply", [b"<html>hello</html>", b"{}", json.dumps({"target": 5}).encode()])
def test_something_else_that_listens_there_is_no_target_server(reply: bytes, bench: Bench) -> None:
    bench.server.broken[MODEL_INFO] = said(200, reply)
    with pytest.raises(TargetMismatch, match=bench.server.url):
        bench.connect(bench.server).generate_batch(**rows())


def test_where_every_server_is_out_the_error_names_each(bench: Bench) -> None:
    with fake_target() as one, fake_target() as two:
        model = bench.connect(one, two, max_retries=2)
    with pytest.raises(TargetUnavailable) as raised:
        model.generate_batch(**rows())
    assert one.url in str(raised.value)
    assert two.url in str(raised.value)


def test_where_no_pair_can_be_had_answers_come_in_the_body(bench: Bench) -> None:
    bench.server.broken[INIT_NCCL] = said(404, b"no such page")
    model = bench.connect(bench.server, data_plane="gloo")
    for first in range(3):
        check(model.generate_batch(**rows(first)), rows(first))
    assert bench.server.num_asked(INIT_NCCL) == 1


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    check(bench.connect(bench.server, max_retries=0).generate_batch(**rows()), rows())


@pytest.mark.parametrize("weight", [torch.zeros(V), torch.zeros(V, H, dtype=torch.int64), None])
def test_embeddings_that_are_none_are_refused(weight: Tensor | None, bench: Bench) -> None:
    tensors = {"other": torch.zeros(1)} if weight is None else {"weight": weight}
    bench.server.broken[INPUT_EMBEDDINGS] = lambda handler, _tensors, _metadata: honest(
        handler, tensors, {"model": INFO.id}
    )
    with pytest.raises(TargetMismatch, match="no input embeddings"):
        bench.connect(bench.server).get_input_embeddings()


@pytest.mark.parametrize(
    "options",
    [
        {"urls": []},
        {"urls": "http://127.0.0.1:1"},
        {"urls": ["127.0.0.1:1"]},
        {"data_plane": "carrier pigeon"},
        {"data_plane": "nccl"},
        {"timeout": 0.0},
        {"max_retries": -1},
        {"in_flight": 0},
        {"token": "two words"},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RemoteEagle3TargetModel(**{"urls": ["http://127.0.0.1:1"], "device": "cpu"} | options)  # type: ignore[arg-type]
