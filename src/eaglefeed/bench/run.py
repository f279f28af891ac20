"""All measurements, in rounds, and what came of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any

from eaglefeed.bench.bed import Bed
from eaglefeed.bench.comparison import Peer, measure_peers
from eaglefeed.bench.cycles import Cycle
from eaglefeed.bench.items import PAYLOAD_BYTES
from eaglefeed.bench.latency import measure_depth, measure_handover
from eaglefeed.bench.machine import describe_machine, describe_server, describe_versions
from eaglefeed.bench.memory import measure_memory
from eaglefeed.bench.musts import fastest_peer, must_entries
from eaglefeed.bench.ours import measure_cycles, measure_end_to_end
from eaglefeed.bench.plan import Plan, Reading
from eaglefeed.bench.scripts import measure_idle_lease, measure_renewals, measure_scripts
from eaglefeed.clock import SYSTEM_CLOCK

__all__ = ["run_bench", "summarise"]

_EACH_ROUND = (
    measure_cycles,
    measure_end_to_end,
    measure_memory,
    measure_scripts,
    measure_renewals,
    measure_idle_lease,
    measure_handover,
)


def run_bench(bed: Bed, plan: Plan, peers: Sequence[Peer], *, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; the document's `must` has the bounds, `figures` all values with their spread.

    Args:
        bed: the server.
        plan: the sizes.
        peers: who is compared with; nobody if empty.
        tell: gets a line on what is done now.

    Raises:
        EaglefeedError: a peer fails, or the server does.
    """
    start_s = SYSTEM_CLOCK.monotonic()
    figures = summarise(chain(_rounds(bed, plan, peers, tell), measure_depth(bed, plan)))
    medians = {name: figure["median"] for name, figure in figures.items()}
    return {
        "quick": plan.quick,
        "rounds": plan.rounds,
        "took_s": round(SYSTEM_CLOCK.monotonic() - start_s, 1),
        "machine": describe_machine(),
        "versions": describe_versions(bed),
        "server": describe_server(bed),
        "payload_bytes": PAYLOAD_BYTES,
        "cycles": {cycle.value: cycle.words for cycle in Cycle},
        "few_and_many_ready": [plan.few, plan.many],
        "figures": figures,
        "peers": {peer.name: _describe(peer, medians) for peer in peers} or None,
        "fastest_peer": fastest_peer(medians) if peers else None,
        "must": must_entries(medians, with_peers=bool(peers)),
    }


def _rounds(bed: Bed, plan: Plan, peers: Sequence[Peer], tell: Callable[[str], None]) -> Iterator[Reading]:
    for number in range(1, plan.rounds + 1):
        tell(f"round {number} of {plan.rounds}")
        for measure in _EACH_ROUND:
            yield from measure(bed, plan)
        yield from measure_peers(bed, plan, peers)
    tell(f"latency at {plan.few} and {plan.many} ready refs")


def summarise(readings: Iterable[Reading]) -> dict[str, dict[str, Any]]:
    """Unit, smallest, median and largest value of each reading by its name."""
    values: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for name, unit, value in readings:
        values.setdefault(name, []).append(value)
        units[name] = unit
    return {
        name: {"unit": units[name], "min": min(found), "median": median(found), "max": max(found)}
        for name, found in values.items()
    }


def _describe(peer: Peer, medians: dict[str, float]) -> dict[str, Any]:
    mine = {name: value for name, value in medians.items() if name.startswith(f"peer.{peer.name}.")}
    best = max(mine, key=lambda name: mine[name])
    return {
        "version": peer.about["version"],
        "redis-py": peer.about["client"],
        "settings": {name: variant["settings"] for name, variant in peer.about["variants"].items()},
        "does_more": peer.about["does_more"],
        "best": best,
        "messages_a_second": mine[best],
    }
