"""A short chaos run on each server; `make chaos` is the long one."""

import pytest

import queue_servers
from faults.chaos.harness import run

SERVERS = queue_servers.real_servers()


@pytest.mark.skipif(not SERVERS, reason="no server is installed")
@pytest.mark.parametrize("server", sorted(SERVERS))
def test_every_ref_is_settled_once_whoever_is_killed_paused_or_cut_off(server: str) -> None:
    tally, faults = run(deliveries=1200, seed=1, server=server, pace_s=0.3)
    assert faults == []
    assert tally["deliveries"] >= 1200
    done_to_it = {"kills", "pauses", "connections_cut", "script_flushes", "server_restarts", "suicides"}
    assert all(tally[deed] for deed in done_to_it), tally
