"""Other projects' stores, in one environment of their own, each served by a process with the same sample."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from eaglefeed.bench.comparison import FIX, Peer, find_peer
from eaglefeed.bench.partners import Partner
from eaglefeed.bench.storage_sides import PeerSide

__all__ = ["ENVIRONMENT", "LOADER", "NEMO", "STORE_PEERS", "describe_peer", "find_store_peers", "served"]

NEMO, LOADER = "nemo-automodel", "speculators"
"""The one that the bounds are for, and the one that reads a sample of its own form, too."""
STORE_PEERS = (NEMO, "specforge", LOADER)
ENVIRONMENT = "stores"


def find_store_peers(folder: Path) -> tuple[Peer, ...]:
    """All peers, by their environment in `folder`.

    Raises:
        EaglefeedError: one is missing or does not start.
    """
    return tuple(find_peer(name, folder / ENVIRONMENT / "bin" / "python") for name in STORE_PEERS)


@contextmanager
def served(peers: Sequence[Peer], root: Path, tensors: Mapping[str, Tensor]) -> Iterator[list[PeerSide]]:
    """The peers' sides, each in a folder below `root`, until the end of the block."""
    path = root / "sample.safetensors"
    save_file(dict(tensors), path)
    with ExitStack() as stack:
        sides = [_serve(stack, peer, root / peer.name, path) for peer in peers]
        path.unlink()
        yield sides


def _serve(stack: ExitStack, peer: Peer, folder: Path, sample: Path) -> PeerSide:
    folder.mkdir()
    task = {"folder": str(folder), "sample": str(sample)}
    partner = stack.enter_context(Partner(peer.name, peer.command("serve"), task, fix=FIX))
    partner.line()  # it is ready
    return PeerSide(peer.name, folder, partner)


def describe_peer(peer: Peer, medians: Mapping[str, float]) -> dict[str, Any]:
    """What a peer's driver says of it, with its medians."""
    mine = {name: value for name, value in medians.items() if peer.name in name.split(".")}
    return {**peer.about, "medians": mine}
