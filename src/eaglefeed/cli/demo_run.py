"""The demo's processes: a producer and a trainer as a user would start them, and the crash in between."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.demo_processes import DemoProcesses
from eaglefeed.cli.display import RunDisplay
from eaglefeed.cli.reports import human_bytes
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import Settings
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import EaglefeedError
from eaglefeed.ops.bottleneck import bottleneck
from eaglefeed.ops.facts import read_run
from eaglefeed.ops.live import LAST_POINTS
from eaglefeed.queue.base import MAIN_GROUP
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.storage.base import FeatureStore

if TYPE_CHECKING:
    import subprocess

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


def prepare(settings: Settings, display: RunDisplay, processes: DemoProcesses, num_trained: int) -> DemoInputs:
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
    processes.run_to_end("vocab", str(inputs.train), "-o", str(inputs.vocab))
    return inputs


class DemoRun:
    """Feeds, produces and trains in processes of their own, and watches them."""

    def __init__(
        self,
        settings: Settings,
        display: RunDisplay,
        processes: DemoProcesses,
        queues: RunQueues,
        store: FeatureStore,
        inputs: DemoInputs,
    ) -> None:
        self._settings, self._display, self._processes = settings, display, processes
        self._queues, self._store, self._inputs = queues, store, inputs
        self._came_back = 0

    def play(self) -> list[Eagle3TargetBatch]:
        """Run to the end; returns some streamed batches, to compare with colocated ones."""
        vocab = str(self._inputs.vocab)
        self._processes.run_to_end("feed", str(self._inputs.train), "--vocab", vocab)
        self._display.event(f"fed {self._queues.prompts.stats().ready} prompts")
        producer = self._processes.start("produce", "--vocab", vocab)
        self._wait(lambda: self._queues.samples.stats().ready >= _COMPARED)
        streamed = self._borrow()
        trainer = self._processes.start("train")
        self._wait(self._is_worth_killing)
        trainer = self._kill_and_restart(trainer)
        self._wait(lambda: self._queues.samples.stats().drained)
        self._wait(lambda: producer.poll() is not None and trainer.poll() is not None)
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
            "redelivered": samples.redelivered + self._came_back,
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
        self._processes.kill(trainer)
        leased = self._queues.samples.stats().leased
        self._display.event(f"killed the trainer (SIGKILL) at step {self._steps()}; it held {leased} leases")
        session = self._queues.samples.stats().session
        trainer = self._processes.start("train")
        self._wait(lambda: self._queues.samples.stats().session > session)
        self._came_back += leased
        self._display.event("the trainer that was started instead went back to its checkpoint, and got them again")
        return trainer

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline_s = SYSTEM_CLOCK.monotonic() + _PHASE_S
        while not done():
            self._display.update(self._rows())
            self._processes.check()
            if SYSTEM_CLOCK.monotonic() > deadline_s:
                raise EaglefeedError(
                    f"the demo made no progress in {_PHASE_S:g} s", subject=str(self._settings.run_dir)
                )
            SYSTEM_CLOCK.sleep(_POLL_S)
        self._display.update(self._rows())

    def _rows(self) -> dict[str, str]:
        facts = read_run(self._queues, look_at=0, last_points=LAST_POINTS)
        prompts, samples = facts.prompts, facts.samples["samples", MAIN_GROUP]
        history = self._history()
        last = history[-1] if history else None
        return {
            "produce": f"{prompts.done} of {prompts.done + prompts.unsettled} prompts, {prompts.dead} dead",
            "queue": f"{samples.ready} ready, {samples.leased} leased, {samples.done} done, {samples.dead} dead, "
            f"{samples.redelivered} redelivered",
            "store": f"{human_bytes(samples.stored_bytes)} of samples not yet trained on",
            "train": f"step {last['step']}, loss {last['loss']:.3f}" if last else "waiting for the first sample",
            "bottleneck": bottleneck(facts).sentence,
        }

    def _history(self) -> list[dict[str, Any]]:
        path = self._settings.train_output / "history.jsonl"
        if not path.exists():
            return []
        # A line that is being written, or that the kill cut, has no end yet.
        whole = [line for line in path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]
        return [json.loads(line) for line in whole]

    def _steps(self) -> int:
        return len(self._history())


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)
