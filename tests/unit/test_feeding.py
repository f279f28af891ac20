"""The order in which a rank's loop gets its entries."""

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from eaglefeed.consumer.feeding import Feeder, Idle, IdleAsked, Ready
from eaglefeed.consumer.gathering import Due, Gatherer, Held, Over, Round
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.errors import SampleCorrupt, StorageError
from eaglefeed.queue.base import LeasedItem

if TYPE_CHECKING:
    from eaglefeed.consumer.materialize import Materializer


class _Refuses:
    """A materializer, and a gatherer that hears of it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def materialize(self, payload: bytes) -> Any:
        raise SampleCorrupt("a", "damaged") if payload == b"bad" else StorageError("away")

    def tell(self, held: Held, fault: Any) -> None:
        self.heard.append((held.item.id, fault.retryable, fault.reason.split(":")[0]))


class _Impatient(Ranks):
    """Whose others wait no longer than the first sample takes."""

    @property
    def timeout_s(self) -> float:
        return 0.0


def _fed(*events: Any, ranks: Ranks | None = None) -> tuple[list[Any], list[Any]]:
    """What a loop gets of these events, and what the gatherer hears."""
    given: SimpleQueue[Any] = SimpleQueue()
    for event in (*events, Over(drained=True)):
        given.put(event)
    fake = _Refuses()
    feeder = Feeder(
        ranks or Ranks.alone(),
        cast("Materializer", fake),
        size=2,
        setup={},
        gatherer=cast("Gatherer", fake),
        events=given,
        stop=threading.Event(),
    )
    entries = []
    while not entries or not isinstance(entries[-1], Over):
        entries.append(feeder.get(20.0))
    feeder.join(20.0)
    return entries, fake.heard


def test_a_pause_is_told_only_if_nothing_came_since_it_was_asked_for() -> None:
    entries, _ = _fed(Round(()), IdleAsked(0), IdleAsked(1), Due(), IdleAsked(2), IdleAsked(3))
    assert [type(entry) for entry in entries] == [Ready, Idle, Due, Idle, Over]


def test_what_could_not_be_read_is_told_with_whether_it_may_be_tried_again() -> None:
    held = tuple(Held(7, LeasedItem(name, name.encode(), 1)) for name in ("bad", "away"))
    (ready, over), heard = _fed(Round(held))
    assert ready.batches == ready.held == [None, None]
    assert ready.ids == ["bad", "away"]
    assert not ready.is_void
    assert over == Over(drained=True)
    assert heard == [("bad", False, "SampleCorrupt"), ("away", True, "StorageError")]


def test_a_store_that_is_slow_for_one_sample_after_another_does_not_keep_the_ranks_waiting_for_all_of_them() -> None:
    held = tuple(Held(7, LeasedItem(name, name.encode(), 1)) for name in ("away", "bad"))
    (ready, over), heard = _fed(Round(held), ranks=_Impatient())
    assert ready.held == [None, None]
    assert over == Over(drained=True)
    assert heard == [("away", True, "StorageError"), ("bad", True, "reading the samples before it took too long")]
