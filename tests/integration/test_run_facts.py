"""What is read of a run: exact counts of queues and groups, its journal, reasons of dead letters, its contract."""

import json
import math
from typing import NamedTuple

import fakeredis
import pytest

import pipeline
from eaglefeed.ops.bottleneck import bottleneck
from eaglefeed.ops.facts import DeadFacts, RunFacts, read_run, read_stats
from eaglefeed.ops.series import series_point
from eaglefeed.producer.ledger import enlist
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import MAIN_GROUP, LeaseQueue, QueueLimits
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.journal import RunJournal
from eaglefeed.schema.contract import CONTRACT_RECORD
from queue_steps import fail, finish, ids, items, learn, lease, numbered


class Run(NamedTuple):
    client: QueueClient
    run: str = "demo"

    def named(self, name: str, group: str = MAIN_GROUP) -> LeaseQueue:
        return open_queue(self.client, self.run, name, group)


@pytest.fixture
def run() -> Run:
    return Run(QueueClient(fakeredis.FakeRedis().connection_pool, address="redis://somewhere"))


def test_a_run_that_nobody_fed_is_read_as_such(run: Run) -> None:
    facts = read_run(run)
    assert (facts.is_fed, facts.is_drained, facts.started_s, facts.contract) == (False, False, None, None)
    assert (facts.epochs, list(facts.samples)) == ((0,), [("samples", "main")])
    assert bottleneck(facts).kind == "not_fed"
    json.dumps(facts.to_json(), allow_nan=False)


def test_counts_are_those_of_every_queue_and_group(run: Run) -> None:
    limits = QueueLimits(high_count=7, low_count=3)
    run.named("samples", "a").configure(limits, groups=["a", "b"])
    run.named("prompts").put(items(*numbered(5)))
    held = lease(run.named("prompts"), 2)
    for name in ids(held):
        run.named("prompts").handoff(held.token, name, items(name, stored_bytes=10)[0], run.named("samples", "a"))
    learn(run.named("samples", "a"), 1, step=3)
    later = run.named("samples.e1")
    enlist(later)
    later.put(items("x", "y", "z"))
    finish(later, 1)
    facts = read_run(run)
    assert (facts.prompts.ready, facts.prompts.done) == (3, 2)
    found = {key: (each.ready, each.tentative, each.done) for key, each in facts.samples.items()}
    assert found == {("samples", "a"): (1, 1, 0), ("samples", "b"): (2, 0, 0), ("samples.e1", "main"): (2, 0, 1)}
    assert facts.samples["samples", "b"].stored_bytes == 20
    assert facts.epochs == (0, 1)
    assert facts.limits["samples"] == limits
    assert facts.limits["samples.e1"] == QueueLimits()


def test_dead_letters_are_counted_by_class_and_no_more_are_looked_at_than_asked(run: Run) -> None:
    prompts = run.named("prompts")
    prompts.put(items(*numbered(10)))
    fail(prompts, *numbered(3), reason="SampleCorrupt: rows are short")
    fail(prompts, *numbered(5)[3:], reason="KeyError: 'x'")
    fail(prompts, *numbered(6)[5:], reason="something: else")
    fail(prompts, *numbered(7)[6:], reason="MadeUpByAnyoneError: x")
    dead = read_run(run).dead["prompts", "main"]
    assert (dead.count, dead.looked_at) == (7, 7)
    assert dead.by_class == {"SampleCorrupt": 3, "KeyError": 2, "other": 2}
    assert dead.examples["SampleCorrupt"][0] == ("i00000", "SampleCorrupt: rows are short")
    some = read_run(run, look_at=4).dead["prompts", "main"]
    assert (some.count, some.looked_at, sum(some.by_class.values())) == (7, 4, 4)
    assert read_run(run, look_at=0).dead == {}


def test_an_item_of_which_workers_died_is_a_class_of_its_own(run: Run) -> None:
    prompts = run.named("prompts")
    prompts.configure(QueueLimits(max_deliveries=1))
    prompts.put(items("a"))
    lease(prompts, 1, timeout_s=0.0)
    prompts.lease(1, visibility_timeout_s=60, consumer="c")
    assert read_run(run).dead["prompts", "main"].by_class == {"crashed": 1}


def test_the_contract_is_the_one_in_the_runs_record_and_none_if_that_cannot_be_read(run: Run) -> None:
    run.named("samples").agree(CONTRACT_RECORD, pipeline.contract().to_json())
    assert read_run(run).contract == pipeline.contract()
    broken = Run(run.client, "broken")
    broken.named("samples").agree(CONTRACT_RECORD, b"{}")
    assert read_run(broken).contract is None


def test_a_run_started_with_the_first_thing_that_is_told_and_ended_with_the_last_worker(run: Run) -> None:
    journal = RunJournal(run.client, run.run)
    journal.post("producer", "p", {"started_s": 1000.5})
    for liar, told in (("before time", -1.0), ("after all time", 1e300), ("never", math.nan)):
        journal.post("producer", liar, {"started_s": told})
    journal.append("feed", {})
    run.named("prompts").put(items("a"))
    finish(run.named("prompts"))
    assert read_run(run).ended_s is None
    run.named("prompts").close()
    run.named("samples").close()
    facts = read_run(run)
    assert (facts.is_drained, facts.started_s) == (True, 1000.5)
    assert facts.ended_s == max(worker.at_s for worker in facts.journal.workers)


def test_the_document_is_json_whatever_workers_told_and_holds_no_payload(run: Run) -> None:
    run.named("prompts").put(items("a", "b"))
    fail(run.named("prompts"), "a")
    journal = RunJournal(run.client, run.run)
    journal.post("trainer", "t", {"loss": math.nan, "accuracies": [math.inf, 0.5]})
    text = json.dumps(read_run(run).to_json(), allow_nan=False)
    document = json.loads(text)
    assert document["journal"]["workers"][0]["values"] == {"loss": None, "accuracies": [None, 0.5]}
    assert document["queues"]["prompts"]["groups"]["main"]["dead_letters"]["by_class"] == {"other": 1}
    assert "payload of" not in text


def test_counts_without_a_look_at_the_letters_are_told_still() -> None:
    from unit.test_bottleneck import stats  # hand-made counts

    document = RunFacts("r", "a", 0.0, stats("prompts", dead=3), {}).to_json()
    told = document["queues"]["prompts"]["groups"]["main"]["dead_letters"]
    assert (told["count"], told["looked_at"]) == (3, 0)
    assert DeadFacts().by_class == {}


def test_a_point_holds_the_counts_of_every_queue_and_what_living_workers_told(run: Run) -> None:
    run.named("prompts").put(items("a", "b", "c"))
    fail(run.named("prompts"), "a")
    run.named("prompts").beat("producer", "p1")
    journal = RunJournal(run.client, run.run)
    journal.post("producer", "p1", {"produced": 3, "paused_s": 1.5, "num_tokens": 10, "num_bytes": 100})
    journal.post("producer", "p0", {"produced": 4, "paused_s": 0.25, "state": "ended"})
    journal.post("trainer", "t", {"group": "big", "step": 7, "loss": 2.5, "accuracies": [0.5, 0.25], "room_wait": None})
    view = journal.read()
    point = series_point(read_stats(run), view.workers, now_s=view.workers[0].at_s + 5)
    assert {name: point[f"queue/prompts/main/{name}"] for name in ("ready", "dead", "done", "full")} == {
        "ready": 2,
        "dead": 1,
        "done": 0,
        "full": 0,
    }
    assert (point["producers/produced"], point["producers/paused_s"], point["producers/alive"]) == (7, 1.75, 1)
    assert {name: value for name, value in point.items() if name.startswith("trainer/")} == {
        "trainer/big/step": 7,
        "trainer/big/loss": 2.5,
        "trainer/big/accuracy/0": 0.5,
        "trainer/big/accuracy/1": 0.25,
    }
    assert point["trainers/alive"] == 0
    gone = series_point(read_stats(run), view.workers, now_s=view.workers[0].at_s + 60)
    assert not any(name.startswith("trainer/") for name in gone)
    assert gone["producers/produced"] == 7
