"""The bounds that the queue must hold, each for one figure; and what other bounds are made of."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "MUSTS",
    "PEER_MUSTS",
    "Must",
    "entries_of",
    "fastest_peer",
    "median_of",
    "missed",
    "must_entries",
    "ratio_of",
]

Medians = Mapping[str, float]


class Must(NamedTuple):
    """A figure, its bound, and which side of it is right; `value` computes it from the medians."""

    name: str
    bound: float
    better: str
    value: Callable[[Medians], float]


def _longest_script(medians: Medians) -> float:
    return max(value for name, value in medians.items() if name.startswith("script."))


def median_of(name: str) -> Callable[[Medians], float]:
    """The median of that reading."""
    return lambda medians: medians[name]


def ratio_of(above: str, below: str) -> Callable[[Medians], float]:
    """One reading's median over another's."""
    return lambda medians: medians[above] / medians[below]


def fastest_peer(medians: Medians) -> str:
    """The reading of the fastest peer in its fastest variant, whatever it puts at once."""
    return max((name for name in medians if name.startswith("peer.")), key=lambda name: medians[name])


def _over_fastest_peer(name: str) -> Callable[[Medians], float]:
    return lambda medians: medians[name] / medians[fastest_peer(medians)]


PEER_MUSTS = (
    Must("end_to_end_over_fastest_peer_batch_1", 2.0, "higher", _over_fastest_peer("end_to_end.ack_each.batch_1")),
    Must("end_to_end_over_fastest_peer_batch_16", 10.0, "higher", _over_fastest_peer("end_to_end.ack.batch_16")),
)
MUSTS = (
    Must("server_cpu_us_a_message_batch_16", 12.0, "lower", median_of("server_cpu.2_processes.ack.batch_16")),
    Must("server_cpu_us_a_message_batch_128", 8.0, "lower", median_of("server_cpu.2_processes.ack.batch_128")),
    Must(
        "lease_ack_p50_many_over_few_ready",
        1.10,
        "lower",
        ratio_of("lease_ack_p50.many_ready.batch_16", "lease_ack_p50.few_ready.batch_16"),
    ),
    Must("nothing_expired_check_ms", 0.2, "lower", median_of("nothing_expired_check")),
    Must("longest_script_ms_batch_1000", 5.0, "lower", _longest_script),
    Must("renew_1000_over_1_item", 1.5, "lower", ratio_of("renew.items_1000", "renew.items_1")),
    Must("leased_bytes_over_payload", 600.0, "lower", median_of("memory.leased_over_payload")),
    Must("done_bytes", 100.0, "lower", median_of("memory.done")),
    Must("enqueue_to_lease_p50_ms", 2.0, "lower", median_of("handover.p50")),
)


def must_entries(medians: Medians, *, with_peers: bool) -> list[dict[str, Any]]:
    """The queue's; those on peers only where peers were measured."""
    return entries_of((*PEER_MUSTS, *MUSTS) if with_peers else MUSTS, medians)


def entries_of(musts: Iterable[Must], medians: Medians) -> list[dict[str, Any]]:
    """One entry for each bound: name, value, bound, better."""
    return [
        {"name": must.name, "value": must.value(medians), "bound": must.bound, "better": must.better} for must in musts
    ]


def missed(entries: list[dict[str, Any]]) -> list[str]:
    """Those entries that do not hold, in words."""
    return [
        f"{entry['name']} {entry['value']:.3g} ({entry['better']} than {entry['bound']:g} is wanted)"
        for entry in entries
        if not _holds(**entry)
    ]


def _holds(*, value: float, bound: float, better: str, **_name: str) -> bool:
    return value >= bound if better == "higher" else value <= bound
