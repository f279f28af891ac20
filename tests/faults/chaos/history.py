"""Whether a history can be one of a queue that keeps its promises. Each rule yields what is impossible, in words.

No rule relies on the order of calls that overlap, and a call without a reply may have happened or not.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from faults.chaos.record import Call
from faults.chaos.timeline import Delivery, Timeline


@dataclass(frozen=True, kw_only=True)
class Final:
    """What one group is left with: how many are done, how many are neither done nor dead, and who is dead.

    `model` is what the last checkpoint has learned, None for a group without checkpoints.
    """

    done: int
    dead: frozenset[str] = frozenset()
    unsettled: int = 0
    model: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Story:
    """All that is known of a run: the groups' histories and ends, by place."""

    timelines: dict[str, Timeline]
    finals: dict[str, Final]
    puts: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Queue → ids that are in it for sure."""
    payloads: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Sample → payloads that may have been handed off."""
    released: dict[str, dict[str, Call]] = field(default_factory=lambda: defaultdict(dict))
    """Queue → id → the call that first said that its shard may go."""
    max_deliveries: int = 3


def tell(
    calls: Sequence[Call], finals: dict[str, Final], *, max_deliveries: int = 3, samples: str = "samples"
) -> Story:
    """Put the calls in order. `samples` is the queue that hand-offs go to."""
    groups: dict[str, list[Call]] = {place: [] for place in finals}
    for call in calls:
        groups.setdefault(call.place, []).append(call)
    outages = [call for call in calls if call.op == "outage"]
    timelines = {place: Timeline(place, found, outages) for place, found in groups.items() if place}
    story = Story(timelines=timelines, finals=finals, max_deliveries=max_deliveries)
    for call in calls:
        queue = call.place.partition("/")[0]
        if call.op == "lease" or (call.op == "put" and call.outcome == "yes"):
            story.puts[queue].update(call.ids)
        elif call.op == "handoff" and call.outcome != "no":
            story.puts[samples].update(call.ok)
            story.payloads[call.ids[0]].update(call.payloads)
        elif call.op == "released":
            for item_id in call.ids:
                story.released[queue].setdefault(item_id, call)
    return story


def check(story: Story) -> list[str]:
    """Every impossible thing; a history that is possible has none."""
    found = [f"{place}: {fault}" for place, line in story.timelines.items() for rule in _RULES for fault in rule(line)]
    for place, final in story.finals.items():
        ends = [*_ended_once(story, place, final), *_learned_once(story, place, final), *_payloads(story, place)]
        found += [f"{place}: {fault}" for fault in ends]
    return found + [f"{queue}: {fault}" for queue in story.released for fault in _released_for_good(story, queue)]


def _owners_settle(line: Timeline) -> Iterator[str]:
    """An id is settled by a lease that holds it, and once."""
    for (token, item_id), ends in line.ends.items():
        certain = [end for end in ends if end.certain]
        lease = line.leases.get(token)
        if certain and (lease is None or item_id not in lease.ids):
            yield f"{item_id} was settled by lease {token}, which never held it"
        if len(certain) > 1:
            yield f"{item_id} was settled {len(certain)} times by lease {token}"
        for end in certain:
            if lease is not None and end.call.op == "ack" and end.call.session != lease.session:
                yield f"{item_id} was leased in session {lease.session} and settled in session {end.call.session}"


def _stale_calls_are_refused(line: Timeline) -> Iterator[str]:
    """Once another lease has an id, the older one can do nothing with it any more."""
    for item_id, deliveries in line.deliveries.items():
        for held, taken in _all_later(deliveries):
            end = line.certain_end(held)
            if end is not None and end.call.start > taken.lease.end:
                yield f"stale {end.call.op} of {item_id} accepted: lease {held.lease.token} after {taken.lease.token}"
            late = [call for call in line.renewals.get(held.lease.token, ()) if call.start > taken.lease.end]
            if end is None and late:
                yield f"stale renewal of {held.lease.token} accepted: {item_id} was with {taken.lease.token}"


def _all_later(deliveries: Sequence[Delivery]) -> Iterator[tuple[Delivery, Delivery]]:
    """Each delivery with the first later one to be over: who is stale to any later one is so to that one."""
    for place, held in enumerate(deliveries[:-1]):
        yield held, min(deliveries[place + 1 :], key=lambda each: each.lease.end)


def _leased_again_for_a_reason(line: Timeline) -> Iterator[str]:
    """An id is not leased to two, nor ever again once it is done."""
    for deliveries in line.deliveries.values():
        for held, taken in pairwise(deliveries):
            fault = _why_not(line, held, taken)
            if fault:
                yield f"{held.id} was leased as {taken.lease.token}, but {fault}"


def _why_not(line: Timeline, held: Delivery, taken: Delivery) -> str:
    fates, token = line.fates(held), held.lease.token
    restored = taken.lease.session > held.lease.session
    if fates & {"back", "given"} or ("returned" in fates and restored):
        return ""
    if "dead" in fates and line.requeued(held.id, held.lease.start, taken.lease.end):
        return ""
    if "lapsed" not in fates:
        return f"it was {'/'.join(sorted(fates))} by lease {token}"
    if restored or taken.granted_ms >= line.deadline_ms(token):
        return ""
    return f"lease {token} held it until {line.deadline_ms(token)}, and it was granted at {taken.granted_ms}"


def _deliveries_are_counted(line: Timeline) -> Iterator[str]:
    """The count grows by each delivery that was neither settled nor given back."""
    for item_id, deliveries in line.deliveries.items():
        for held, taken in pairwise([None, *deliveries]):
            least, most = _bounds(line, held, taken) if taken else (0, 0)
            if taken and not least <= taken.times <= most:
                wanted = f"wanted {least} to {most}"
                yield f"{item_id} has delivery_count {taken.times} in lease {taken.lease.token}, {wanted}"


def _bounds(line: Timeline, held: Delivery | None, taken: Delivery) -> tuple[int, int]:
    since = held.lease.start if held else 0
    lost = line.num_lost_leases(since, taken.lease.end)
    if held is None:
        return 1, 1 + lost
    fates = line.fates(held)
    may_not_count = fates & {"given", "returned"} or taken.lease.session > held.lease.session
    most = held.times + bool(fates & {"back", "lapsed", "dead"}) + lost
    if line.requeued(held.id, since, taken.lease.end):
        return 1, most
    return held.times + (0 if may_not_count else 1), most


def _sessions_are_fenced(line: Timeline) -> Iterator[str]:
    """After a restore, an older session does nothing; leases and restores are numbered in order."""
    newest = _Newest((call.end, call.session) for call in line.restores)
    for call in line.calls:
        if call.op in {"lease", "ack", "commit"} and call.outcome == "yes" and call.session < newest.at(call.start):
            yield f"{call.op} of session {call.session} accepted after {newest.at(call.start)} had been opened"
    for name, calls in (("lease", list(line.leases.values())), ("restore", line.restores)):
        numbers = [(call.end, call.token if name == "lease" else call.session) for call in calls]
        highest = _Newest(numbers)
        for call, (_, number) in zip(calls, numbers, strict=True):
            if number <= highest.at(call.start):
                yield f"{name} {number} came after {highest.at(call.start)}"


class _Newest:
    """The greatest number that was out at a time."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(pairs)
        self._times = [time for time, _ in ordered]
        self._greatest = list(accumulate((number for _, number in ordered), max))

    def at(self, time: int) -> int:
        place = bisect_left(self._times, time)
        return self._greatest[place - 1] if place else -1


def _committed_steps_stay(line: Timeline) -> Iterator[str]:
    """Nothing before a committed or restored step can be restored."""
    settled = [call for call in line.calls if call.op in {"commit", "restore"} and call.outcome == "yes"]
    newest = _Newest((call.end, call.step or 0) for call in settled)
    for call in line.restores:
        if (call.step or 0) < newest.at(call.start):
            yield f"step {call.step} was restored after step {newest.at(call.start)} had been committed"


def _returned_come_back(line: Timeline) -> Iterator[str]:
    """What was acknowledged beyond a restored step is handed out again, or the checkpoint had seen it."""
    seen = {item_id for call in line.of("restore") for item_id in call.ids}
    for item_id, deliveries in line.deliveries.items():
        if line.fates(deliveries[-1]) == {"returned"} and item_id not in seen:
            yield f"{item_id} was acknowledged beyond the step that was restored, and never leased again"


def _seen_stay_away(line: Timeline) -> Iterator[str]:
    """What a restored checkpoint has seen is not handed out again."""
    for call in line.restores:
        for item_id in call.ids:
            again = [each for each in line.deliveries.get(item_id, ()) if each.lease.session >= call.session]
            if again:
                yield f"{item_id} was leased in session {again[0].lease.session}, whose checkpoint had seen it"


_RULES: tuple[Callable[[Timeline], Iterator[str]], ...] = (
    _owners_settle,
    _stale_calls_are_refused,
    _leased_again_for_a_reason,
    _deliveries_are_counted,
    _sessions_are_fenced,
    _committed_steps_stay,
    _returned_come_back,
    _seen_stay_away,
)


def _ended_once(story: Story, place: str, final: Final) -> Iterator[str]:
    """Every id that was put is done or dead at the end, never both, and for a reason."""
    line, ids = story.timelines[place], story.puts[place.partition("/")[0]]
    if final.unsettled:
        yield f"{final.unsettled} items are neither done nor dead"
    if final.done + len(final.dead) + final.unsettled != len(ids):
        yield f"{final.done} done, {len(final.dead)} dead and {final.unsettled} others are not the {len(ids)} put"
    seen = {item_id for call in line.of("restore") for item_id in call.ids}
    hands_off = bool(line.of("handoff"))
    for item_id in sorted(ids):
        fates = [line.fates(delivery) for delivery in line.deliveries.get(item_id, ())]
        if item_id in final.dead:
            yield from _died(story, line, item_id, fates)
        elif item_id not in seen and not any("done" in each for each in fates):
            yield f"{item_id} was never done, but it is not dead"
        elif hands_off and item_id not in story.puts["samples"]:
            yield f"{item_id} is done, but its sample was never put"


def _died(story: Story, line: Timeline, item_id: str, fates: Sequence[frozenset[str]]) -> Iterator[str]:
    deliveries = line.deliveries.get(item_id, [])
    if frozenset({"done"}) in fates:
        yield f"{item_id} was done, and is dead"
    alone = [each for each in deliveries if len(each.lease.ids) == 1 and "lapsed" in line.fates(each)]
    lost = line.num_lost_leases(deliveries[0].lease.start, deliveries[-1].lease.end + 10**12) if deliveries else 0
    if not any("dead" in each for each in fates) and len(alone) + lost < story.max_deliveries:
        yield f"{item_id} is dead, but nobody said so, and it crashed alone {len(alone)} times"


def _learned_once(story: Story, place: str, final: Final) -> Iterator[str]:
    """The last model has learned every id that is done, once, and nothing else; its acks say the same."""
    if final.model is None:
        return
    line, ids = story.timelines[place], story.puts[place.partition("/")[0]]
    last = line.restores[-1].session if line.restores else 0
    told = Counter(line.model(last, 2**62))
    if told != Counter(final.model):
        yield f"the model and the acks of its sessions differ: {sorted((told - Counter(final.model)).keys())[:5]}"
    for item_id, times in told.items():
        if times > 1:
            yield f"{item_id} was learned {times} times"
    for item_id in sorted(ids - final.dead - told.keys()):
        yield f"{item_id} is done and was never learned"
    for item_id in sorted(told.keys() & final.dead):
        yield f"{item_id} is dead and was learned"


def _payloads(story: Story, place: str) -> Iterator[str]:
    """A sample is delivered as it was handed off, always the same."""
    given: dict[str, set[str]] = defaultdict(set)
    for call in story.timelines[place].of("lease", "yes"):
        for item_id, payload in zip(call.ids, call.payloads, strict=False):
            given[item_id].add(payload)
    for item_id, payloads in given.items():
        if len(payloads) > 1:
            yield f"{item_id} was delivered with {len(payloads)} payloads"
        if place.startswith("samples/") and story.payloads and not payloads <= story.payloads[item_id]:
            yield f"{item_id} was delivered as {sorted(payloads)}, which nobody handed off"


def _released_for_good(story: Story, queue: str) -> Iterator[str]:
    """A shard may go once no group needs it any more, and all do go but those of dead letters."""
    released, dead = story.released[queue], set[str]()
    for place, final in story.finals.items():
        if place.startswith(f"{queue}/"):
            dead |= final.dead
            for item_id, call in released.items():
                late = [
                    each for each in story.timelines[place].deliveries.get(item_id, ()) if each.lease.start > call.end
                ]
                if late:
                    yield f"{item_id} was released, and leased as {late[0].lease.token} in {place}"
    for item_id in sorted(released.keys() & dead):
        yield f"{item_id} was released, and is dead"
    for item_id in sorted(story.puts[queue] - released.keys() - dead):
        yield f"{item_id} was never released"
