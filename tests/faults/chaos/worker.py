"""The workers of a chaos run, each a process of its own: `python -m faults.chaos.worker RUN_FOLDER ROLE NUMBER`.

    feeder    puts the prompts, from the start again whenever it is started
    producer  leases prompts and hands off a sample each
    draft     trains with checkpoints: acks are tentative, and a restart goes back to one of the last two checkpoints
    plain     settles at once, and gives back, refuses and loses some

A payload is "<kind>" for a prompt and "<kind>:<prompt's token>" for a sample. An item of kind `kills-<role>` kills
whoever gets it, before he can say anything. Exit code 0: the work is done; 3: fenced off by a successor.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglefeed import logs
from eaglefeed.errors import IdConflict, StaleLease
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import DrainState, Lease, NoLease, QueueItem
from faults.chaos.checkpoints import Checkpoints, NotTheOwner
from faults.chaos.record import RecordedQueue, Recorder

NAMESPACE = "chaos"
FENCED = 3
_CHUNK = 500
_CHECKPOINT_EVERY = 4
_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all processes of a run know; lies in its folder as plan.json."""

    url: str
    seed: int
    num_prompts: int
    max_wait_s: float = 30.0
    min_timeout_s: float = 0.3
    max_timeout_s: float = 1.0
    killers_every: int = 700

    def kind(self, index: int) -> str:
        """What prompt number `index` does to those who get it."""
        place = index % self.killers_every
        return {11: "kills-producer", 222: "kills-plain", 444: "kills-plain"}.get(place, "fine")


class Worker:
    """What every role has: the queues, a recorder, and its own dice."""

    def __init__(self, folder: Path, role: str, number: int) -> None:
        self.folder, self.role, self.number = folder, role, number
        self.name = f"{role}.{number}"
        self.plan = Plan(**json.loads((folder / "plan.json").read_text()))
        self.dice = random.Random(f"{self.plan.seed} {self.name}")
        self._recorder = Recorder(folder / "calls" / f"{self.name}.jsonl")
        self._client = connect(self.plan.url, max_wait_s=self.plan.max_wait_s)

    def queue(self, name: str, group: str = "main") -> RecordedQueue:
        return RecordedQueue(open_queue(self._client, NAMESPACE, name, group), self._recorder)

    def lease(self, queue: RecordedQueue, n: int, session: int = 0) -> Lease | NoLease:
        """Lease for a random time, and die of what kills this role."""
        timeout_s = self.dice.uniform(self.plan.min_timeout_s, self.plan.max_timeout_s)
        got = queue.lease(n, timeout_s=timeout_s, consumer=self.name, wait_s=_WAIT_S, session=session)
        fatal = f"kills-{self.role}".encode()
        if isinstance(got, Lease) and any(item.payload.startswith(fatal) for item in got.items):
            os.kill(os.getpid(), signal.SIGKILL)
        return got

    def leases(self, queue: RecordedQueue, most: int) -> Iterator[Lease]:
        """Lease after lease, until the queue is drained."""
        while True:
            got = self.lease(queue, self.dice.randint(most // 8, most))
            if isinstance(got, Lease):
                yield got
            elif got.state is DrainState.DRAINED:
                return


def feed(worker: Worker) -> None:
    prompts, plan = worker.queue("prompts"), worker.plan
    for first in range(0, plan.num_prompts, _CHUNK):
        numbers = range(first, min(first + _CHUNK, plan.num_prompts))
        prompts.put([QueueItem(f"s{number}", plan.kind(number).encode()) for number in numbers])
    prompts.queue.close()


def produce(worker: Worker) -> None:
    prompts, samples = worker.queue("prompts"), worker.queue("samples", "plain").queue
    for lease in worker.leases(prompts, 32):
        for index, item in enumerate(lease.items):
            if worker.dice.random() < 0.002:
                rest = [left.id for left in lease.items[index:]]
                prompts.nack(lease.token, rest, reason="store full", delay_s=worker.dice.choice([0, 0.2, None]))
                break
            made = QueueItem(item.id, item.payload + f":{lease.token}".encode(), stored_bytes=100)
            try:
                prompts.handoff(lease.token, made, samples)
            except StaleLease:
                break
            except IdConflict:
                raise SystemExit("two samples of one id") from None
        while not samples.wait_for_room(_WAIT_S):
            samples.beat("producer", worker.name)
    samples.close()


def consume(worker: Worker) -> None:
    samples, dice = worker.queue("samples", "plain"), worker.dice
    for lease in worker.leases(samples, 64):
        chance = dice.random()
        if 0.5 < chance < 0.55:
            samples.sweep(100)
        if chance < 0.01:
            continue  # forgotten: its time runs out
        if chance < 0.04:
            time.sleep(worker.plan.max_timeout_s + 0.2)
        if chance > 0.9:
            renew(worker, samples, lease)
        ids = [item.id for item in lease.items]
        dice.shuffle(ids)
        for nack in _some_nacks(dice):
            samples.nack(lease.token, [ids.pop()], **nack) if ids else None
        cut = dice.randint(0, len(ids)) if chance > 0.7 else len(ids)
        for part in (ids[:cut], ids[cut:]):
            samples.ack(lease.token, part) if part else None


def renew(worker: Worker, queue: RecordedQueue, lease: Lease) -> None:
    try:
        queue.renew(lease.token, timeout_s=worker.plan.max_timeout_s)
    except StaleLease:
        return


def _some_nacks(dice: random.Random) -> Iterator[dict[str, Any]]:
    chance = dice.random()
    if chance < 0.05:
        yield {"reason": "again", "delay_s": dice.choice([None, 0.05, 0.3])}
    if chance < 0.07:
        yield {"reason": "given back", "delay_s": 0}
    if chance < 0.02:
        yield {"reason": "corrupt", "retryable": False}


def train(worker: Worker) -> None:
    """Learn what is acknowledged; commit the oldest checkpoint that is kept."""
    samples = worker.queue("samples", "draft")
    files = Checkpoints(worker.folder / "checkpoints", worker.number)
    with files.owned(claim=True):
        chosen = files.choose(worker.dice, samples.queue.stats().committed_step)
        seen = chosen.since(samples.queue.stats().committed_step)
        session = samples.restore(chosen.step, seen=seen, origin=chosen.session)
    model, step = chosen.steps, chosen.step
    while True:
        got = worker.lease(samples, worker.dice.randint(16, 64), session)
        if isinstance(got, Lease):
            step += 1
            _learn(worker, samples, got, model, step, session)
        elif got.state is not DrainState.EMPTY:
            with files.owned():
                oldest = files.save(session, step, model, keep=1)
            samples.commit(oldest, session=session)
            if got.state is DrainState.DRAINED:
                return
        if isinstance(got, Lease) and step % _CHECKPOINT_EVERY == 0:
            with files.owned():
                oldest = files.save(session, step, model, keep=2)
            samples.commit(oldest, session=session)


def _learn(
    worker: Worker, samples: RecordedQueue, lease: Lease, model: dict[int, list[str]], step: int, session: int
) -> None:
    ids = [item.id for item in lease.items]
    chance = worker.dice.random()
    if chance < 0.03:
        samples.nack(lease.token, [ids.pop()], reason="given back", delay_s=0)
    elif chance < 0.06:
        ids.pop()  # forgotten: its time runs out
    elif chance < 0.08:
        samples.nack(lease.token, [ids.pop()], reason="again", delay_s=0.05)
    model[step] = list(samples.ack(lease.token, ids, step=step, session=session).ok) if ids else []


ROLES = {"feeder": feed, "producer": produce, "draft": train, "plain": consume}


def main() -> int:
    folder, role, number = sys.argv[1:]
    logs.configure("ERROR")
    try:
        ROLES[role](Worker(Path(folder), role, int(number)))
    except (StaleLease, NotTheOwner):
        return FENCED
    return 0


if __name__ == "__main__":
    sys.exit(main())
