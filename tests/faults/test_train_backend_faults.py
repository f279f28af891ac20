"""A training on a target whose process, target or servers fail: it ends with the weights of one that had no faults."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.consumer import checkpoint, resume
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.checkpoint import list_checkpoints
from eaglefeed.consumer.files import read_safetensors
from eaglefeed.errors import (
    ConfigError,
    EaglefeedError,
    PeerGone,
    SchemaError,
    TargetError,
    TargetMismatch,
    TargetUnavailable,
)
from eaglefeed.producer.engine import Captured
from eaglefeed.producer.loading import load_target
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.batch import Eagle3TargetBatch
from echo_servers import EchoServers
from faults.backend_life import live, same
from faults.processes import in_thread

torch.set_num_threads(1)
LIFE = Path(__file__).with_name("backend_life.py")


class KilledError(BaseException):
    """A SIGKILL, in this process."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The end of a life without a fault."""
    return live(tmp_path_factory.mktemp("straight"), pipeline.EchoTarget())


def _kill_in_a_life(folder: Path, depth: int, draw: random.Random) -> None:
    """Start a trainer and kill it some steps later, at any moment of a step or a checkpoint."""
    command = [sys.executable, str(LIFE), str(folder), str(depth)]
    environment = os.environ | {"PYTHONPATH": str(LIFE.parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for _ in range(draw.randint(1, 8)):
                assert process.stdout.readline()
            time.sleep(draw.uniform(0, 0.03))
        finally:
            process.kill()


def test_a_trainer_killed_at_random_moments_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for depth in (3, 0, 1):
        _kill_in_a_life(tmp_path, depth, draw)
    assert same(live(tmp_path, EchoServers()), straight), f"seed {seed}"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("damaged")]


def _killed(patch: pytest.MonkeyPatch, owner: object, name: str, number: int, *, after: bool) -> None:
    plain, calls = getattr(owner, name), [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            raise KilledError
        result = plain(*args, **options)
        if calls[0] == number:
            raise KilledError
        return result

    patch.setattr(owner, name, call)


# 16 steps; checkpoints after 3, 6, 9, 12, 15 and 16.
LINES: list[tuple[object, str, tuple[int, ...]]] = [
    (BackendStream, "ack", (3, 4, 16)),
    (BackendStream, "take", (2,)),
    (checkpoint, "write_safetensors", (1, 6)),
    (checkpoint, "_prune", (3,)),
    (resume, "write_whole", (1,)),
]
POINTS = [
    pytest.param(owner, name, number, after, id=f"{'after' if after else 'before'} {name} {number}")
    for owner, name, numbers in LINES
    for number in numbers
    for after in (False, True)
]


@pytest.mark.parametrize(("owner", "name", "number", "after"), POINTS)
def test_a_trainer_killed_at_any_line_ends_with_the_weights_of_one_that_was_not(
    owner: object, name: str, number: int, after: bool, tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _killed(patch, owner, name, number, after=after)
        with pytest.raises(KilledError):
            live(tmp_path, EchoServers(), depth=2)
    assert same(live(tmp_path, EchoServers(), depth=2), straight)


def _fails_at(servers: EchoServers, at: int, error: Exception) -> None:
    def answer(number: int, batch: Eagle3TargetBatch) -> Eagle3TargetBatch:
        if number >= at:
            raise error
        return batch

    servers.answer = answer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TargetUnavailable("all servers are out"), TargetUnavailable),
        (PeerGone("the answer broke on its way"), TargetUnavailable),
        (TargetMismatch("another target since its restart"), TargetMismatch),
        (TargetError("the forward failed"), TargetError),
        (ConfigError("wrong token"), ConfigError),
        (torch.OutOfMemoryError("CUDA out of memory"), TargetError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_target_that_fails_leaves_a_checkpoint_of_every_step_and_the_run_goes_on_from_it(
    error: Exception, kind: type[EaglefeedError], tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    servers = EchoServers()
    _fails_at(servers, 11, error)  # in the sixth step
    with pytest.raises(kind):
        live(tmp_path, servers, depth=2, checkpoint_every=1000)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000005.safetensors"]
    assert same(live(tmp_path, EchoServers()), straight)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    tmp_path: Path, straight: dict[str, Tensor]
) -> None:
    servers = EchoServers()
    _fails_at(servers, 14, TargetUnavailable("away"))  # checkpoints 3, 6 and 7
    with pytest.raises(TargetUnavailable):
        live(tmp_path, servers)
    newest = list_checkpoints(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    assert same(live(tmp_path, EchoServers()), straight)
    assert (tmp_path / f"damaged-{newest.name}").is_file()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(15)])
    small = ["feed.max_length=128", "train.checkpoint_every=4", "train.samples_per_step=2", "train.remote_timeout_s=5"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


class Disturbed(HFEagle3TargetModel):
    """Calls `before(number)` before each forward of a request."""

    before: Callable[[int], None] = staticmethod(lambda _number: None)
    number = 0

    def capture(self, *rows: Any, **options: Any) -> Captured:
        self.number += 1
        self.before(self.number)
        return super().capture(*rows, **options)


@pytest.fixture
def disturbed(target: Path) -> Disturbed:
    return Disturbed(load_target(str(target), dtype="float32", device="cpu"))


@pytest.fixture
def server(disturbed: Disturbed) -> Iterator[TargetServer]:
    server = _started(disturbed)
    yield server
    server.stop(1)


def _started(target: Disturbed, port: int = 0) -> TargetServer:
    server = TargetServer(target, info_of(target, "t"), port=port)
    server.start()
    assert server.wait_ready(60)
    return server


def _remote(url: str) -> tuple[str, ...]:
    return "train", "rows.jsonl", "--target-backend", "remote", "--remote-urls", url, "--json"


def _newest(folder: str) -> dict[str, Tensor]:
    return read_safetensors(list_checkpoints(Path(folder))[-1])[0]


def _steps(folder: str) -> list[int]:
    return [json.loads(line)["step"] for line in Path(folder, "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("backend", ["colocated", "remote"])
def test_an_interrupt_finishes_the_step_and_leaves_a_checkpoint_to_go_on_from(
    backend: str, shell: Shell, server: TargetServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]
    plain = BackendStream.ack

    def interrupted(stream: BackendStream, step: int | None = None, /) -> int:
        calls[0] += 1
        if calls[0] == 3:  # in the third step, before it is written down
            os.kill(os.getpid(), signal.SIGINT)
        return plain(stream, step)

    words = ("train", "rows.jsonl", "--target-backend", backend, "--remote-urls", server.url, "--json")
    assert shell.run(*words, "-o", "straight").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(BackendStream, "ack", interrupted)
        ended = shell.run(*words, "-o", "stopped")
    assert ended.code == 0, ended.err
    assert (ended.document["steps"], ended.document["acked"], ended.document["drained"]) == (3, 6, False)
    assert "draft" not in ended.document
    assert [path.name for path in list_checkpoints(Path("stopped"))] == ["step-000000003.safetensors"]
    assert shell.run(*words, "-o", "stopped").document["drained"]
    assert _steps("stopped") == _steps("straight") == list(range(1, 9))
    assert same(_newest("stopped"), _newest("straight"))


def test_servers_that_are_away_end_the_run_with_code_4_and_a_checkpoint_it_goes_on_from(
    shell: Shell, disturbed: Disturbed, server: TargetServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BackendStream.__init__.__kwdefaults__, "outage_s", 0.5)
    assert shell.run(*_remote(server.url), "-o", "straight").code == 0
    calls = [0]

    def die(_number: int) -> None:
        calls[0] += 1
        if calls[0] == 8:
            in_thread(lambda: server.stop(0.1))

    disturbed.before = die  # type: ignore[method-assign]
    ended = shell.run(*_remote(server.url), "-o", "out")
    assert ended.code == 4, ended.err
    assert server.url in ended.err
    (kept,) = list_checkpoints(Path("out"))[-1:]
    assert checkpoint.step_of(kept) == _steps("out")[-1] < 8
    disturbed.before = lambda _number: None  # type: ignore[method-assign]
    second = _started(disturbed)
    try:
        again = shell.run(*_remote(second.url), "-o", "out")
    finally:
        second.stop(1)
    assert again.code == 0, again.err
    assert _steps("out") == list(range(1, 9))
    assert same(_newest("out"), _newest("straight"))


def test_a_row_that_a_server_refuses_is_counted_logged_by_its_name_and_passed(
    shell: Shell, disturbed: Disturbed, server: TargetServer
) -> None:
    def refuse(number: int) -> None:
        if number == disturbed.number and number in refused:
            raise SchemaError("not a row of mine")

    refused = range(disturbed.number + 3, disturbed.number + 4)
    disturbed.before = refuse  # type: ignore[method-assign]
    ended = shell.run(*_remote(server.url), "-o", "out", "--target-prefetch-depth", "0")
    assert ended.code == 0, ended.err
    assert (ended.document["dead"], ended.document["acked"], ended.document["drained"]) == (1, 14, True)
    said = [line for line in ended.err.splitlines() if "sample_refused" in line]
    assert len(said) == 1
    assert "c-2" in said[0]
    assert "not a row of mine" in said[0]


def test_a_target_with_bad_values_teaches_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HFEagle3TargetModel.generate_batch

    def broken(target: HFEagle3TargetModel, **rows: Any) -> Eagle3TargetBatch:
        batch = plain(target, **rows)
        batch.aux_hidden_states[0, 0, 0] = torch.nan
        return batch

    monkeypatch.setattr(HFEagle3TargetModel, "generate_batch", broken)
    ended = shell.run("train", "rows.jsonl", "--target-backend", "colocated", "--json")
    assert (ended.code, ended.document["steps"], ended.document["dead"]) == (0, 0, 15)
