"""What `eaglefeed train` tells of its steps: lines on stderr, and reports to where train.report_to says."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from eaglefeed.config import Settings
from eaglefeed.consumer.meter import Pace, StepMeter
from eaglefeed.consumer.reporting import Reporter, open_reporters, report_values
from eaglefeed.consumer.source import BatchSource
from eaglefeed.consumer.trainer import DraftTrainer, StepResult

__all__ = ["Progress", "progress_of"]

_MAX_RECENT = 1000


@contextmanager
def progress_of(
    settings: Settings, trainer: DraftTrainer, stream: BatchSource, *, has_room: Callable[[], bool] | None
) -> "Iterator[Progress]":
    """A training's progress, which the first rank tells.

    Raises:
        ConfigError: a package of train.report_to is not installed, or does not start.
    """
    train = settings.train
    # Addresses may hold a password.
    config = {"train": train.model_dump(mode="json", exclude={"remote_urls"})} | {
        name: getattr(settings, name).model_dump(mode="json", exclude={"engine_url"}) for name in ("draft", "target")
    }
    with open_reporters(
        train.report_to if trainer.ranks.is_first else (),
        folder=settings.train_output,
        run_id=settings.run.id,
        config=config,
        step=trainer.step_count,
    ) as reporters:
        progress = Progress(trainer, stream, reporters, every=train.report_every, has_room=has_room)
        yield progress
        progress.end()


class Progress:
    """Tells each step, and every `every` steps what waits for what."""

    def __init__(
        self,
        trainer: DraftTrainer,
        stream: BatchSource,
        reporters: Sequence[Reporter],
        *,
        every: int,
        has_room: Callable[[], bool] | None,
    ) -> None:
        self.meter = StepMeter(stream.stats, has_room=has_room)
        self._trainer, self._stream, self._reporters, self._every = trainer, stream, reporters, every
        self.on_step: Callable[[StepResult], None] = lambda _result: None
        self.recent = deque[StepResult](maxlen=_MAX_RECENT)  # steps for whoever takes them out
        self.num_steps = 0
        self.pace: Pace | None = None  # of the last window that was told
        self._untold: StepResult | None = None
        self._num_untold = 0

    def tell(self, result: StepResult, _row: dict[str, Any]) -> None:
        """A step has ended."""
        self.on_step(result)
        self.recent.append(result)
        self.num_steps += 1
        accuracies = " ".join(f"{accuracy:.3f}" for accuracy in result.accuracies)
        typer.echo(f"step {result.step} loss {result.loss:.4f} accuracy {accuracies}", err=True)
        self._untold, self._num_untold = result, self._num_untold + 1
        if self._num_untold == self._every:
            self.end()

    def end(self) -> None:
        """Report what no report holds yet."""
        if self._untold is None:
            return
        self.pace = pace = self.meter.close()
        typer.echo(f"step {self._untold.step}: {pace}", err=True)
        lr = self._trainer.optimizer.param_groups[0]["lr"]
        values = report_values(self._untold, lr=lr, pace=pace, stats=self._stream.stats)
        for reporter in self._reporters:
            reporter.write(values, self._untold.step)
        self._untold, self._num_untold = None, 0
