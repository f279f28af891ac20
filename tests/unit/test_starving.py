"""A trainer that gets nothing while its acknowledgements wait for a commit: it may hold the room producers need."""

import threading

import pytest

from eaglefeed.clock import ManualClock
from eaglefeed.consumer.holdings import LeaseTerms, StreamStats
from eaglefeed.consumer.leasing import Leaser
from eaglefeed.queue.base import DrainState, Lease, QueueItem
from eaglefeed.queue.holdings import Holdings
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.queue.renewal import LeaseRenewer

TERMS = LeaseTerms(
    visibility_timeout_s=600,
    stall_timeout_s=1e9,
    max_lease_age_s=1e9,
    max_attempts=5,
    retain=False,
    fail_without_producers=False,
    producer_grace_s=60,
    outage_s=120,
)


class Trainer:
    """Leases by a clock that only its own waits turn."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue = MemoryLeaseQueue(MemoryServer(self.clock), "run", "samples")
        self.leaser = Leaser(
            self.queue,
            consumer="t",
            session=0,
            prompts=None,
            holdings=Holdings(LeaseRenewer(self.queue, visibility_timeout_s=600, clock=self.clock)),
            stats=StreamStats(),
            terms=TERMS,
            stop=threading.Event(),
            clock=self.clock,
        )

    def learn(self, item_id: str, step: int) -> None:
        self.queue.put([QueueItem(item_id, b"ref")])
        lease = self.leaser.ask(1)
        assert isinstance(lease, Lease)
        self.queue.ack(lease.token, [item_id], step=step)

    def due_at(self, seconds: float) -> list[int]:
        """Asks for so long; at which seconds of it a commit was due."""
        began_s, found = self.clock.monotonic(), []
        while (waited_s := self.clock.monotonic() - began_s) < seconds:
            if self.leaser.ask(1) is DrainState.COMMIT_DUE:
                found.append(round(waited_s))
        return found


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def test_a_commit_is_due_each_half_minute_without_a_sample_until_it_is_made(trainer: Trainer) -> None:
    trainer.learn("a", step=1)
    assert trainer.due_at(100) == pytest.approx([30, 60, 90], abs=2)
    trainer.queue.commit(1)
    assert trainer.due_at(100) == []


def test_none_is_due_while_samples_come_or_nothing_waits_for_it(trainer: Trainer) -> None:
    assert trainer.due_at(100) == []
    for step in range(1, 5):
        trainer.learn(f"s-{step}", step)
        assert trainer.due_at(25) == []
    trainer.queue.commit(3)
    assert trainer.due_at(10) == pytest.approx([5], abs=2)


def test_none_is_due_at_the_end_where_the_loop_commits_anyhow(trainer: Trainer) -> None:
    trainer.learn("a", step=1)
    trainer.queue.close()
    for _ in range(3):
        assert trainer.leaser.ask(1) is DrainState.DRAINED
        trainer.clock.advance(60)
