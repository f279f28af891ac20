"""The peers, each in its own environment, from put to ack on the same server.

A peer that is not installed or fails ends the bench: a comparison leaves nobody out.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglefeed.bench.bed import Bed
from eaglefeed.bench.items import PAYLOAD_BYTES
from eaglefeed.bench.partners import Partner, race
from eaglefeed.bench.plan import Plan, Reading
from eaglefeed.errors import EaglefeedError

__all__ = ["FIX", "PEERS", "Peer", "find_peer", "find_peers", "measure_peers"]

PEERS = ("rq", "dramatiq", "saq", "taskiq-redis", "bullmq")
_DRIVERS = Path(__file__).parent / "peers"
_ABOUT_TIMEOUT_S = 60.0
FIX = "run: make bench-peers, or compare with nobody: --no-peers"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer that can be run.

    Args:
        name: its name, which its environment's folder has too.
        python: the interpreter of its environment.
        about: what its driver says of it: version, settings, what it does more, and what the kind of its bench needs.
        driver: the name of its driver, if that is another.
    """

    name: str
    python: Path
    about: dict[str, Any]
    driver: str

    def command(self, role: str) -> list[str]:
        """The words that start its driver."""
        return _command(self.python, self.driver, role)


def _command(python: Path, driver: str, role: str) -> list[str]:
    return [str(python), str(_DRIVERS / f"{driver.replace('-', '_')}_driver.py"), role]


def find_peers(folder: Path) -> tuple[Peer, ...]:
    """All peers, by their environments in `folder`.

    Raises:
        EaglefeedError: one is missing or does not start.
    """
    return tuple(find_peer(name, folder / name / "bin" / "python") for name in PEERS)


def find_peer(name: str, python: Path, driver: str = "") -> Peer:
    """One peer, by the interpreter of its environment; its driver has its name, or `driver`.

    Raises:
        EaglefeedError: it is missing or does not start.
    """
    if not python.exists():
        raise EaglefeedError("this peer is not installed", subject=name, wanted=python, fix=FIX)
    words = _command(python, driver or name, "about")
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=_ABOUT_TIMEOUT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()[-500:]
        raise EaglefeedError("this peer does not start", subject=name, got=said, fix=FIX) from None
    return Peer(name=name, python=python, about=json.loads(told), driver=driver or name)


def measure_peers(bed: Bed, plan: Plan, peers: Sequence[Peer]) -> Iterator[Reading]:
    """Each peer in each of its variants; one that can put many at once also does so with larger batches."""
    for peer in peers:
        batches = tuple(plan.end_to_end_messages) if peer.about["bulk_put"] else (1,)
        for variant in peer.about["variants"]:
            for batch in batches:
                yield _race(bed, plan, peer, variant, batch)


def _race(bed: Bed, plan: Plan, peer: Peer, variant: str, batch: int) -> Reading:
    count = max(10, int(peer.about["variants"][variant]["messages"] * plan.peer_share))
    task = {
        "url": bed.url,
        "queue": bed.new_name(),
        "messages": count,
        "batch": batch,
        "payload_bytes": PAYLOAD_BYTES,
        "variant": variant,
    }
    producer, consumer = (Partner(peer.name, peer.command(role), task, fix=FIX) for role in ("put", "consume"))
    rate = race(producer, consumer, count)
    bed.clear()
    return Reading(f"peer.{peer.name}.{variant}.put_{batch}", "messages/s", rate)
