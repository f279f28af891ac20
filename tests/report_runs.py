"""Hand-made facts of runs that a report is written of: a usual one, one full of hostile texts, and others."""

import math
from dataclasses import replace
from typing import Any

from eaglefeed.ops.facts import DeadFacts, RunFacts
from eaglefeed.ops.series import series_point
from eaglefeed.queue.base import QueueLimits, QueueStats
from eaglefeed.queue.journal import JournalView, WorkerView
from eaglefeed.schema.contract import RunContract

START_S = 1_700_000_000.0
EVERY_S = 10.0


def contract(**changes: Any) -> RunContract:
    fields: dict[str, Any] = {"target": "echo", "target_fingerprint": "echo-1", "dtype": "float32", "hidden_size": 4}
    fields |= {"vocab_size": 50, "aux_layer_ids": (1, 2, 3), "supervision": "logits", "vocab_map_digest": ""}
    fields |= {"tokenizer_fingerprint": "t", "template_fingerprint": "p", "max_length": 2048, "schema_version": 1}
    return RunContract(**fields | changes)


def stats(name: str, group: str = "main", **counts: Any) -> QueueStats:
    """Counts of a queue, 0 where nothing is said."""
    zero = dict.fromkeys(("ready", "delayed", "leased", "tentative", "held", "parked", "done", "dead", "released"), 0)
    zero |= dict.fromkeys(("redelivered", "session", "committed_step", "stored_bytes"), 0)
    given: dict[str, Any] = zero | {"closed": True, "full": False, "workers": {}} | counts
    return QueueStats(name=name, group=group, **given)


def producer(name: str, at_s: float, **values: Any) -> WorkerView:
    told = {"host": "a", "started_s": START_S, "state": "working", "produced": 0, "num_tokens": 0, "num_bytes": 0}
    told |= {"paused_s": 0.0, "write_wait_s": 0.0, "versions": {"eaglefeed": "0.1", "torch": "2.13"}}
    return WorkerView("producer", name, at_s, told | values)


def trainer(name: str, at_s: float, **values: Any) -> WorkerView:
    told: dict[str, Any] = {"host": "b", "started_s": START_S + 20, "state": "working", "group": "main", "epoch": 0}
    told |= {"step": 40, "loss": 2.5, "accuracies": [0.5, 0.4], "delivered": 160, "acked": 160, "wait_s": 0.0}
    return WorkerView("trainer", name, at_s, told | {"world_size": 1, "versions": {"eaglefeed": "0.1"}} | values)


def feed(**values: Any) -> dict[str, Any]:
    """What a feed notes: 12 rows, of which 10 were queued."""
    fact: dict[str, Any] = {"at_s": START_S, "path": "answers.jsonl", "accepted": 10, "duplicates": 0, "rejected": 2}
    fact |= {"reasons": {"no assistant turn": 2}, "rejections": [[3, "c-3", "no assistant turn"], [7, "", "empty"]]}
    return fact | {"items": 10, "tokens": 1234, "num_bytes": 2**20, "queued": 10, "known": 0} | values


def usual(*, num_points: int = 90, total: int = 400) -> RunFacts:
    """A run under way: half of its items are trained on, one is dead, producers are paused at times."""
    at_s = START_S + EVERY_S * num_points
    series = tuple(_point(START_S + EVERY_S * n, n / num_points, total) for n in range(1, num_points + 1))
    prompts, samples = _queues(1.0, total)
    workers = (
        producer("gpu-1-4711", at_s - 3, produced=180, num_tokens=90_000, num_bytes=2**31, paused_s=45.0),
        producer("gpu-2-42", START_S + 400, produced=40, num_tokens=20_000, num_bytes=2**29, state="ended"),
        trainer("gpu-3-7", at_s - 2, wait_s=220.0),
    )
    dead = DeadFacts(1, 1, {"SampleCorrupt": 1}, {"SampleCorrupt": (("c-17", "SampleCorrupt: c-17: digest differs"),)})
    return RunFacts(
        run="weekend",
        address="redis://queue:6379",
        at_s=at_s,
        prompts=prompts,
        samples={("samples", "main"): samples},
        limits={"samples": QueueLimits(high_count=100, low_count=50, high_bytes=2**30, low_bytes=3 * 2**28)},
        journal=JournalView(workers, series, {"feed:1": feed(items=total, queued=total, tokens=400_000)}),
        dead={("samples", "main"): dead},
        contract=contract(),
        started_s=START_S,
    )


def _queues(share: float, total: int) -> tuple[QueueStats, QueueStats]:
    produced, trained = round(0.55 * share * total), round(0.4 * share * total)
    alive = {"producer": 1, "trainer": 1}
    prompts = stats("prompts", ready=total - produced - 1, done=produced, leased=1, workers=alive)
    waiting = max(0, produced - trained - 3)
    samples = stats(
        "samples",
        ready=waiting,
        leased=2,
        done=trained,
        dead=1,
        stored_bytes=waiting * 2**22,
        redelivered=4,
        workers=alive,
    )
    return prompts, replace(samples, redelivered=4)


def _point(at_s: float, share: float, total: int) -> dict[str, float]:
    told = {"step": round(40 * share), "loss": 2 + 3 * math.exp(-4 * share), "accuracies": [0.6 * share, 0.5 * share]}
    told |= {"data_wait": 0.4 + 0.2 * math.sin(9 * share), "samples_per_s": 1.0}
    workers = [producer("gpu-1-4711", at_s, paused_s=45 * share), trainer("gpu-3-7", at_s, **told)]
    return series_point(_queues(share, total), workers, now_s=at_s) | {"at_s": at_s}


def empty() -> RunFacts:
    """A run that nobody has fed."""
    nothing = stats("samples", closed=False)
    return RunFacts(
        run="new",
        address="unix:///tmp/queue.sock",
        at_s=START_S,
        prompts=stats("prompts", closed=False),
        samples={("samples", "main"): nothing},
    )


def finished(**changes: Any) -> RunFacts:
    """The usual run at its end: 399 of 400 items are trained on, and nobody lives."""
    facts = usual()
    samples = stats("samples", done=399, dead=1, redelivered=4, committed_step=100)
    prompts = stats("prompts", done=400)
    return replace(facts, prompts=prompts, samples={("samples", "main"): samples}, **changes)


def hostile() -> RunFacts:
    """The usual run, with texts and values that somebody wrote who may write to the queue's server."""
    facts = usual()
    attack = "<script>fetch('http://evil.example/')</script><img src=x onerror=alert(1)>"
    turned, long = "safe‮gnirts‬﻿", "W" * 9000
    bad_feed = feed(
        path=attack,
        reasons={attack: 3, turned: 1, long: 2, "nan": float("nan"), "text": "many"},
        rejections=[[attack, turned, long], "no row", [1], {"line": 2, "id": attack, "reason": long}],
        rejected=[],
        tokens=float("inf"),
    )
    nested = {"loss": {"a": [[[[[[[[[[1]]]]]]]]]]}, "step": "ten", "accuracies": [0.5, "x", None], "group": attack}
    workers = (
        producer(attack, facts.at_s, host=turned, versions={attack: long}, started_s="yesterday", produced=-1e308),
        trainer(long, facts.at_s, **nested),
        WorkerView("intruder", turned, facts.at_s, {"state": long}),
    )
    letters = tuple((f"{attack}-{n}", f"SampleCorrupt: {turned}{long}") for n in range(5))
    odd = {"trainer/main/loss": 1e308, "trainer/main/step": -1e308, "producers/alive": -3, attack: 1, "at_s": START_S}
    points = tuple(point | (odd if number % 7 == 3 else {}) for number, point in enumerate(facts.journal.series))
    noted = {"evaluation": {"at_s": START_S, "accept_length": attack}, attack: {"at_s": START_S}, "feed:1": bad_feed}
    return replace(
        facts,
        journal=JournalView(workers, points, noted, unreadable=3),
        dead={("samples", "main"): DeadFacts(5, 5, {"SampleCorrupt": 5}, {"SampleCorrupt": letters})},
        contract=contract(target=attack),
    )
