"""How much of a remote target is measured."""

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "RemotePlan"]


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """Sizes of every measurement of a remote target.

    Args:
        rounds: how often each is repeated; in a round all wire paths follow each other.
        tokens: S of the large answer, which is one row; B is 1.
        hidden: H of its target: its aux states are [1, S, 3H].
        draft_vocab: D, of its target_probs, which are float32.
        requests: large answers that one reading is of.
        several: requests in flight where there are several.
        peer_requests: large answers that one reading of a peer is of.
        small_requests: small answers that one reading is of; a peer gets a tenth.
        sleep_s: what a forward of the sleeping target takes.
        sleeping_requests: answers of it that one reading is of.
        memory_tokens: S of the answers that slow clients leave in the server.
        slow_clients: how many there are; the server may have as many answers in flight.
        growth_warm_up: small requests before the server's memory is looked at,
        growth_requests: and until it is looked at again.
        quick: the sizes are too small for figures that mean something.
    """

    rounds: int = 5
    tokens: int = 2048
    hidden: int = 4096
    draft_vocab: int = 32_000
    requests: int = 8
    several: int = 4
    peer_requests: int = 2
    small_requests: int = 300
    sleep_s: float = 0.05
    sleeping_requests: int = 40
    memory_tokens: int = 512
    slow_clients: int = 4
    growth_warm_up: int = 2_000
    growth_requests: int = 10_000
    quick: bool = False


FULL = RemotePlan()
QUICK = RemotePlan(
    rounds=1,
    tokens=256,
    requests=4,
    peer_requests=1,
    small_requests=50,
    sleeping_requests=24,
    growth_warm_up=100,
    growth_requests=500,
    quick=True,
)
