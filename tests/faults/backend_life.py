"""One life of a trainer on a target, in a process that a test kills: python backend_life.py FOLDER DEPTH."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import draft_samples
import pipeline
import samples
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.resume import resume
from eaglefeed.consumer.run import TrainingRun, only_trainer_of
from eaglefeed.consumer.trainer import DraftTrainer, StepResult
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch
from eaglefeed.schema.prompt import Prompt

SIZES = {"hidden_size": samples.H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
CONFIG = replace(draft_samples.CONFIG, **SIZES, vocab_size=pipeline.VOCAB, draft_vocab_size=pipeline.VOCAB)
NUM_PROMPTS = 31
STEP_S = 0.01


class SlowEcho(pipeline.EchoTarget):
    """Answers in threads, at a pace that leaves time to be killed in."""

    supports_async = True

    def __init__(self) -> None:
        super().__init__()
        self._workers = ThreadPoolExecutor(4)

    def generate_batch(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Eagle3TargetBatch:
        time.sleep(STEP_S)
        return super().generate_batch(input_ids, attention_mask, loss_mask)

    def generate_batch_async(self, *rows: Tensor, **named: Any) -> Any:
        return self._workers.submit(self.generate_batch, *rows, **named)

    def close(self) -> None:
        self._workers.shutdown()


def prompts() -> list[Prompt]:
    return [pipeline.prompt(index) for index in range(NUM_PROMPTS)]


def live(folder: Path, target: Eagle3TargetBackend, *, depth: int = 1, **options: Any) -> dict[str, Tensor]:
    """Train to the end, two samples a step, from the newest checkpoint on; returns weights and moments."""
    trainer = DraftTrainer(Eagle3Draft(CONFIG, seed=0))
    contract = pipeline.contract(max_length=16)
    with only_trainer_of(folder), BackendStream(target, prompts(), depth=depth, outage_s=0.0) as stream:
        resume(folder, trainer, stream, contract=contract)
        options = {"checkpoint_every": 3, "samples_per_step": 2, "idle_s": None} | options
        TrainingRun(trainer, stream, folder, contract=contract.id, **options).train()
    return trainer.state_tensors()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _say(result: StepResult, _row: object) -> None:
    sys.stdout.write(f"{result.step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    slow = SlowEcho()
    live(Path(sys.argv[1]), slow, depth=int(sys.argv[2]), on_step=_say)
    slow.close()
