"""Refs of the shards in a store, put into the queue of a run whose server lost its data."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

import samples as made
from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError, QueueFull, StorageError
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.producer.rebuild import Rebuilt, rebuild
from eaglefeed.queue.base import LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.refs import SampleRef, decode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import collect
from eaglefeed.storage.memory import MemoryStore
from eaglefeed.storage.orphans import is_known
from eaglefeed.storage.shared_dir import SharedDirStore
from queue_servers import Bench


@dataclass
class Ruins:
    """A store whose queue is new."""

    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.server, self.store = MemoryServer(self.clock), MemoryStore(clock=self.clock)
        self.prompts, self.samples = self.open("prompts"), self.open("samples")

    def open(self, name: str, group: str = "main") -> LeaseQueue:
        return MemoryLeaseQueue(self.server, "run", name, group)

    def shard(self, sample_id: str, token: int = 1, run_id: str = "run") -> SampleRef:
        tensors = made.tensors()
        return self.store.put(made.ref(tensors, sample_id=sample_id, token=token, run_id=run_id), tensors)

    def damage(self, ref: SampleRef) -> None:
        data, modified_s = self.store._shards[key_of(ref)]
        self.store._shards[key_of(ref)] = (data[:-1], modified_s)

    def rebuild(self) -> Rebuilt:
        return rebuild(self.store, self.prompts, self.samples, "run")

    @property
    def refs(self) -> list[SampleRef]:
        return [decode_ref(item.payload) for item in self.samples.payloads()]


@pytest.fixture
def ruins() -> Ruins:
    return Ruins()


def test_every_whole_shard_is_ready_again_in_the_order_of_its_lease(ruins: Ruins) -> None:
    stored = [ruins.shard(name, token) for name, token in (("c", 1), ("a", 2), ("b", 30), ("d", 4))]
    found = ruins.rebuild()
    wanted = [stored[index] for index in (0, 1, 3, 2)]
    assert ruins.refs == wanted
    assert (found.refs, found.num_bytes) == (4, sum(ref.stored_bytes for ref in stored))
    assert ruins.samples.stats().stored_bytes == found.num_bytes


def test_of_several_shards_of_an_id_the_newest_counts_and_the_janitor_takes_the_others(ruins: Ruins) -> None:
    ruins.shard("a", 8)
    other = ruins.shard("b", 9)
    newest = ruins.shard("a", 10)
    found = ruins.rebuild()
    assert (ruins.refs, found.older) == ([other, newest], 1)
    ruins.clock.advance(61)
    collected = collect(ruins.store, QueueLedger("run", ruins.open), clock=ruins.clock)
    assert (collected.orphans, collected.kept) == (1, 2)
    assert {shard.key for shard in ruins.store.scan()} == {key_of(other), key_of(newest)}


def test_a_damaged_shard_is_named_and_an_older_one_takes_its_place(ruins: Ruins) -> None:
    older, newest, alone = ruins.shard("a", 9), ruins.shard("a", 10), ruins.shard("b")
    ruins.damage(newest)
    ruins.damage(alone)
    found = ruins.rebuild()
    assert (ruins.refs, found.refs, found.older) == ([older], 1, 0)
    assert set(found.damaged) == {key_of(newest), key_of(alone)}
    assert all("cut short" in reason for reason in found.damaged.values())


def test_a_ref_that_breaks_the_contract_is_damaged(ruins: Ruins) -> None:
    tensors = made.tensors()
    ref = ruins.store.put(made.ref(tensors, estimated_bytes=1), tensors)
    mine = ruins.shard("b")
    found = ruins.rebuild()
    assert ruins.refs == [mine]
    assert "estimated_bytes" in found.damaged[key_of(ref)]


def test_other_runs_shards_are_left_out(ruins: Ruins) -> None:
    ruins.shard("a", 5, run_id="other")
    mine = ruins.shard("a", 4)
    found = ruins.rebuild()
    assert (ruins.refs, found.foreign, found.older) == ([mine], 1, 0)


def test_every_group_gets_the_samples(ruins: Ruins) -> None:
    ruins.samples.configure(QueueLimits(), groups=["a", "b"])
    ruins.shard("x")
    rebuild(ruins.store, ruins.prompts, ruins.open("samples", "a"), "run")
    assert [ruins.open("samples", group).stats().ready for group in ("a", "b")] == [1, 1]


@pytest.mark.parametrize("name", ["prompts", "samples"])
@pytest.mark.parametrize("state", ["ready", "done", "closed"])
def test_a_queue_that_holds_or_knows_something_is_refused(ruins: Ruins, name: str, state: str) -> None:
    ruins.shard("a")
    queue = ruins.open(name)
    if state == "closed":
        queue.close()
    else:
        queue.put([QueueItem("x", b"x")])
    if state == "done":
        held = queue.lease(1, visibility_timeout_s=60, consumer="c")
        queue.ack(held.token, ["x"])  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"purge.*feed") as caught:
        ruins.rebuild()
    assert caught.value.subject == name
    assert ruins.samples.find(["a"]) == []
    with pytest.raises(ConfigError, match="store rebuild"):
        collect(ruins.store, QueueLedger("run", ruins.open), clock=ruins.clock)
    queue.purge()
    assert ruins.rebuild().refs == 1


def test_more_samples_than_the_queue_takes_are_refused_before_the_first(ruins: Ruins) -> None:
    for name in ("a", "b", "c"):
        ruins.shard(name)
    ruins.samples.configure(QueueLimits(max_depth=2))
    with pytest.raises(QueueFull, match="max_depth"):
        ruins.rebuild()
    assert ruins.refs == []


def test_a_store_that_fails_leaves_the_queue_empty_and_unknown(ruins: Ruins, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [ruins.shard(name) for name in ("a", "b")]
    plain = ruins.store.read_ref

    def read_ref(key: str) -> SampleRef:
        if key == key_of(refs[1]):
            raise StorageError("cannot be read", subject=key)
        return plain(key)

    with monkeypatch.context() as patch:
        patch.setattr(ruins.store, "read_ref", read_ref)
        with pytest.raises(StorageError):
            ruins.rebuild()
    assert ruins.refs == []
    assert ruins.rebuild().refs == 2


def test_a_living_producer_is_refused(ruins: Ruins) -> None:
    ruins.shard("a")
    ruins.prompts.beat("producer", "p")
    with pytest.raises(ConfigError, match="a producer lives"):
        ruins.rebuild()
    assert ruins.refs == []
    ruins.prompts.farewell("producer", "p")
    assert ruins.rebuild().refs == 1


def test_what_happens_while_the_headers_are_read_is_seen_before_the_first_ref_is_put(
    ruins: Ruins, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ruins.shard("a", 1), ruins.shard("b", 2)
    plain = ruins.store.read_ref

    def read_ref(key: str) -> SampleRef:
        if key == key_of(second):
            ruins.store.delete(first)
        return plain(key)

    def feed(key: str) -> SampleRef:
        ruins.prompts.put([QueueItem("x", b"x")])
        return plain(key)

    with monkeypatch.context() as patch:
        patch.setattr(ruins.store, "read_ref", feed)
        with pytest.raises(ConfigError, match="not empty"):
            ruins.rebuild()
    ruins.prompts.purge()
    monkeypatch.setattr(ruins.store, "read_ref", read_ref)
    assert ruins.rebuild().refs == 1
    assert ruins.refs == [second]


@pytest.mark.parametrize(("others", "damaged"), [(0, 0), (2, 0), (1, 1)])
def test_a_store_without_a_shard_of_the_run_is_refused_and_gets_no_note(
    ruins: Ruins, others: int, damaged: int
) -> None:
    for number in range(others):
        ruins.shard(f"a{number}", run_id="other")
    for number in range(damaged):
        ruins.damage(ruins.shard(f"b{number}"))
    with pytest.raises(ConfigError, match=f"no shards of run run, got {others} of other runs, {damaged} damaged"):
        ruins.rebuild()
    assert ruins.refs == []
    assert not is_known(ruins.store, QueueLedger("run", ruins.open))


def test_a_folders_refs_come_back_with_the_address_it_has_here(bench: Bench, tmp_path: Path) -> None:
    """On every kind of queue: 1,200 of them, more than a call takes."""
    first = SharedDirStore(tmp_path / "there", durability="none")
    tensors = made.tensors(batch=1, length=2)
    for number in range(1200):
        ref = made.ref(tensors, sample_id=f"s{number:04}", token=number + 1, num_tokens=2)
        first.put(ref, tensors)
    first.close()
    (tmp_path / "there").rename(tmp_path / "here")
    store = SharedDirStore(tmp_path / "here")
    samples = bench.queue("samples")
    assert rebuild(store, bench.queue("prompts"), samples, "run").refs == 1200
    refs = [decode_ref(item.payload) for item in samples.payloads()]
    assert [ref.sample_id for ref in refs] == [f"s{number:04}" for number in range(1200)]
    assert {ref.store_uri for ref in refs} == {f"file://{tmp_path}/here"}
    assert store.get(refs[7])["loss_mask"].shape == (1, 2)
