"""An import that dies at any step, is stopped or finds no room: every file becomes one sample, nothing is left over."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeline
from eaglefeed.clock import ManualClock
from eaglefeed.errors import InputError, StoreFull
from eaglefeed.interop.features import Features, ImportTarget
from eaglefeed.interop.folder import FeatureFile
from eaglefeed.interop.importing import Imported, Importer
from eaglefeed.producer.agreement import agree_on_run
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.queue.base import Lease, LeaseQueue, QueueLimits
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.contract import CONTRACT_FILE
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.janitor import collect
from eaglefeed.storage.memory import MemoryStore

H, V, NUM_FILES = 4, 50, 4
COMPACT = {"supervision": "last_hidden_states", "head_digest": "h", "schema_version": 2, "max_length": 8}
CONTRACT = pipeline.contract(hidden_size=H, vocab_size=V, **COMPACT)
TARGET = ImportTarget(CONTRACT, nn.RMSNorm(H), lambda last: last.sum(-1, keepdim=True) * torch.arange(V))


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Folder:
    """Files whose tokens say which one they are."""

    before_read: Callable[[str], None] = lambda name: None
    format: str = "specforge"
    num_missing: int = 0

    def files(self) -> Sequence[FeatureFile]:
        return [FeatureFile(f"f-{index}", f"{index}.ckpt", 100) for index in range(NUM_FILES)]

    def read(self, name: str, max_bytes: int) -> Features:
        self.before_read(name)
        ids = torch.tensor([int(name[0]), 7, 8])
        last = torch.ones(3, H) * torch.tensor([1, -1, 1, -1])
        return Features(name, ids, torch.tensor([0, 1, 1]), torch.ones(3, 3 * H), last, is_normed=True)


@dataclass
class House:
    """A run whose processes die at will."""

    clock: ManualClock = field(default_factory=ManualClock)
    folder: Folder = field(default_factory=Folder)
    calls: int = 0
    dies_at: int = 0

    def __post_init__(self) -> None:
        self.server, self.store = MemoryServer(self.clock), MemoryStore(clock=self.clock)
        self.prompts, self.samples = self.open("prompts"), self.open("samples")

    def open(self, name: str) -> LeaseQueue:
        return MemoryLeaseQueue(self.server, "run", name)

    def importer(self, **options: Any) -> Importer:
        return Importer(
            self.folder,
            TARGET,
            prompts=self.prompts,
            samples=self.samples,
            store=self.store,
            run_id="run",
            name="import-1",
            agree=lambda _: agree_on_run(
                self.store, self.samples, CONTRACT, lambda: ({"a": torch.ones(1)}, {}), run_id="run", who="me"
            ),
            clock=self.clock,
            **options,
        )

    def run(self, **options: Any) -> Imported:
        return self.importer(**options).run(threading.Event())

    def mortal(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        """The process dies before the `dies_at`-th of these calls, counted from 1, or right after it (.5)."""
        self.calls, self.dies_at = 0, dies_at
        for owner, name in (
            (self.store, "put"),
            (self.store, "put_document"),
            (self.store, "put_assets"),
            (self.prompts, "put"),
            (self.prompts, "close"),
            (self.prompts, "lease"),
            (self.prompts, "handoff"),
            (self.prompts, "nack"),
            (self.prompts, "farewell"),
            (self.samples, "close"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            for is_after in (False, True):
                self.calls += 1
                if self.calls >= self.dies_at:
                    raise Killed
                if not is_after:
                    result = call(*args, **options)
            return result

        return watched

    def check_whole(self) -> None:
        """One sample a file and nothing else, everything closed, and no shard beside them."""
        refs = [decode_ref(item.payload) for item in self.samples.payloads()]
        assert sorted(ref.sample_id for ref in refs) == [file.sample_id for file in self.folder.files()]
        for ref in refs:
            assert self.store.get(ref)["input_ids"].tolist() == [[7, 8, 0]]
        assert self.samples.stats().closed
        assert self.prompts.stats().drained
        assert self.prompts.stats().dead == 0
        self.clock.advance(61)
        collect(self.store, QueueLedger("run", self.open), clock=self.clock)
        assert {shard.key for shard in self.store.scan()} == {key_of(ref) for ref in refs}


@pytest.fixture
def house() -> House:
    return House()


def _num_calls() -> int:
    house = House()
    with pytest.MonkeyPatch.context() as patch:
        house.mortal(patch, 10**9)
        house.run()
    return house.calls


@pytest.mark.parametrize("dies_at", range(1, _num_calls() + 1))
def test_an_import_killed_at_any_call_is_gone_on_with_by_the_next(
    house: House, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    with monkeypatch.context() as patch:
        house.mortal(patch, dies_at)
        with pytest.raises(Killed):
            house.run()
    house.clock.advance(61)
    done = house.run()
    assert done.drained
    house.check_whole()


def test_a_bad_file_leaves_the_others_and_its_own_turn(house: House) -> None:
    def fail(name: str) -> None:
        if name == "2.ckpt":
            raise InputError("bad", subject=name)

    house.folder.before_read = fail
    for _ in range(7):  # as often as anybody likes: trying costs the file nothing
        with pytest.raises(InputError, match=r"^2\.ckpt: bad"):
            house.run()
    assert [item.id for item in house.samples.payloads()] == ["f-0", "f-1"]
    assert not house.samples.stats().closed
    house.folder.before_read = lambda name: None
    assert house.run().imported == 2
    house.check_whole()


def test_a_bad_first_file_leaves_no_trace_in_the_run(house: House) -> None:
    def fail(name: str) -> None:
        raise InputError("bad", subject=name)

    house.folder.before_read = fail
    with pytest.raises(InputError):
        house.run()
    assert house.store.get_document(CONTRACT_FILE) is None
    assert house.prompts.stats().unsettled == 0


def test_a_stopped_import_goes_on_later(house: House) -> None:
    stop = threading.Event()
    reads: list[str] = []

    def count(name: str) -> None:
        reads.append(name)
        if len(reads) == 3:  # the first one is read before the queue knows it, and again in its turn
            stop.set()

    house.folder.before_read = count
    done = house.importer().run(stop)
    assert (done.imported, done.drained, house.samples.stats().closed) == (2, False, False)
    assert house.prompts.stats().leased == 0
    assert house.run().imported == 2
    house.check_whole()


def test_an_import_waits_for_room_and_a_trainer_makes_it(house: House) -> None:
    house.samples.configure(QueueLimits(high_count=2, low_count=1))
    most, trained = 0, 0

    def train() -> None:
        nonlocal most, trained
        stats = house.samples.stats()
        most = max(most, stats.unsettled)
        if stats.full:
            lease = house.samples.lease(2, visibility_timeout_s=60, consumer="trainer")
            assert isinstance(lease, Lease)
            trained += len(house.samples.ack(lease.token, [item.id for item in lease.items]).ok)

    done = house.run(tidy=train)
    assert (done.imported, most, trained, done.drained) == (NUM_FILES, 2, 4, True)


def test_samples_are_closed_although_the_last_file_took_the_last_room(house: House) -> None:
    house.samples.configure(QueueLimits(high_count=NUM_FILES, low_count=1))
    assert house.run().drained
    house.check_whole()


def test_a_full_store_is_waited_for_and_costs_the_file_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    put, refused = house.store.put, []

    def full(ref: Any, tensors: dict[str, Tensor]) -> Any:
        if len(refused) < 9:
            refused.append(ref.sample_id)
            raise StoreFull("mem://", num_bytes=1, free_bytes=0, reason="a test")
        return put(ref, tensors)

    monkeypatch.setattr(house.store, "put", full)
    assert house.run().imported == NUM_FILES
    assert set(refused) == {"f-0"}
    house.check_whole()


def test_an_import_that_lost_its_lease_deletes_its_shard_and_another_has_the_file(house: House) -> None:
    others: list[Lease] = []

    def lose(name: str) -> None:
        if house.prompts.stats().leased and not others:
            house.clock.advance(61)
            other = house.prompts.lease(1, visibility_timeout_s=60, consumer="other")
            assert isinstance(other, Lease)
            others.append(other)

    house.folder.before_read = lose
    done = house.run()
    assert (done.stale, done.imported, [item.id for item in others[0].items]) == (1, NUM_FILES, ["f-0"])
    assert len(list(house.store.scan())) == NUM_FILES
    house.check_whole()


def test_a_file_that_kills_the_process_again_and_again_is_set_aside(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.prompts.configure(QueueLimits(max_deliveries=3))

    def kill(name: str) -> None:
        if name == "1.ckpt":
            monkeypatch.setattr(house.prompts, "nack", lambda *args, **options: None)
            raise Killed

    house.folder.before_read = kill
    for _ in range(3):
        with pytest.raises(Killed):
            house.run()
        house.clock.advance(61)
    done = house.run()
    assert (done.dead, done.drained) == (1, True)
    assert [letter.id for letter in house.prompts.dead_letters()] == ["f-1"]
