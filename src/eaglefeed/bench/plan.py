"""How much is measured, and what one measurement is called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["FULL", "QUICK", "Plan", "Reading"]


class Reading(NamedTuple):
    """One measured value; `name` says of what, in parts with dots between them."""

    name: str
    unit: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of every measurement.

    Args:
        rounds: how often each is repeated; the measurements of a round follow each other.
        cycle_messages: batch → messages of a run of lease, ack and commit.
        end_to_end_messages: batch → messages of a run from put to ack.
        peer_share: which share of its own number of messages a peer gets.
        memory_items: refs of which the memory is measured.
        few: ready refs of the small queue whose latency is compared,
        many: and of the large one.
        latency_warm_up: calls on each of the two before any is timed.
        latency_calls: lease and ack calls on each of the two, a round.
        idle_leases: leases that are open while a call finds nothing expired.
        server_calls: calls of which the server's time is averaged.
        handovers: items put one by one into an idle queue, a round.
        quick: the sizes are too small for figures that mean something.
    """

    rounds: int = 5
    cycle_messages: Mapping[int, int] = field(default_factory=lambda: {1: 1_500, 16: 16_000, 128: 38_400})
    end_to_end_messages: Mapping[int, int] = field(default_factory=lambda: {1: 4_000, 16: 24_000, 128: 38_400})
    peer_share: float = 1.0
    memory_items: int = 50_000
    few: int = 10_000
    many: int = 1_000_000
    latency_warm_up: int = 1_500
    latency_calls: int = 400
    idle_leases: int = 1_000
    server_calls: int = 500
    handovers: int = 100
    quick: bool = False


FULL = Plan()
QUICK = Plan(
    rounds=2,
    cycle_messages={1: 200, 16: 1_600, 128: 5_120},
    end_to_end_messages={1: 500, 16: 3_200, 128: 5_120},
    peer_share=0.2,
    memory_items=5_000,
    few=1_000,
    many=10_000,
    latency_warm_up=100,
    latency_calls=100,
    idle_leases=100,
    server_calls=100,
    handovers=20,
    quick=True,
)
