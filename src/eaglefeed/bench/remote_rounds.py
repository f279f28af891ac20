"""What is measured of the wire paths: one large answer over each of them, small answers, and a sleeping target."""

from collections.abc import Callable, Iterator
from functools import partial

from eaglefeed.bench.partners import Partner
from eaglefeed.bench.plan import Reading
from eaglefeed.bench.remote_answers import SLEEPING_TOKENS, SMALL_TOKENS
from eaglefeed.bench.remote_bed import RemoteBed, planes
from eaglefeed.bench.remote_peers import NEMO
from eaglefeed.bench.remote_plan import RemotePlan

__all__ = ["measure_wire_rounds"]

_GB = 1e9
_PEER_SMALL_SHARE = 10
Turn = Callable[[bool], Iterator[Reading]]
"""One measurement; with True it compares the last answer with what the server has."""


def measure_wire_rounds(bed: RemoteBed, plan: RemotePlan) -> Iterator[Reading]:
    """All paths in turn, in rounds; the first, not counted, checks what comes. Another one begins each round."""
    turns = [*_bare_turns(bed, plan), *_our_turns(bed, plan), *_peer_turns(bed, plan)]
    for number in range(plan.rounds + 1):
        first = number % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            for reading in turn(number == 0):
                if number:
                    yield reading


def _bare_turns(bed: RemoteBed, plan: RemotePlan) -> Iterator[Turn]:
    num_bytes = bed.answers[plan.tokens].num_bytes

    def turn(way: str, _check: bool) -> Iterator[Reading]:
        took_s = bed.bare.ask(way=way, count=plan.requests)["took_s"]
        yield Reading(f"bare.{way}", "GB/s", plan.requests * num_bytes / took_s / _GB)

    yield from (partial(turn, way) for way in ("tcp", "gloo"))


def _our_turns(bed: RemoteBed, plan: RemotePlan) -> Iterator[Turn]:
    num_bytes = bed.answers[plan.tokens].num_bytes

    def wire(plane: str, in_flight: int, check: bool) -> Iterator[Reading]:
        words = {"model": plane, "tokens": plan.tokens}
        rate = _rate(bed.client, plan.requests, in_flight=in_flight, check=check, **words)
        yield from _wire_readings(f"{plane}.in_flight_{in_flight}", rate, num_bytes)

    def small(in_flight: int, check: bool) -> Iterator[Reading]:
        words = {"model": "small_1", "tokens": SMALL_TOKENS}
        rate = _rate(bed.client, plan.small_requests, in_flight=in_flight, check=check, **words)
        yield Reading(f"small.http.in_flight_{in_flight}", "requests/s", rate)

    def sleeping(num_servers: int, check: bool) -> Iterator[Reading]:
        words = {"model": f"small_{num_servers}", "tokens": SLEEPING_TOKENS}
        in_flight = plan.several * num_servers
        rate = _rate(bed.client, plan.sleeping_requests, in_flight=in_flight, check=check, **words)
        yield Reading(f"sleeping.servers_{num_servers}", "requests/s", rate)

    yield from (partial(wire, plane, 1) for plane in planes())
    # There is one NCCL pair at a time: of several answers the others would come in the body.
    yield from (partial(wire, plane, plan.several) for plane in planes() if plane != "nccl")
    yield from (partial(small, in_flight) for in_flight in (1, plan.several))
    yield from (partial(sleeping, num_servers) for num_servers in (1, 2))


def _peer_turns(bed: RemoteBed, plan: RemotePlan) -> Iterator[Turn]:
    if (client := bed.peer) is None:
        return
    num_bytes = bed.answers[plan.tokens].num_bytes

    def wire(in_flight: int, check: bool) -> Iterator[Reading]:
        count = max(plan.peer_requests, in_flight)
        rate = _rate(client, count, tokens=plan.tokens, in_flight=in_flight, check=check)
        yield from _wire_readings(f"{NEMO}.in_flight_{in_flight}", rate, num_bytes)

    def small(check: bool) -> Iterator[Reading]:
        count = plan.small_requests // _PEER_SMALL_SHARE
        rate = _rate(client, count, tokens=SMALL_TOKENS, in_flight=1, check=check)
        yield Reading(f"small.{NEMO}.in_flight_1", "requests/s", rate)

    yield from (partial(wire, in_flight) for in_flight in (1, plan.several))
    yield small


def _rate(client: Partner, count: int, **words: object) -> float:
    """Requests a second."""
    return count / float(client.ask(count=count, **words)["took_s"])


def _wire_readings(name: str, rate: float, num_bytes: int) -> Iterator[Reading]:
    yield Reading(f"wire.{name}", "GB/s", rate * num_bytes / _GB)
    yield Reading(f"requests.{name}", "requests/s", rate)
