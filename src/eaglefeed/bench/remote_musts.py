"""The bounds that a remote target must hold, each for one figure; all of the wire are for one request at a time."""

from eaglefeed.bench.musts import Must, median_of, ratio_of
from eaglefeed.bench.remote_peers import NEMO

__all__ = ["PEER_MUSTS", "REMOTE_MUSTS"]

PEER_MUSTS = (
    Must(
        "wire_bytes_over_nemo_automodel",
        4.0,
        "higher",
        ratio_of("wire.http.in_flight_1", f"wire.{NEMO}.in_flight_1"),
    ),
)
REMOTE_MUSTS = (
    Must("wire_over_raw_tcp", 0.5, "higher", ratio_of("wire.http.in_flight_1", "bare.tcp")),
    Must("gloo_over_bare_gloo", 0.8, "higher", ratio_of("wire.gloo.in_flight_1", "bare.gloo")),
    Must("two_servers_over_one", 1.8, "higher", ratio_of("sleeping.servers_2", "sleeping.servers_1")),
    Must("server_memory_answers", 1.0, "lower", median_of("memory.peak_over_in_flight")),
    Must("server_memory_growth_10k", 2.0, "lower", median_of("memory.growth")),
)
