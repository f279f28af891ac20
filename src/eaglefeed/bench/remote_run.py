"""The bench of a remote target: all measurements on loopback, and what came of them."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain
from typing import Any

from eaglefeed import __version__
from eaglefeed.bench.comparison import Peer
from eaglefeed.bench.machine import describe_machine
from eaglefeed.bench.musts import entries_of
from eaglefeed.bench.plan import Reading
from eaglefeed.bench.remote_bed import RemoteBed, opened_remote_bed, planes
from eaglefeed.bench.remote_memory import measure_growth, measure_slow_clients
from eaglefeed.bench.remote_musts import PEER_MUSTS, REMOTE_MUSTS
from eaglefeed.bench.remote_plan import RemotePlan
from eaglefeed.bench.remote_rounds import measure_wire_rounds
from eaglefeed.bench.run import summarise
from eaglefeed.bench.storage_peers import describe_peer
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.producer.server import check_server

__all__ = ["run_remote_bench"]

_SIDES = {
    "bare": "sendall to recv_into, and one gloo send to recv; both memories written before; no digests",
    "http": "TargetServer to RemoteEagle3TargetModel, the answer in the body of the reply; digests made and checked",
    "gloo": "the same, the answer over a gloo pair group",
    "nccl": "the same over an NCCL pair group, from a CUDA device to one",
}


def run_remote_bench(plan: RemotePlan, peer: Peer | None, *, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; the document's `must` has the bounds, `figures` all values with their spread.

    Args:
        plan: the sizes.
        peer: who is compared with.
        tell: gets a line on what is done now.

    Raises:
        ConfigError: the extra `serve` is not installed.
        EaglefeedError: the peer fails, or a server or client of ours does.
    """
    check_server("127.0.0.1", "")
    start_s = SYSTEM_CLOCK.monotonic()
    tell("processes and their answers")
    with opened_remote_bed(plan, peer) as bed:
        figures = summarise(_measure(bed, plan, tell))
        answer_bytes = bed.answers[plan.tokens].num_bytes
    medians = {name: figure["median"] for name, figure in figures.items()}
    return {
        "quick": plan.quick,
        "rounds": plan.rounds,
        "took_s": round(SYSTEM_CLOCK.monotonic() - start_s, 1),
        "machine": describe_machine(),
        "versions": _versions(),
        "sizes": asdict(plan) | {"answer_bytes": answer_bytes},
        "sides": {name: words for name, words in _SIDES.items() if name == "bare" or name in planes()},
        "figures": figures,
        "peers": {peer.name: describe_peer(peer, medians)} if peer else None,
        "must": entries_of((*PEER_MUSTS, *REMOTE_MUSTS) if peer else REMOTE_MUSTS, medians),
    }


def _measure(bed: RemoteBed, plan: RemotePlan, tell: Callable[[str], None]) -> Iterator[Reading]:
    tell(f"{plan.rounds} rounds of all wire paths")
    yield from measure_wire_rounds(bed, plan)
    tell("memory of a server")
    yield from chain(measure_slow_clients(bed, plan), measure_growth(bed, plan))


def _versions() -> dict[str, str]:
    """What took part, but for the peer."""
    names = ("torch", "xxhash", "starlette", "uvicorn", "httptools", "uvloop")
    return {"eaglefeed": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
