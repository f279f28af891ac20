"""The bench of the stores: all measurements in one folder, and what came of them."""

import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eaglefeed import __version__
from eaglefeed.bench.comparison import Peer
from eaglefeed.bench.machine import describe_machine
from eaglefeed.bench.musts import entries_of
from eaglefeed.bench.plan import Reading
from eaglefeed.bench.run import summarise
from eaglefeed.bench.storage_memory import measure_memory
from eaglefeed.bench.storage_musts import PEER_MUSTS, STORAGE_MUSTS
from eaglefeed.bench.storage_peers import describe_peer
from eaglefeed.bench.storage_plan import StoragePlan
from eaglefeed.bench.storage_rounds import measure_residents, measure_rounds
from eaglefeed.clock import SYSTEM_CLOCK

__all__ = ["run_storage_bench"]

_SIDES = {
    "memmove": "into a warm buffer",
    "safetensors": "save_file; load_file and a memmove into a warm buffer; no digests, no fsync",
    "eaglefeed": "digests written and always checked, durability none, into a warm buffer of a ring",
    "eaglefeed_default": "digests written and always checked, durability full, into fresh memory",
}


def run_storage_bench(
    folder: Path, plan: StoragePlan, peers: Sequence[Peer], *, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure everything; the document's `must` has the bounds, `figures` all values with their spread.

    Args:
        folder: on the file system that is measured; a folder is made in it, and removed.
        plan: the sizes.
        peers: who is compared with; nobody if empty.
        tell: gets a line on what is done now.

    Raises:
        EaglefeedError: a peer fails, or a store does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start_s = SYSTEM_CLOCK.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-storage-", dir=folder.absolute()) as root:
        figures = summarise(_measure(Path(root), plan, peers, tell))
    medians = {name: figure["median"] for name, figure in figures.items()}
    return {
        "quick": plan.quick,
        "rounds": plan.rounds,
        "took_s": round(SYSTEM_CLOCK.monotonic() - start_s, 1),
        "machine": {**describe_machine(), "file_system": _file_system(folder)},
        "versions": _versions(),
        "sizes": asdict(plan),
        "sides": _SIDES,
        "figures": figures,
        "peers": {peer.name: describe_peer(peer, medians) for peer in peers} or None,
        "must": entries_of((*PEER_MUSTS, *STORAGE_MUSTS) if peers else STORAGE_MUSTS, medians),
    }


def _measure(root: Path, plan: StoragePlan, peers: Sequence[Peer], tell: Callable[[str], None]) -> Iterator[Reading]:
    tell(f"{plan.rounds} rounds of all stores and encodings")
    (root / "rounds").mkdir()
    yield from measure_rounds(root / "rounds", plan, peers)
    tell(f"put and get beside {plan.few} and {plan.many} residents")
    yield from measure_residents(root / "residents", plan, peers)
    tell("memory of a producer and of a trainer")
    yield from measure_memory(root / "memory", plan)


def _versions() -> dict[str, str]:
    """What took part, but for the peers."""
    names = ("torch", "safetensors", "xxhash")
    return {"eaglefeed": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on, such as ext4."""
    table = Path("/proc/self/mounts")
    if not table.exists():
        return "unknown"
    mounts = [line.split()[1:3] for line in table.read_text(encoding="utf-8").splitlines()]
    real = folder.resolve()
    inside = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    return max(inside)[1]
