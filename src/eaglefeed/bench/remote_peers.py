"""NeMo AutoModel's remote target, in the environment of the stores' peers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import create_server

from eaglefeed.bench.comparison import FIX, Peer, find_peer
from eaglefeed.bench.partners import Partner
from eaglefeed.bench.storage_peers import ENVIRONMENT, NEMO

__all__ = ["NEMO", "find_remote_peer", "remote_peer"]


def find_remote_peer(folder: Path) -> Peer:
    """The peer, by its environment in `folder`.

    Raises:
        EaglefeedError: it is missing or does not start.
    """
    return find_peer(NEMO, folder / ENVIRONMENT / "bin" / "python", "nemo-remote")


@contextmanager
def remote_peer(peer: Peer, answers: Mapping[str, str]) -> Iterator[Partner]:
    """Its client, with its server in another process, until the end of the block.

    Args:
        peer: who.
        answers: files of the answers, by their tokens.
    """
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Partner(peer.name, peer.command("serve"), {"answers": answers, "port": port}, fix=FIX) as server:
        task = {"answers": answers, "url": server.line()["url"]}
        with Partner(peer.name, peer.command("fetch"), task, fix=FIX) as client:
            client.line()  # it is ready
            yield client
