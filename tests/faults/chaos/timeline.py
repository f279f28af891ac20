"""What a history says of one group of a queue: who held an id when, and how each of its deliveries may have ended."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from faults.chaos.record import Call


class Delivery(NamedTuple):
    """One item of one lease; `times` is its delivery_count."""

    id: str
    lease: Call
    times: int

    @property
    def granted_ms(self) -> int:
        """Server time at which it was leased."""
        return self.lease.deadline_ms - self.lease.timeout_ms


class End(NamedTuple):
    """A call that ended a delivery, for sure or perhaps: done, tentative, back, given or dead."""

    kind: str
    call: Call

    @property
    def certain(self) -> bool:
        return self.call.outcome == "yes"


class Timeline:
    """One group's history. Tokens and sessions grow, so they put leases and restores in order without any clock."""

    def __init__(self, place: str, calls: Iterable[Call], outages: Sequence[Call] = ()) -> None:
        self.place, self._outages = place, outages
        self.calls = [call for call in calls if call.outcome != "no"]
        self.deliveries: dict[str, list[Delivery]] = defaultdict(list)
        self.ends: dict[tuple[int, str], list[End]] = defaultdict(list)
        self.renewals: dict[int, list[Call]] = defaultdict(list)
        self._commits: dict[int, list[Call]] = defaultdict(list)
        self._fates: dict[tuple[int, str], frozenset[str]] = {}
        for call in self.calls:
            self._sort_in(call)
        for each in self.deliveries.values():
            each.sort(key=lambda delivery: delivery.lease.token)

    def _sort_in(self, call: Call) -> None:
        if call.op == "lease":
            for item_id, count in zip(call.ids, call.counts, strict=True):
                self.deliveries[item_id].append(Delivery(item_id, call, count))
        elif call.op in {"ack", "nack", "handoff"}:
            kind = call.mode or ("done" if call.step is None else "tentative")
            for item_id in call.ok if call.outcome == "yes" else call.ids:
                self.ends[call.token, item_id].append(End(kind, call))
        elif call.op == "renew" and call.outcome == "yes":
            self.renewals[call.token].append(call)
        elif call.op == "commit":
            self._commits[call.session].append(call)

    def of(self, op: str, *outcomes: str) -> list[Call]:
        """The calls of one kind."""
        return [call for call in self.calls if call.op == op and call.outcome in (outcomes or ("yes", "maybe"))]

    @cached_property
    def restores(self) -> list[Call]:
        """Those that returned, in the order of their sessions."""
        return sorted(self.of("restore", "yes"), key=lambda call: call.session)

    @cached_property
    def leases(self) -> dict[int, Call]:
        """Token → lease."""
        return {call.token: call for call in self.of("lease", "yes") if call.token}

    @cached_property
    def _sessions(self) -> list[int]:
        return [call.session for call in self.restores]

    @cached_property
    def _lost_restores(self) -> list[Call]:
        return self.of("restore", "maybe")

    @cached_property
    def _lost_leases(self) -> tuple[list[int], list[int]]:
        lost = self.of("lease", "maybe")
        for outage in self._outages:  # a call that is repeated by the client may have been granted a lease before
            lost += [call for call in self.leases.values() if call.start <= outage.end and call.end >= outage.start]
        return sorted(call.start for call in lost), sorted(call.end for call in lost)

    def num_lost_leases(self, since: int, until: int) -> int:
        """Leases whose reply nobody got and that may have been granted between two times."""
        starts, ends = self._lost_leases
        return max(0, bisect_left(starts, until) - bisect_right(ends, since))

    def deadline_ms(self, token: int) -> int:
        """Until when, in server time, a lease was surely valid."""
        return max([self.leases[token].deadline_ms, *(call.deadline_ms for call in self.renewals.get(token, ()))])

    def certain_end(self, delivery: Delivery) -> End | None:
        """The call that surely ended it, if there is one."""
        return next((end for end in self.ends.get((delivery.lease.token, delivery.id), ()) if end.certain), None)

    def fates(self, delivery: Delivery) -> frozenset[str]:
        """All that may have become of a delivery.

        done, dead; back (a nack that counts), given (one that does not), returned (by a restore, after its ack), open
        (an ack that waits for its commit), lapsed (nobody ended it: its deadline or a restore did).
        """
        key = (delivery.lease.token, delivery.id)
        if key not in self._fates:
            certain = self.certain_end(delivery)
            ends = self.ends.get(key, []) if certain is None else [certain]
            fates = {fate for end in ends for fate in self._fates_of(end)}
            self._fates[key] = frozenset(fates | ({"lapsed"} if certain is None else set()))
        return self._fates[key]

    def _fates_of(self, end: End) -> set[str]:
        if end.kind != "tentative":
            return {end.kind}
        ack, step = end.call, end.call.step or 0
        commits = [call for call in self._commits[ack.session] if (call.step or 0) >= step and call.end > ack.start]
        if end.certain and any(call.outcome == "yes" and call.start > ack.end for call in commits):
            return {"done"}
        place = bisect_right(self._sessions, ack.session)
        later = self.restores[place] if place < len(self.restores) else None
        lost = [call for call in self._lost_restores if call.end > ack.start and (not later or call.start < later.end)]
        back = {"returned"} if any((call.step or 0) < step for call in lost) else set()
        if later is not None:
            # a restore before a settled step would have been refused, so this one says what had not been settled
            return {"returned"} if (later.step or 0) < step else {"done"} | back
        settled = {"done"} if commits or any((call.step or 0) >= step for call in lost) else set()
        return {"open"} | back | settled

    def requeued(self, item_id: str, since: int, until: int) -> bool:
        """Whether a dead letter may have been made ready again between two times."""
        return any(call.start < until and call.end > since for call in self._requeues.get(item_id, ()))

    @cached_property
    def _requeues(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = defaultdict(list)
        for call in self.of("requeue"):
            for item_id in call.ids:
                found[item_id].append(call)
        return found

    def model(self, session: int, step: int) -> list[str]:
        """The ids that a model at `step` of `session` has learned, by the acks of it and of all that it came from."""
        acks: dict[int, list[Call]] = defaultdict(list)
        for call in self.of("ack", "yes"):
            acks[call.session].append(call)
        opened = {call.session: call for call in self.restores}
        learned: list[str] = []
        while session in opened:
            learned += [item_id for call in acks[session] if (call.step or 0) <= step for item_id in call.ok]
            session, step = opened[session].origin, opened[session].step or 0
        return learned
