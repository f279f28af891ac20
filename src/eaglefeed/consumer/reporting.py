"""Where a training's numbers go: TensorBoard, Weights & Biases or Trackio, each imported when it is asked for."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.consumer.meter import Pace
from eaglefeed.consumer.trainer import StepResult
from eaglefeed.errors import ConfigError

__all__ = ["Reporter", "ReporterName", "check_installed", "open_reporters", "report_values"]

ReporterName = Literal["tensorboard", "wandb", "trackio"]
_PROJECT = "eaglefeed"
_COUNTS = ("delivered", "redelivered", "dead", "stale")


class Reporter(Protocol):
    """One place that numbers go to."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Values of a step, by name."""

    def close(self) -> None:
        """Write what is not written yet."""


class _TensorBoard:
    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        # Steps behind the checkpoint that training goes on from are made again.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:  # noqa: ARG002
        import wandb

        try:
            self._run = wandb.init(project=_PROJECT, group=run_id, dir=str(folder), config=dict(config))
        except wandb.Error as error:
            fix = "run `wandb login` once, or set WANDB_MODE=offline"
            raise ConfigError("it does not start", subject="wandb", got=str(error)[:300], fix=fix) from None

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:  # noqa: ARG002
        import trackio

        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # it talks, and stdout is the command's
            trackio.init(project=_PROJECT, name=run_id, config=dict(config), resume="allow", auto_log_cpu=False)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


_KINDS: dict[ReporterName, Callable[[Path, str, Mapping[str, Any], int], Reporter]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


def check_installed(names: Sequence[ReporterName]) -> None:
    """Check that what is asked for is there, without importing it.

    Raises:
        ConfigError: a package that is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            fix = f"pip install {name}, or 'eaglefeed[report]' for all of them"
            raise ConfigError("not installed", subject=f"train.report_to={name}", fix=fix)


@contextmanager
def open_reporters(
    names: Sequence[ReporterName], *, folder: Path, run_id: str, config: Mapping[str, Any], step: int = 0
) -> Iterator[Sequence[Reporter]]:
    """The named ones, closed at the end.

    Args:
        names: which; none are fine.
        folder: of the training, where TensorBoard's and wandb's files go.
        run_id: what they call the run, in the project "eaglefeed".
        config: settings that are shown with it; nothing secret.
        step: the one that training goes on from.

    Raises:
        ConfigError: a package that is not installed.
    """
    with ExitStack() as stack:
        check_installed(names)
        reporters = [_KINDS[name](folder, run_id, config, step) for name in names]
        for reporter in reporters:
            stack.callback(reporter.close)
        yield reporters


def report_values(result: StepResult, *, lr: float, pace: Pace, stats: StreamStats) -> dict[str, float]:
    """What is reported of a step.

    Args:
        result: of the step.
        lr: its learning rate.
        pace: since the last report.
        stats: the stream's counts so far.
    """
    values: dict[str, float] = {"loss": result.loss, "lr": lr, "grad_norm": result.grad_norm}
    values["supervised"] = result.num_supervised
    values |= {f"accuracy/{depth}": accuracy for depth, accuracy in enumerate(result.accuracies)}
    values |= pace.rounded()
    counts = asdict(stats)
    return values | {f"samples/{name}": counts[name] for name in _COUNTS}
