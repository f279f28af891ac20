"""Lives of a training job that ends well or is killed: a real queue and store, each rank a process of its own."""

import itertools
import json
import os
import random
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import draft_samples
import pipeline
import rank_jobs
import samples
from eaglefeed.consumer import gathering, leasing, run
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.resume import resume
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.consumer.run import TrainingRun, only_trainer_of
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.storage.base import open_store

SIZES = {"hidden_size": samples.H, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
CONFIG = replace(draft_samples.CONFIG, **SIZES, vocab_size=pipeline.VOCAB, draft_vocab_size=pipeline.VOCAB)
CONTRACT = pipeline.contract(max_length=16)
_numbers = itertools.count()


@dataclass(frozen=True)
class Death:
    """Of a rank, in its call `number` of what it does: learn, ack or commit."""

    rank: int
    doing: str
    number: int


@dataclass(frozen=True)
class Job:
    """A run in a folder, and how it is trained on; all its lives share them."""

    folder: Path
    url: str
    run: str
    samples_per_step: int = 2
    samples_per_batch: int = 1
    checkpoint_every: int = 2
    timeout_s: float = 20.0
    first_save_s: float = 0.0

    @property
    def draft(self) -> Path:
        return self.folder / "draft"

    def samples(self) -> LeaseQueue:
        return open_queue(connect(self.url, max_wait_s=20.0), self.run, "samples")

    def live(self, world_size: int = 1, death: Death | None = None, *, from_step: int | None = None) -> list[Any]:
        """One life; the last word of each rank: "end", its error, or None if it was killed."""
        with rank_jobs.job(world_size, _live, self, death, from_step) as ranks:
            for each in ranks:
                each.process.join(rank_jobs.PATIENCE_S)
                assert each.process.exitcode is not None, "it does not end"
            return [_last_word(each.pipe) for each in ranks]

    def state(self, rank: int = 0) -> dict[str, Tensor]:
        """Weights and moments at the end of the last life that ended well."""
        return load_file(self.folder / f"end-{rank}.safetensors")

    def learned(self) -> list[str]:
        """The samples that the weights have learned, by all lives: what a checkpoint did not hold is forgotten."""
        found: list[tuple[int, list[str]]] = []
        for line in (self.folder / "learned.jsonl").read_text().splitlines():
            step, ids = json.loads(line)
            found = [*found, (step, ids)] if ids else [(at, known) for at, known in found if at <= step]
        return [sample_id for _, ids in found for sample_id in ids]


def filled_job(folder: Path, url: str, num_samples: int, **options: Any) -> Job:
    """A run of its own with samples of one to three rows, all in the queue."""
    job = Job(folder, url, f"run{next(_numbers)}", **options)
    client = connect(url, max_wait_s=20.0)
    made = pipeline.Run(store=open_store(f"file://{folder / 'shards'}", durability="none"))
    made.prompts, made.samples = (open_queue(client, job.run, name) for name in ("prompts", "samples"))
    draw = random.Random(num_samples)
    for index in range(num_samples):
        rows = [(1 + index % 40, *draw.choices(range(1, 50), k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
        prompt_rows = tuple(pipeline.PromptRow(row, (0, *(1 for _ in row[1:]))) for row in rows)
        made.feed(pipeline.prompt(index, rows=prompt_rows), close=index == num_samples - 1)
    made.produce()
    client.close()
    return job


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _last_word(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _live(pipe: Connection, job: Job, death: Death | None, from_step: int | None) -> None:
    leasing._WAIT_S = gathering._WAIT_S = 0.02
    world_size = int(os.environ["WORLD_SIZE"])
    store = open_store(f"file://{job.folder / 'shards'}", durability="none")
    with (
        Ranks.of_job(timeout_s=job.timeout_s) if world_size > 1 else Ranks.alone() as ranks,
        only_trainer_of(job.draft) if ranks.is_first else nullcontext(),
    ):
        trainer = DraftTrainer(Eagle3Draft(CONFIG, seed=0), ranks=ranks)
        with RoundStream(
            job.samples() if ranks.is_first else None,
            store,
            ranks=ranks,
            samples_per_step=job.samples_per_step,
            contract=CONTRACT,
            draft_vocab_size=pipeline.VOCAB,
            consumer="job",
        ) as stream:
            resume(job.draft, trainer, stream, contract=CONTRACT, from_step=from_step)
            if ranks.is_first:
                _keep_book(job, trainer, stream)
                _save_slowly(job.first_save_s)
            if death is not None and death.rank == ranks.rank:
                _die_in(death, {"learn": (trainer, "step"), "ack": (stream, "ack"), "commit": (stream, "commit")})
            TrainingRun(
                trainer,
                stream,
                job.draft,
                contract=CONTRACT.id,
                samples_per_step=job.samples_per_step,
                samples_per_batch=job.samples_per_batch,
                checkpoint_every=job.checkpoint_every,
            ).train()
        save_file(trainer.state_tensors(), job.folder / f"end-{ranks.rank}.safetensors")
        pipe.send("end")


def _keep_book(job: Job, trainer: DraftTrainer, stream: RoundStream) -> None:
    """Write what each step learned, and where this life goes on from."""
    book = (job.folder / "learned.jsonl").open("a")
    book.write(json.dumps([trainer.step_count, []]) + "\n")
    book.flush()
    learn = trainer.step

    def learned(batches: Any, round_ids: Any = ()) -> Any:
        result = learn(batches, round_ids)
        book.write(json.dumps([result.step, list(round_ids)]) + "\n")
        book.flush()
        return result

    trainer.step = learned  # type: ignore[method-assign]


def _save_slowly(pause_s: float) -> None:
    """The first checkpoint takes so long."""
    plain, pauses = run.save_checkpoint, [pause_s]

    def save(*args: Any, **options: Any) -> Path:
        time.sleep(pauses.pop() if pauses else 0.0)
        return plain(*args, **options)

    run.save_checkpoint = save


def _die_in(death: Death, doings: dict[str, tuple[Any, str]]) -> None:
    owner, name = doings[death.doing]
    plain, numbers = getattr(owner, name), itertools.count(1)

    def deadly(*args: Any, **options: Any) -> Any:
        if next(numbers) == death.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **options)

    setattr(owner, name, deadly)
