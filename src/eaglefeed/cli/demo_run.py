"""The demo's processes: a producer and a trainer as a user would start them, and the crash in between."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import xxhash

from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.display import RunDisplay
from eaglefeed.cli.reports import human_bytes
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import Settings
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue.base import QueueStats
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.storage.base import FeatureStore

__all__ = ["DemoInputs", "DemoRun", "prepare"]

_HELD_OUT_OF = 5
_COMPARED = 4
_KILL_AFTER_STEPS = 25
_POLL_S = 0.5
_PHASE_S = 900.0
_AVERAGED = 20


@dataclass(frozen=True)
class DemoInputs:
    """The conversations that are trained on, the ones that are not, and the vocabulary map."""

    train: Path
    held_out: Path
    vocab: Path


def prepare(settings: Settings, display: RunDisplay, num_trained: int) -> DemoInputs:
    """Split the packaged conversations by the hash of their ids, and choose the draft vocabulary."""
    folder = settings.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    inputs = DemoInputs(folder / "train.jsonl", folder / "held_out.jsonl", folder / "vocab.safetensors")
    text = (files("eaglefeed") / "examples" / "answers.jsonl").read_text(encoding="utf-8")
    by_hash = sorted(
        (xxhash.xxh32_intdigest(json.loads(line)["id"].encode()), line + "\n") for line in text.rstrip().split("\n")
    )
    held_out = [line for number, line in by_hash if number % _HELD_OUT_OF == 0]
    train = [line for number, line in by_hash if number % _HELD_OUT_OF][:num_trained]
    inputs.train.write_text("".join(train), encoding="utf-8")
    inputs.held_out.write_text("".join(held_out), encoding="utf-8")
    display.event(f"{len(train)} conversations to train on, {len(held_out)} held out by the hash of their id")
    display.event("preparing the target (converted once, about 20 s) and the draft vocabulary")
    _run_to_end(settings, "vocab", str(inputs.train), "-o", str(inputs.vocab))
    return inputs


class DemoRun:
    """Feeds, produces and trains in processes of their own, and watches them."""

    def __init__(
        self, settings: Settings, display: RunDisplay, queues: RunQueues, store: FeatureStore, inputs: DemoInputs
    ) -> None:
        self._settings, self._display, self._queues, self._store = settings, display, queues, store
        self._inputs = inputs

    def play(self) -> list[Eagle3TargetBatch]:
        """Run to the end; returns some streamed batches, to compare with colocated ones."""
        _run_to_end(self._settings, "feed", str(self._inputs.train), "--vocab", str(self._inputs.vocab))
        self._display.event(f"fed {self._queues.prompts.stats().ready} prompts")
        producer = self._start("produce", "--vocab", str(self._inputs.vocab))
        trainer: subprocess.Popen[bytes] | None = None
        try:
            self._wait(lambda: self._queues.samples.stats().ready >= _COMPARED, producer)
            streamed = self._borrow()
            trainer = self._start("train")
            self._wait(self._is_worth_killing, producer, trainer)
            trainer = self._kill_and_restart(trainer)
            self._wait(lambda: self._queues.samples.stats().drained, producer, trainer)
            self._wait(lambda: producer.poll() is not None and trainer.poll() is not None, producer, trainer)
        finally:
            for process in filter(None, (producer, trainer)):
                process.kill()
                process.wait()
        return streamed

    def result(self) -> dict[str, Any]:
        """The counts of the run, from the queue itself and the trainer's history."""
        prompts, samples = self._queues.prompts.stats(), self._queues.samples.stats()
        fed = prompts.unsettled + prompts.done + prompts.dead
        losses = [row["loss"] for row in self._history()]
        return {
            "produced": samples.unsettled + samples.done + samples.dead,
            "acked": samples.done,
            "lost": fed - samples.done - samples.dead - prompts.dead,
            "dead": samples.dead + prompts.dead,
            "redelivered": samples.redelivered,
            "loss_first": _mean(losses[:_AVERAGED]),
            "loss_last": _mean(losses[-_AVERAGED:]),
        }

    def _borrow(self) -> list[Eagle3TargetBatch]:
        """Take a few samples like any trainer, and give them back."""
        with SampleStream(
            self._queues.samples, self._store, consumer="demo-comparison", lease_batch=_COMPARED, prefetch=_COMPARED
        ) as stream:
            return stream.take(_COMPARED)

    def _is_worth_killing(self) -> bool:
        return self._steps() >= _KILL_AFTER_STEPS and self._queues.samples.stats().leased > 0

    def _kill_and_restart(self, trainer: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
        trainer.kill()
        trainer.wait()
        leased = self._queues.samples.stats().leased
        self._display.event(f"killed the trainer (SIGKILL) at step {self._steps()}; it held {leased} leases")
        before = self._queues.samples.stats().redelivered
        trainer = self._start("train")
        self._wait(lambda: self._queues.samples.stats().redelivered > before, trainer)
        self._display.event("its leases ran out and came back to the trainer that was started instead")
        return trainer

    def _wait(self, done: Callable[[], bool], *processes: "subprocess.Popen[bytes]") -> None:
        deadline_s = SYSTEM_CLOCK.monotonic() + _PHASE_S
        while not done():
            self._display.update(self._rows())
            for process in processes:
                if process.poll():
                    raise _failed(self._settings, process)
            if SYSTEM_CLOCK.monotonic() > deadline_s:
                raise EaglefeedError(
                    f"the demo made no progress in {_PHASE_S:g} s", subject=str(self._settings.run_dir)
                )
            SYSTEM_CLOCK.sleep(_POLL_S)
        self._display.update(self._rows())

    def _rows(self) -> dict[str, str]:
        prompts, samples = self._queues.prompts.stats(), self._queues.samples.stats()
        history = self._history()
        last = history[-1] if history else None
        return {
            "produce": f"{prompts.done} of {prompts.done + prompts.unsettled} prompts, {prompts.dead} dead",
            "queue": f"{samples.ready} ready, {samples.leased} leased, {samples.done} done, {samples.dead} dead, "
            f"{samples.redelivered} redelivered",
            "store": f"{human_bytes(samples.stored_bytes)} of samples not yet trained on",
            "train": f"step {last['step']}, loss {last['loss']:.3f}" if last else "waiting for the first sample",
            "bottleneck": _bottleneck(prompts, samples),
        }

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            _command(self._settings, *words), stdout=subprocess.DEVNULL, stderr=_log(self._settings, words[0])
        )

    def _history(self) -> list[dict[str, Any]]:
        path = self._settings.train_output / "history.jsonl"
        if not path.exists():
            return []
        # A line that is being written, or that the kill cut, has no end yet.
        whole = [line for line in path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]
        return [json.loads(line) for line in whole]

    def _steps(self) -> int:
        return len(self._history())


def _bottleneck(prompts: QueueStats, samples: QueueStats) -> str:
    if samples.full:
        return "the trainer: the producer waits for room"
    if prompts.unsettled and not samples.ready:
        return "the producer: the trainer takes samples as they come"
    return "the trainer: samples wait for it" if samples.ready else "none: the last samples are being trained on"


def _command(settings: Settings, *words: str) -> list[str]:
    """A command line that runs with just these settings, whatever the folder and the variables."""
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    overrides = [f"redis_url={changed.pop('redis_url')}"] if "redis_url" in changed else []
    overrides += [
        f"{section}.{field}={value}" for section, fields in changed.items() for field, value in fields.items()
    ]
    return [sys.executable, "-m", "eaglefeed", *words, *overrides]


def _log(settings: Settings, name: str) -> IO[bytes]:
    return (settings.run_dir / f"{name}.log").open("ab")


def _run_to_end(settings: Settings, *words: str) -> None:
    with _log(settings, words[0]) as log:
        process = subprocess.Popen(_command(settings, *words), stdout=log, stderr=log)
        if process.wait(timeout=_PHASE_S):
            raise _failed(settings, process)


def _failed(settings: Settings, process: "subprocess.Popen[bytes]") -> EaglefeedError:
    words = process.args if isinstance(process.args, list) else [str(process.args)]
    name = str(words[3])
    last = (settings.run_dir / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
    what = f"`eaglefeed {name}` ended with {process.returncode}"
    return EaglefeedError(what, subject=str(settings.run_dir / f"{name}.log"), got=last)


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)
