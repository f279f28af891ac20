"""What nccl:// stores need besides their address."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from eaglefeed.storage.base import FeatureStore

__all__ = ["DataPlane", "PeerOptions"]

DataPlane = Literal["auto", "http", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """What a producer that keeps its samples is told, and those who pull them.

    Args:
        token: of all producers of the run.
        data_plane: what samples travel over; auto is nccl where `device` is a GPU, and else the body of HTTP.
        device: where a producer's samples are made, and where others receive them over nccl.
        capacity_bytes: what a producer keeps at most,
        pinned: and whether in page-locked host memory, not where it was made.
        discover: finds addresses of producers, for all others: those of the open refs.
        documents: keeps the files of the run that were read, for all others; closed with the store.
    """

    token: str = ""
    data_plane: DataPlane = "auto"
    device: str = "cpu"
    capacity_bytes: int = 8 * 2**30
    pinned: bool = False
    discover: Callable[[], Iterable[str]] = tuple
    documents: "FeatureStore | None" = None
