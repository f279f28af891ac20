"""A run with real processes and a real server, and a tormentor who kills, pauses and cuts off whom he likes.

    make chaos CHAOS="--deliveries 100000 --seed 7 --server redis"

Everything that the tormentor does follows from the seed, but not when it meets the workers. At the end, every item is
done or dead in each group, and the history of all calls is one of a queue that keeps its promises.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import queue_servers
from eaglefeed import logs
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue, QueueLimits
from faults.chaos.checkpoints import Checkpoints
from faults.chaos.history import Final, check, tell
from faults.chaos.record import Call, RecordedQueue, Recorder, read
from faults.chaos.slots import Slot
from faults.chaos.worker import NAMESPACE, Plan
from faults.processes import is_up, pid, wait_until

PLACES = {"prompts/main": "prompts", "samples/draft": "samples", "samples/plain": "samples"}
LIMITS = QueueLimits(
    max_deliveries=3, high_count=600, low_count=300, backoff_base_s=0.05, backoff_max_s=0.3, max_depth=10**7
)
_CREW = {"feeder": 1, "producer": 2, "draft": 1, "plain": 3}
_FIRST_DEEDS, _DELIVERIES_A_DEED = 10, 75
_REPORT_S, _STALLED_S = 5.0, 120.0


class Chaos:
    """One run in `folder`; `tally` counts what was done to it."""

    def __init__(self, folder: Path, *, deliveries: int, seed: int, server: str, pace_s: float) -> None:
        self.folder, self.seed, self._pace_s = folder, seed, pace_s
        self._binary = queue_servers.real_servers()[server]
        self.dice, self.tally = random.Random(seed), Counter[str]()
        self._stack = ExitStack()
        self._slots: list[Slot] = []
        self._deeds: list[Callable[[], None]] = []
        # a prompt is delivered once itself, and its sample once to each of the two groups
        self._num_prompts = deliveries // 3 + 1
        self._num_deeds = 0
        self._report_s, self._moved_s, self._last_state = 0.0, 0.0, ""

    def __enter__(self) -> "Chaos":
        (self.folder / "calls").mkdir(parents=True)
        self._server = self._stack.enter_context(EmbeddedServer(self.folder / "queue", binary=self._binary))
        self._client = connect(self._server.url, max_wait_s=30.0)
        self._stack.callback(self._client.close)
        self._sync_always()
        self._plan = Plan(url=self._server.url, seed=self.seed, num_prompts=self._num_prompts)
        (self.folder / "plan.json").write_text(json.dumps(asdict(self._plan)))
        self.queue("samples/plain").configure(LIMITS, groups=("draft", "plain"))
        self.queue("prompts/main").configure(LIMITS)
        self._recorder = Recorder(self.folder / "calls" / "tormentor.jsonl")
        self._stack.callback(self._recorder.close)
        self._slots = [Slot(self.folder, role, k) for role, count in _CREW.items() for k in range(count)]
        for slot in self._slots:
            self._stack.callback(slot.end)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def queue(self, place: str) -> LeaseQueue:
        name, _, group = place.partition("/")
        return open_queue(self._client, NAMESPACE, name, group)

    def _sync_always(self) -> None:
        """Nothing that was answered may be lost with the server's process."""
        self._client.call("CONFIG", "SET", "appendfsync", "always")

    def run(self) -> None:
        """Until everybody is through, and everything settled."""
        for slot in self._slots:
            slot.start()
        next_s = time.monotonic() + 1.0
        while self._tend() or self._start_again():
            self._report()
            if time.monotonic() >= next_s:
                if self._is_due():
                    self._torment()
                next_s = time.monotonic() + self.dice.uniform(0.2, 1.8) * self._pace_s
            time.sleep(0.02)

    def _is_due(self) -> bool:
        """Torment keeps step with the work, so that a slow machine is not tormented more than a fast one."""
        stats = self.queue("samples/plain").stats()
        return self._num_deeds < _FIRST_DEEDS + (stats.done + stats.dead) * 3 / _DELIVERIES_A_DEED

    def _report(self) -> None:
        """A line every few seconds.

        Raises:
            RuntimeError: nothing has moved for long.
        """
        now_s = time.monotonic()
        if now_s < self._report_s:
            return
        self._report_s, state = now_s + _REPORT_S, self._state()
        _say(state)
        if state != self._last_state:
            self._moved_s, self._last_state = now_s, state
        if now_s - self._moved_s > _STALLED_S:
            raise RuntimeError(f"nothing has moved for {_STALLED_S:g} s: {state}")

    def _tend(self) -> bool:
        """Whether anybody still works, after a look at everyone."""
        return sum(not slot.tend() for slot in self._slots) > 0

    def _start_again(self) -> bool:
        """Whether something is left though all are through, such as a requeued dead letter; then all start again."""
        left = any(self.queue(place).stats().unsettled for place in PLACES)
        for slot in self._slots if left else ():
            slot.start()
        return left

    def _state(self) -> str:
        all_stats = {place: self.queue(place).stats() for place in PLACES}
        told = [f"{place} {s.done}+{s.unsettled}, {s.dead} dead" for place, s in all_stats.items()]
        return "; ".join(told)

    def _torment(self) -> None:
        """Each deed once, so that a short run has them all, and then by weight."""
        weights = {
            self._kill_worker: 40,
            self._pause_worker: 25,
            self._cut_connections: 15,
            self._forget_scripts: 10,
            self._kill_server: 6,
            self._requeue: 4,
        }
        if not self._deeds:
            self._deeds = [*self.dice.choices([*weights], [*weights.values()], k=100), *weights]
        self._num_deeds += 1
        self._deeds.pop()()

    def _victim(self) -> "Slot | None":
        running = [slot for slot in self._slots if slot.is_running]
        weights = [3 if slot.role == "draft" else 1 for slot in running]
        return self.dice.choices(running, weights)[0] if running else None

    def _kill_worker(self) -> None:
        if victim := self._victim():
            victim.kill()
            self.tally["kills"] += 1

    def _pause_worker(self) -> None:
        """For longer than any lease. A trainer's successor may start meanwhile."""
        if victim := self._victim():
            victim.pause(self.dice.uniform(1.1, 2.5), replace=victim.role == "draft" and self.dice.random() < 0.6)
            self.tally["pauses"] += 1

    def _cut_connections(self) -> None:
        with self._recorder.call("outage"):
            self._client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        self.tally["connections_cut"] += 1

    def _forget_scripts(self) -> None:
        self._client.call("SCRIPT", "FLUSH")
        self.tally["script_flushes"] += 1

    def _kill_server(self) -> None:
        with self._recorder.call("outage"):
            os.kill(pid(self._server), signal.SIGKILL)
            wait_until(lambda: not is_up(self._server))
            time.sleep(self.dice.choice([0.0, 0.3]))
            with EmbeddedServer(self.folder / "queue", binary=self._binary):
                self._sync_always()
        self.tally["server_restarts"] += 1

    def _requeue(self) -> None:
        plain = self.queue("samples/plain")
        refused = [letter.id for letter in plain.dead_letters() if letter.reason == "corrupt"]
        if refused:
            chosen = self.dice.sample(refused, min(3, len(refused)))
            self.tally["requeued"] += RecordedQueue(plain, self._recorder).requeue(chosen)

    def judge(self) -> list[str]:
        """What is impossible about the run; `tally` is complete afterwards."""
        samples = RecordedQueue(self.queue("samples/plain"), self._recorder)
        while samples.sweep(1000):
            pass
        calls, finals = read((self.folder / "calls").iterdir()), {place: self._final(place) for place in PLACES}
        self._count(calls, finals)
        story = tell(calls, finals, max_deliveries=LIMITS.max_deliveries)
        return check(story) + list(self._killers_at_large(finals))

    def _killers_at_large(self, finals: dict[str, Final]) -> Iterator[str]:
        """Items that kill their worker are dead letters, and their lease-mates are not."""
        for index in range(self._plan.num_prompts):
            kind, item_id = self._plan.kind(index), f"s{index}"
            if kind != "fine" and not any(item_id in final.dead for final in finals.values()):
                yield f"{item_id} {kind}, and is not dead"

    def _final(self, place: str) -> Final:
        queue = self.queue(place)
        stats, dead = queue.stats(), frozenset(letter.id for letter in queue.dead_letters())
        if len(dead) != stats.dead:
            raise RuntimeError(f"{place}: {len(dead)} dead letters, and {stats.dead} are counted")
        model = None
        if place == "samples/draft":
            files = Checkpoints(self.folder / "checkpoints", 0)
            model = files.read(files.steps()[-1]).ids
        return Final(done=stats.done, dead=dead, unsettled=stats.unsettled, model=model)

    def _count(self, calls: list[Call], finals: dict[str, Final]) -> None:
        for call in calls:
            if call.op == "lease":
                self.tally["deliveries"] += len(call.ids)
                self.tally["redeliveries"] += sum(count > 1 for count in call.counts)
                self.tally["commit_due"] += call.mode == "commit_due"
            elif call.op in {"ack", "handoff"} and call.outcome != "maybe":
                refused = call.error == "StaleLease"
                self.tally["stale_refused"] += len(call.ids) if refused else len(call.ids) - len(call.ok)
            elif call.op == "restore":
                self.tally["restores"] += call.outcome == "yes"
        for slot in self._slots:
            self.tally["suicides"] += slot.suicides
            self.tally["fenced"] += slot.fenced
        dead = [int(item_id[1:]) for final in finals.values() for item_id in final.dead]
        self.tally["dead_poison"] = sum(self._plan.kind(index) != "fine" for index in dead)
        self.tally["dead_others"] = len(dead) - self.tally["dead_poison"]


def run(*, deliveries: int, seed: int, server: str, pace_s: float = 0.4, keep: bool = False) -> tuple[Any, list[str]]:
    """Run, judge, and return the tally and the faults; the folder is kept where there are faults."""
    folder = Path(tempfile.mkdtemp(prefix="eaglefeed-chaos-"))
    _say(f"chaos: {deliveries} deliveries, seed {seed}, {server}, in {folder}")
    started_s = time.monotonic()
    faults = ["it did not come to its end"]
    try:
        with Chaos(folder, deliveries=deliveries, seed=seed, server=server, pace_s=pace_s) as chaos:
            chaos.run()
            faults = chaos.judge()
    finally:
        if not faults and not keep:
            shutil.rmtree(folder)
    told = ", ".join(f"{name} {count}" for name, count in sorted(chaos.tally.items()))
    _say(f"chaos: {told}, stale accepted {sum('accepted' in fault for fault in faults)}")
    _say(
        f"chaos: {len(faults)} faults in {time.monotonic() - started_s:.0f} s"
        + "".join(f"\n  {f}" for f in faults[:20])
    )
    return chaos.tally, faults


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--deliveries", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--server", choices=sorted(queue_servers.real_servers()), default="valkey")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a good run, too")
    options = parser.parse_args()
    logs.configure("ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `with`, so that no process stays
    _, faults = run(deliveries=options.deliveries, seed=options.seed, server=options.server, keep=options.keep)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
