"""A client of target servers that are processes of their own: killed and stopped in mid-work."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coded_target import POSITIONS, V
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.schema.batch import Eagle3TargetBatch

TESTS = Path(__file__).parents[1]


@contextmanager
def server_processes(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    words = [sys.executable, "-m", "faults.target_process", "0", "2"]
    with ExitStack() as stack:
        started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=TESTS) for _ in range(count)]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield started


def address(server: subprocess.Popen[str]) -> str:
    """Where it listens, once it is ready."""
    assert server.stdout is not None
    return server.stdout.readline().strip()


@contextmanager
def remote(*urls: str, **options: object) -> Iterator[RemoteEagle3TargetModel]:
    model = RemoteEagle3TargetModel(urls, device="cpu", in_flight=2, **options)  # type: ignore[arg-type]
    try:
        yield model
    finally:
        model.close()


def rows(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose answer takes 12 MB, more than a connection's buffers, so that a death finds one half-way."""
    ids = torch.randint(0, V, (2, POSITIONS), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones_like(ids), torch.ones_like(ids)


def check(batch: Eagle3TargetBatch, seed: int) -> None:
    ids = rows(seed)[0]
    columns = torch.arange(1, batch.aux_hidden_states.shape[-1] + 1)
    assert torch.equal(batch.aux_hidden_states, ids.cumsum(-1)[..., None].float() + columns)
    assert torch.equal(batch.input_ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    ("sent", "plane"), [(signal.SIGKILL, "http"), (signal.SIGKILL, "gloo"), (signal.SIGSTOP, "gloo")]
)
def test_requests_of_a_server_that_dies_or_stands_still_are_answered_by_another(
    sent: signal.Signals, plane: str
) -> None:
    options = {"timeout": 20.0 if sent == signal.SIGKILL else 4.0, "data_plane": plane, "max_retries": 5}
    with server_processes(2) as (victim, other), remote(address(victim), address(other), **options) as model:
        handles = [model.generate_batch_async(*rows(seed)) for seed in range(8)]
        check(handles[0].result(60), 0)
        victim.send_signal(sent)
        handles += [model.generate_batch_async(*rows(seed)) for seed in range(8, 12)]
        for seed, handle in enumerate(handles):
            check(handle.result(60), seed)
        assert len(model._fleet.well()) == 1
