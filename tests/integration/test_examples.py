"""The example loops run as their first lines say, and go on after a death as they promise."""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeline
import samples
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.consumer import leasing
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import ASSETS_FILE
from eaglefeed.storage.base import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_SAMPLES = 12


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)  # a stream's end waits for the lease call in hand


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torch_loop.py, with a checkpoint every two of its six steps."""
    module = _load("torch_loop")
    monkeypatch.setattr(module, "SAVE_EVERY", 2)
    return module


class ProbsTarget(pipeline.EchoTarget):
    """Projects onto the whole vocabulary, so that a run with a vocabulary map costs nothing."""

    def generate_batch(self, *args: Any, **options: Any) -> Eagle3TargetBatch:
        tensors = super().generate_batch(*args, **options).tensors()
        probs = tensors.pop("logits")  # one-hot rows sum to 1
        return Eagle3TargetBatch(**tensors, target_probs=probs, position_mask=tensors["loss_mask"].bool()[..., None])


class KilledError(BaseException):
    """A SIGKILL: nothing is given back, nothing is saved."""


def _run(**options: Any) -> pipeline.Run:
    return pipeline.Run(clock=pipeline.TurnableClock(), target=ProbsTarget(), **options)


def _fill(run: pipeline.Run) -> pipeline.Run:
    run.feed(*(pipeline.prompt(index) for index in range(NUM_SAMPLES)))
    run.produce(own=pipeline.contract(supervision="target_probs"))
    return run


def _life(loop: ModuleType, run: pipeline.Run, path: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(3 * samples.H), nn.Linear(3 * samples.H, pipeline.VOCAB))
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        try:
            loop.train(stream, model, torch.optim.AdamW(model.parameters(), lr=0.1), path)
        except KilledError:
            stream.stop()
            stream._taker.join(10)
            stream._queue.holdings.drain()  # what a killed process holds stays leased
            raise
    return model.state_dict()


def _kill_at(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    plain, calls = getattr(owner, name), [0]

    def killed(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise KilledError
        return plain(*args, **options)

    patch.setattr(owner, name, killed)


def test_the_plain_loop_that_is_killed_anywhere_ends_with_the_weights_of_one_that_is_not(
    loop: ModuleType, tmp_path: Path
) -> None:
    straight = _life(loop, _fill(_run()), tmp_path / "straight.safetensors")
    places = [("learn", 1), ("learn", 4), ("save", 1), ("save", 2), ("save_file", 3)]
    owners = [(loop, *place) for place in places] + [(SampleStream, "ack", 3), (SampleStream, "commit", 2)]
    for owner, name, number in owners:
        run, path = _fill(_run()), tmp_path / f"{name}-{number}.safetensors"
        with pytest.MonkeyPatch.context() as patch:
            _kill_at(patch, owner, name, number)
            with pytest.raises(KilledError):
                _life(loop, run, path)
        weights = _life(loop, run, path)
        assert all(torch.equal(tensor, straight[key]) for key, tensor in weights.items()), path.stem
        assert (run.samples.stats().done, run.samples.stats().dead) == (NUM_SAMPLES, 0), path.stem


def test_the_plain_loop_runs_from_a_runs_folder(
    loop: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own"
    store = open_store(str(folder / "shards"))
    store.put_assets(ASSETS_FILE, {"t2d": torch.ones(pipeline.VOCAB, dtype=torch.bool)}, {"config": "{}"})
    run = _run(store=store)
    with EmbeddedServer(folder / "queue") as server:
        client = connect(server.url)
        run.prompts, run.samples = (open_queue(client, "own", name) for name in ("prompts", "samples"))
        _fill(run)
        loop.main(folder)
        loop.main(folder)
        client.close()
    store.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("6 steps, loss ")
    assert second == "0 steps, loss none: all samples are learned"


@pytest.mark.parametrize("name", ["torch_loop", "my_trainer"])
def test_a_folder_that_is_no_runs_is_one_line_and_stays_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return str(ended.value.code)

    assert (
        call(str(tmp_path / "nowhere"))
        == f"{tmp_path / 'nowhere'}: not the folder of a run, which has queue and shards in it"
    )
    assert "not the folder of a run" in call(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert call().endswith(f"{name}.py FOLDER, of a run")
    for part in ("queue", "shards"):
        (tmp_path / part).mkdir()
    assert "contract.json" in call(str(tmp_path))  # nothing was produced yet
    assert capsys.readouterr().out == ""


def test_the_trainer_trains_on_all_samples_and_exports_a_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(5)])
    target = save_tiny_target(tmp_path / "target")
    shell = Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=128")
    for command in (["feed", "rows.jsonl"], ["produce"]):
        assert shell.run(*command).code == 0
    capsys.readouterr()
    _load("hf_trainer").main(Path("runs/default"))
    assert capsys.readouterr().out.splitlines()[-1] == "3 steps, the draft is in runs/default/hf/export-3"
    assert [path.name for path in Path("runs/default/hf").glob("checkpoint-*")] == ["checkpoint-3"]
    assert [path.name for path in Path("runs/default/shards").rglob("*.safetensors")] == [ASSETS_FILE]
