"""What a run's trainers retained, put into the queue of its next epoch; and what janitors make of it meanwhile."""

from dataclasses import dataclass, field

import pytest

import pipeline
import samples as made
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError, ContractMismatch, QueueFull, StorageError
from eaglefeed.producer.ledger import QueueLedger, register
from eaglefeed.producer.replay import Replayed, check_over, replay
from eaglefeed.queue import rules
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.contract import RETAIN_RECORD
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import Collected, collect, delete_released
from eaglefeed.storage.memory import MemoryStore
from queue_servers import Bench

NUM = 12
IDS = {f"p-{index}" for index in range(NUM)}
ORDER = [f"p-{index}" for index in (9, 10, 5, 3, 1, 4, 0, 7, 11, 6, 8, 2)]
"""Of seed 7 in epoch 1."""


@dataclass
class Epochs:
    """A run over a store in memory, and its queues by name."""

    groups: tuple[str, ...] = ("main",)
    clock: pipeline.TurnableClock = field(default_factory=pipeline.TurnableClock)

    def __post_init__(self) -> None:
        self.server = MemoryServer(self.clock)
        self.store = MemoryStore(clock=self.clock)
        self.run = pipeline.Run(clock=self.clock, store=self.store)
        self.run.prompts, self.run.samples = self.open("prompts"), self.open("samples")
        self.run.samples.configure(QueueLimits(high_count=50, low_count=20), groups=self.groups)

    def open(self, name: str, group: str = "main") -> LeaseQueue:
        return MemoryLeaseQueue(self.server, "run", name, group)

    def epoch(self, epoch: int, group: str = "main") -> LeaseQueue:
        return self.open(rules.epoch_queue(epoch), group)

    def produce(self, *indices: int, close: bool = True) -> None:
        self.run.feed(*(pipeline.prompt(index) for index in indices), close=close)
        assert self.run.produce().dead == 0

    def train(self, epoch: int, *, retain: bool, group: str = "main", n: int | None = None) -> list[str]:
        """Train on `n` samples, or all; returns their ids in the order in which they came."""
        seen = list[str]()
        queue = self.epoch(epoch, group)
        with SampleStream(queue, self.store, consumer="t", contract="", retain=retain, clock=self.clock) as stream:
            while len(seen) != n and (batches := stream.take(1)):
                seen += [sample_id for batch in batches for sample_id in batch.sample_ids]
                stream.ack()
        return seen

    def replay(self, epoch: int | None = None, *, seed: int = 0, max_depth: int = 1000) -> Replayed:
        return replay(self.store, self.open, "run", epoch=epoch, seed=seed, max_depth=max_depth)

    def gc(self, *, lifted: bool = False) -> Collected:
        self.clock.advance(61)
        return collect(self.store, QueueLedger("run", self.open, lifted=lifted), clock=self.clock)

    def ids(self, epoch: int, group: str = "main") -> list[str]:
        return [item.id for item in self.epoch(epoch, group).payloads()]

    @property
    def keys(self) -> set[str]:
        return {shard.key for shard in self.store.scan()}

    def shard(self, sample_id: str, token: int, run_id: str = "run") -> SampleRef:
        tensors = made.tensors()
        return self.store.put(made.ref(tensors, sample_id=sample_id, token=token, run_id=run_id), tensors)


@pytest.fixture
def run() -> Epochs:
    """A run whose first epoch was retained."""
    run = Epochs()
    run.produce(*range(NUM))
    assert set(run.train(0, retain=True)) == IDS
    return run


def lease(queue: LeaseQueue, n: int = 1) -> Lease:
    got = queue.lease(n, visibility_timeout_s=60, consumer="c")
    assert isinstance(got, Lease)
    return got


# what an epoch is


def test_every_sample_comes_once_in_each_epoch_without_a_forward_of_the_target(run: Epochs) -> None:
    calls = run.run.target.calls
    for epoch in (1, 2, 3):
        found = run.replay()
        assert (found.epoch, found.refs, found.known, found.dead, found.strays) == (epoch, NUM, 0, 0, 0)
        seen = run.train(epoch, retain=epoch < 3)
        assert (len(seen), set(seen)) == (NUM, IDS)
        stats = run.epoch(epoch).stats()
        assert (stats.done, stats.dead, stats.closed, stats.unsettled) == (NUM, 0, True, 0)
    assert run.run.target.calls == calls == NUM
    assert run.keys == set(), "the last epoch was not retained, its shards went as it was committed"


def test_an_epochs_tensors_are_those_of_the_first(run: Epochs) -> None:
    run.replay()
    before = {key_of(decode_ref(item.payload)): item.id for item in run.epoch(1).payloads()}
    assert set(before) == run.keys
    with SampleStream(run.epoch(1), run.store, consumer="t", contract="") as stream:
        for batch in stream.take(NUM):
            index = int(batch.sample_ids[0].removeprefix("p-"))
            assert batch.aux_hidden_states[0, :, 0].tolist() == [1.0 + index, 2.0, 3.0]
            assert batch.input_ids[0].tolist() == [2, 3, 0]


def test_the_order_depends_on_seed_epoch_and_ids_alone() -> None:
    """Another order on another machine, or in a later version, would be another training run."""
    orders = []
    for indices in (range(NUM), reversed(range(NUM))):
        run = Epochs()
        run.produce(*indices)
        run.train(0, retain=True)
        run.replay(seed=7)
        orders.append(run.ids(1))
        run.train(1, retain=True)
        run.replay(seed=7)
        orders.append(run.ids(2))
    assert orders[0] == orders[2] != orders[1] == orders[3]
    assert orders[0] == ORDER
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(IDS)


def test_another_seed_is_another_order(run: Epochs) -> None:
    other = Epochs()
    other.produce(*range(NUM))
    other.train(0, retain=True)
    run.replay(seed=1)
    other.replay(seed=2)
    assert run.ids(1) != other.ids(1)


def test_a_trainer_that_is_stopped_gives_samples_back_in_the_epochs_order(run: Epochs) -> None:
    run.replay(seed=7)
    assert run.train(1, retain=True, n=2) == ORDER[:2]
    assert [item.id for item in lease(run.epoch(1), NUM).items] == ORDER[2:]


def test_groups_and_limits_are_those_of_the_epoch_before() -> None:
    run = Epochs(groups=("ema", "own"))
    run.produce(0, 1)
    run.train(0, retain=True, group="ema")
    with pytest.raises(ConfigError, match=r"samples: its epoch is not over.*closed, 2 to do in group own"):
        run.replay()
    run.train(0, retain=False, group="own")
    run.replay(max_depth=9)
    assert run.epoch(1).limits() == QueueLimits(high_count=50, low_count=20, max_depth=9)
    assert [set(run.train(1, retain=True, group=group)) for group in ("ema", "own")] == [{"p-0", "p-1"}] * 2
    assert run.replay().refs == 2


# repeating it


def test_a_repeated_replay_puts_nothing_twice_and_leaves_an_epoch_that_is_under_way_alone(run: Epochs) -> None:
    run.replay()
    run.train(1, retain=True, n=5)
    order = run.ids(1)
    found = run.replay(1)
    assert (found.epoch, found.refs, found.known) == (1, 0, NUM)
    assert run.ids(1) == order
    with pytest.raises(ConfigError, match=r"samples\.e1: its epoch is not over.*7 to do in group main"):
        run.replay()
    run.train(1, retain=True)
    assert run.replay(1).known == NUM
    assert run.replay().epoch == 2


@pytest.mark.parametrize("num_put", [0, 5, NUM])
def test_what_a_killed_replay_left_is_filled_up_in_the_same_order(
    run: Epochs, monkeypatch: pytest.MonkeyPatch, num_put: int
) -> None:
    put = MemoryLeaseQueue.put

    def die_midway(queue: MemoryLeaseQueue, items: list[QueueItem]) -> None:
        put(queue, items[:num_put])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryLeaseQueue, "put", die_midway)
        with pytest.raises(KeyboardInterrupt):
            run.replay(seed=7)
    assert not run.epoch(1).stats().closed
    trained = run.train(1, retain=True, n=2) if num_put == 5 else []  # a trainer may be at work already
    found = run.replay(seed=7)
    assert (found.epoch, found.refs, found.known) == (1, NUM - num_put, num_put)
    assert run.gc().orphans == 0
    assert trained + run.train(1, retain=True) == ORDER


def test_a_replay_that_was_killed_is_not_gone_on_with_in_another_order(
    run: Epochs, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MemoryLeaseQueue.put

    def die_midway(queue: MemoryLeaseQueue, items: list[QueueItem]) -> None:
        put(queue, items[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryLeaseQueue, "put", die_midway)
        with pytest.raises(KeyboardInterrupt):
            run.replay(seed=7)
    with pytest.raises(ContractMismatch, match=r"samples\.e1: begun with another seed, wanted seed=7, got seed=8"):
        run.replay(seed=8)
    assert run.ids(1) == ORDER[:5]
    run.epoch(1).purge()
    assert run.replay(seed=8).refs == NUM


def test_a_replay_killed_before_it_closed_the_queue_is_finished(run: Epochs, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(queue: MemoryLeaseQueue) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryLeaseQueue, "close", die)
        with pytest.raises(KeyboardInterrupt):
            run.replay()
    found = run.replay()
    assert (found.epoch, found.refs, found.known, run.epoch(1).stats().closed) == (1, 0, NUM, True)


# refusals


def test_an_epoch_that_is_not_over_is_not_followed() -> None:
    run = Epochs()
    run.produce(0, 1)
    with pytest.raises(ConfigError, match=r"samples: its epoch is not over.*closed, 2 to do"):
        run.replay()
    held = lease(run.run.samples, 2)
    run.run.samples.ack(held.token, ["p-0", "p-1"], step=1)
    with pytest.raises(ConfigError, match="2 to do"):  # a checkpoint may be restored still
        run.replay()
    assert run.epoch(1).stats().closed is False


def test_a_feed_that_was_kept_open_is_not_over() -> None:
    run = Epochs()
    run.produce(0)
    run.train(0, retain=True)
    run.open("prompts").purge()
    run.run.samples.requeue(["nothing"])
    run.run.prompts.put([QueueItem("p-9", b"bad")])
    held = lease(run.run.prompts)
    run.run.prompts.nack(held.token, ["p-9"], reason="bad", retryable=False)
    run.run.prompts.requeue(["p-9"])  # its sample may come: the samples are open again
    with pytest.raises(ConfigError, match=r"samples: its epoch is not over.*open, 0 to do"):
        run.replay()


def test_an_epoch_that_retained_nothing_is_not_followed(run: Epochs) -> None:
    run.replay()
    run.train(1, retain=False)
    with pytest.raises(ConfigError, match=r"samples\.e1: its trainers retained nothing.*train\.retain=true"):
        run.replay()
    plain = Epochs()
    plain.produce(0)
    plain.train(0, retain=False)
    with pytest.raises(ConfigError, match="samples: its trainers retained nothing"):
        plain.replay()
    assert plain.epoch(1).stats().unsettled == 0


def test_an_epoch_whose_shards_were_deleted_by_hand_is_refused(run: Epochs) -> None:
    for shard in list(run.store.scan()):
        run.store.delete(run.store.read_ref(shard.key))
    with pytest.raises(ConfigError, match="no shards of run run"):
        run.replay()


@pytest.mark.parametrize("epoch", [0, 2, 7])
def test_an_epoch_that_cannot_follow_is_refused(run: Epochs, epoch: int) -> None:
    with pytest.raises(ConfigError, match=rf"wanted 1 to 1, got {epoch}"):
        run.replay(epoch)


def test_more_samples_than_the_queue_may_hold_are_refused_before_the_first(run: Epochs) -> None:
    with pytest.raises(QueueFull, match=r"wanted at most 11 refs, got 12.*max_depth"):
        run.replay(max_depth=NUM - 1)
    assert run.ids(1) == []
    assert run.replay(max_depth=NUM).refs == NUM


def test_a_store_that_fails_leaves_the_epoch_empty(run: Epochs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key: str) -> SampleRef:
        raise StorageError("cannot be read", subject=key)

    with monkeypatch.context() as patch:
        patch.setattr(run.store, "read_ref", fail)
        with pytest.raises(StorageError, match="cannot be read"):
            run.replay()
    assert run.ids(1) == []
    assert run.replay().refs == NUM


# what is left out


def test_dead_letters_stay_out_until_they_are_mended(run: Epochs) -> None:
    run.replay()
    held = lease(run.epoch(1), 3)
    dead = [item.id for item in held.items]
    run.epoch(1).nack(held.token, dead, reason="bad", retryable=False)
    run.train(1, retain=True)
    assert run.epoch(1).requeue(dead[:1]) == 1
    assert run.train(1, retain=True) == dead[:1]
    found = run.replay()
    assert (found.refs, found.dead) == (NUM - 2, 2)
    assert set(run.ids(2)) == IDS - set(dead[1:])
    run.train(2, retain=True)
    assert run.replay().dead == 2, "those of every earlier epoch"
    assert run.gc().orphans == 0


def test_shards_that_nobody_handed_off_or_that_are_damaged_or_of_other_runs_stay_out(run: Epochs) -> None:
    newest = run.shard("p-3", 2**60)
    run.shard("stray", 1)
    run.shard("p-4", 2**60, run_id="other")
    broken = min(key for key in run.keys if "/p-5." in key)
    data, modified_s = run.store._shards[broken]
    run.store._shards[broken] = (data[:-1], modified_s)
    found = run.replay()
    assert (found.refs, found.strays, found.foreign, found.older) == (NUM - 1, 1, 1, 1)
    assert set(found.damaged) == {broken}
    refs = {item.id: decode_ref(item.payload) for item in run.epoch(1).payloads()}
    assert set(refs) == IDS - {"p-5"}
    assert refs["p-3"] == newest


def test_samples_of_the_epoch_before_whose_shards_are_gone_are_counted() -> None:
    run = Epochs()
    run.produce(*range(NUM))
    learned = run.train(0, retain=False, n=4)  # and deleted: retention begins in mid-epoch
    rest = run.train(0, retain=True)
    held = {shard.key for shard in run.store.scan()}
    data, modified_s = run.store._shards[broken := min(held)]
    run.store._shards[broken] = (data[:-1], modified_s)
    found = run.replay()
    assert (found.refs, found.gone, len(found.damaged)) == (NUM - 5, 5, 1)
    assert set(run.ids(1)) < set(rest) == IDS - set(learned)
    run.train(1, retain=True)
    assert run.replay().gone == 0, "the epoch before had no more"


# janitors, and feeding meanwhile


def test_no_janitor_takes_the_shards_of_a_standing_epoch_in_whatever_state_they_are(run: Epochs) -> None:
    kept = run.keys
    run.replay()
    assert (run.gc().kept, run.keys) == (NUM, kept)
    queue = run.epoch(1)
    held = lease(queue)
    queue.nack(held.token, [held.items[0].id], reason="bad", retryable=False)
    held = lease(queue, 3)
    queue.ack(held.token, [item.id for item in held.items], step=1)
    lease(queue, 2)
    assert (run.gc().kept, run.keys) == (NUM, kept)
    assert (run.gc(lifted=True).kept, run.keys) == (NUM, kept)  # this epoch's queue names them all


def test_without_a_record_of_the_epoch_a_lifted_janitor_would_take_its_shards(run: Epochs) -> None:
    """That the test above can fail."""
    run.replay()
    del run.server.record("run")["queue:samples.e1"]
    assert run.gc(lifted=True).orphans == NUM


def test_a_replay_is_known_to_janitors_before_its_first_ref(run: Epochs, monkeypatch: pytest.MonkeyPatch) -> None:
    put = MemoryLeaseQueue.put

    def look(queue: MemoryLeaseQueue, items: list[QueueItem]) -> object:
        assert run.gc().orphans == 0
        found = put(queue, items)
        assert run.gc(lifted=True).orphans == 0
        return found

    monkeypatch.setattr(MemoryLeaseQueue, "put", look)
    assert run.replay().refs == NUM


def test_new_prompts_that_are_fed_while_an_epoch_stands_change_nothing_in_it_and_come_in_the_next(run: Epochs) -> None:
    run.replay(seed=7)
    run.run.prompts.purge()  # an operator's way to reopen a run that was closed
    run.run.feed(pipeline.prompt(40), close=False)
    assert run.run.samples.stats().closed
    run.run.prompts.close()
    assert run.run.produce().produced == 1
    assert run.gc().orphans == 0
    assert run.train(1, retain=True) == ORDER
    assert run.gc().orphans == 0
    with pytest.raises(ConfigError, match="samples: its epoch is not over"):
        run.replay()
    assert run.train(0, retain=True) == ["p-40"]
    assert run.gc().orphans == 0
    run.replay()
    assert set(run.train(2, retain=True)) == IDS | {"p-40"}


# the last epoch


def test_a_last_epoch_that_does_not_retain_deletes_each_shard_as_it_is_committed(run: Epochs) -> None:
    run.replay(seed=7)
    assert run.train(1, retain=False, n=4) == ORDER[:4]
    left = {key.partition("/")[2].partition(".")[0] for key in run.keys}
    assert left == set(ORDER[4:])
    assert run.gc().orphans == 0
    run.train(1, retain=False)
    assert run.keys == set()


def test_retained_shards_go_when_the_retention_is_lifted(run: Epochs) -> None:
    assert (run.gc().orphans, len(run.keys)) == (0, NUM)
    run.replay()
    with pytest.raises(ConfigError, match=r"samples\.e1: its epoch is not over"):
        check_over(run.open, "samples.e1")
    run.train(1, retain=True)
    check_over(run.open, "samples.e1")
    found = run.gc(lifted=True)
    assert (found.orphans, run.keys) == (NUM, set())


def test_retention_is_each_queues_own(run: Epochs) -> None:
    assert QueueLedger("run", run.open).retains("samples")
    assert not QueueLedger("run", run.open).retains("samples.e1")
    assert not QueueLedger("run", run.open, lifted=True).retains("samples")
    assert set(run.run.samples.agreed()) >= {RETAIN_RECORD + "samples"}


# real servers


def test_an_epoch_is_the_same_on_every_kind_of_queue(bench: Bench) -> None:
    store, tensors = MemoryStore(), made.tensors(batch=1, length=2)
    register(store, bench.queue("samples"), "run")
    for index in range(NUM):
        store.put(made.ref(tensors, sample_id=f"p-{index}", token=index + 1, num_tokens=2), tensors)
    bench.queue("samples").configure(QueueLimits(high_count=50, low_count=20), groups=["ema", "own"])
    refs = [store.read_ref(shard.key) for shard in store.scan()]
    bench.queue("samples").put([QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes) for ref in refs])
    bench.queue("samples").close()
    bench.queue("samples").agree(RETAIN_RECORD + "samples", b"1")
    for group in ("ema", "own"):
        queue = bench.queue("samples", group)
        held = lease(queue, NUM)
        queue.ack(held.token, [item.id for item in held.items])
    assert delete_released(queue, store, retains=lambda: True) == NUM
    found = replay(store, bench.queue, "run", seed=7, max_depth=NUM)
    assert (found.epoch, found.refs, found.known, found.dead, found.strays) == (1, NUM, 0, 0, 0)
    for group in ("ema", "own"):
        assert [item.id for item in lease(bench.queue("samples.e1", group), NUM).items] == ORDER
    stats = bench.queue("samples.e1", "own").stats()
    assert (stats.closed, stats.leased, bench.queue("samples.e1").limits().high_count) == (True, NUM, 50)
    assert (replay(store, bench.queue, "run", epoch=1, max_depth=NUM).known) == NUM
    for lifted in (False, True):
        ledger = QueueLedger("run", bench.queue, lifted=lifted)
        assert collect(store, ledger, grace_s=0).kept == NUM
