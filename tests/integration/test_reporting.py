"""Reports of a training: TensorBoard's files read back, and the calls that the others get."""

import sys
import types
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from eaglefeed.cli import train_progress
from eaglefeed.config import load_settings
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.meter import Pace
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.reporting import open_reporters, report_values
from eaglefeed.consumer.trainer import StepResult
from eaglefeed.errors import ConfigError

CONFIG = {"train": {"lr": 0.001}}
RESULT = StepResult(loss=1.5, accuracies=(0.5, 0.25), num_supervised=7, num_tokens=12, grad_norm=0.75, step=3)


def values(step: int = 3, room_wait: float | None = 0.25) -> dict[str, float]:
    stats = StreamStats(delivered=step, redelivered=2, dead=1, stale=4)
    pace = Pace(samples_per_s=2.0, tokens_per_s=64.0, data_wait=0.125, room_wait=room_wait)
    return report_values(RESULT._replace(step=step), lr=0.001, pace=pace, stats=stats)


def test_a_report_holds_the_step_the_pace_and_what_became_of_samples() -> None:
    expected = {
        "loss": 1.5,
        "lr": 0.001,
        "grad_norm": 0.75,
        "supervised": 7,
        "accuracy/0": 0.5,
        "accuracy/1": 0.25,
        "samples_per_s": 2.0,
        "tokens_per_s": 64.0,
        "data_wait": 0.125,
        "room_wait": 0.25,
        "samples/delivered": 3,
        "samples/redelivered": 2,
        "samples/dead": 1,
        "samples/stale": 4,
    }
    assert values() == expected
    assert values(room_wait=None) == {name: value for name, value in expected.items() if name != "room_wait"}


def _report(folder: Path, names: list[Any], steps: range, *, start: int = 0) -> None:
    with open_reporters(names, folder=folder, run_id="run-1", config=CONFIG, step=start) as reporters:
        for step in steps:
            for reporter in reporters:
                reporter.write(values(step), step)


def test_tensorboard_shows_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _report(tmp_path, ["tensorboard"], range(1, 5))
    _report(tmp_path, ["tensorboard"], range(3, 6), start=2)  # of a checkpoint after step 2
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(shown.Tags()["scalars"]) == set(values())
    assert [(event.step, event.value) for event in shown.Scalars("samples/delivered")] == [(n, n) for n in range(1, 6)]


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    return module


class FakeRun:
    """Takes the calls of wandb's Run, and of the module trackio."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> "FakeRun":
        print("hello")  # noqa: T201  as the real one does
        self.calls.append(("init", options))
        return self

    def log(self, logged: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", (dict(logged), step)))

    def finish(self) -> None:
        print("bye")  # noqa: T201
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_the_settings_each_report_and_the_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeRun()
    module = _module(name, init=fake.init, log=fake.log, finish=fake.finish, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, name, module)
    _report(tmp_path, [name], range(3, 5))
    (first, options), *logged, (last, _) = fake.calls
    assert (first, last) == ("init", "finish")
    assert (options["project"], options["config"]) == ("eaglefeed", CONFIG)
    assert "run-1" in (options.get("name"), options.get("group"))
    assert logged == [("log", (values(3), 3)), ("log", (values(4), 4))]
    if name == "trackio":
        assert capsys.readouterr().out == "", "stdout is the command's"


def test_a_run_that_fails_is_closed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun()
    monkeypatch.setitem(sys.modules, "trackio", _module("trackio", init=fake.init, log=fake.log, finish=fake.finish))
    with pytest.raises(ZeroDivisionError):
        _report(tmp_path, ["trackio"], (1 // 0 for _ in "x"))  # type: ignore[arg-type]
    assert [call for call, _ in fake.calls] == ["init", "finish"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        _report(tmp_path, [name], range(1))


def test_a_wandb_that_does_not_start_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        pass

    def init(**_: Any) -> None:
        raise Error("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", _module("wandb", init=init, Error=Error))
    with pytest.raises(ConfigError, match=r"No API key configured; run `wandb login`"):
        _report(tmp_path, ["wandb"], range(1))


def test_nothing_is_imported_that_was_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    _report(tmp_path, [], range(3))
    assert list(tmp_path.iterdir()) == []


def test_addresses_of_engines_and_servers_are_reported_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def opened(*_: object, config: object, **__: object) -> AbstractContextManager[tuple[()]]:
        given.append(config)
        return nullcontext(())

    monkeypatch.setattr(train_progress, "open_reporters", opened)
    urls = ["target.engine_url=http://u:hunter2@h:1", "train.remote_urls=http://u:hunter2@h:1"]
    trainer: Any = types.SimpleNamespace(ranks=Ranks.alone(), step_count=0)
    stream: Any = types.SimpleNamespace(stats=StreamStats())
    with train_progress.progress_of(load_settings(None, urls), trainer, stream, has_room=None):
        pass
    assert "'lr'" in str(given)
    assert "hunter2" not in str(given)
