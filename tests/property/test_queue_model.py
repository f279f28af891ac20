"""The scripts and the memory model do the same, whatever is called in whatever order; time is turned by hand."""

from collections.abc import Callable
from itertools import count
from typing import Any

import fakeredis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import queue_servers
from eaglefeed.clock import ManualClock
from eaglefeed.errors import ConfigError, QueueError
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.queue.redis import RedisLeaseQueue

IDS = st.sampled_from([f"id{k}" for k in range(8)])
SOME = st.lists(IDS, min_size=1, max_size=4)
PLACES = st.integers(0, 2)
PAYLOADS = st.sampled_from([b"one", b"two"])
TOKENS = st.integers(0, 10)
STEPS = st.integers(0, 6)
PRODUCERS = st.sampled_from(["p1", "p2"])
AGES = st.sampled_from([0, 0, 0, 0, 1])

At = tuple[str, str]
_runs = count(1)


class QueueMachine(RuleBasedStateMachine):
    """Calls both sides, and keeps its own book of who holds what: `holder`, `tentative`, `done` by queue, group and id.

    A place is the prompts queue, or the samples queue as one of its groups sees it.
    """

    pool: Any

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.client = queue_servers.VirtualTimeClient(self.pool, self.clock)
        self.run, self.server = f"model{next(_runs)}", MemoryServer(self.clock)
        self.jitter = 0.5
        self.tokens: dict[At, list[int]] = {}
        self.sessions: dict[At, list[int]] = {}
        self.holder: dict[tuple[At, str], int] = {}
        self.tentative: dict[tuple[At, str], int] = {}
        self.known: set[tuple[str, str]] = set()
        self.done: set[tuple[At, str]] = set()

    @initialize(
        groups=st.sampled_from([["main"], ["main", "other"]]),
        high=st.integers(1, 6),
        low=st.integers(0, 3),
        size=st.integers(5, 60),
        cap=st.integers(2, 9),
        crashes=st.integers(1, 2),
    )
    def configure(self, groups: list[str], high: int, low: int, size: int, cap: int, crashes: int) -> None:
        self.limits = QueueLimits(
            max_depth=cap,
            high_count=high,
            low_count=min(low, high),
            high_bytes=size,
            low_bytes=size // 2,
            max_deliveries=crashes,
            backoff_base_s=0.5,
            backoff_max_s=3.0,
        )
        self.places: list[At] = [("prompts", "main"), *(("samples", group) for group in groups)]
        self.model: dict[At, LeaseQueue] = {
            at: MemoryLeaseQueue(self.server, self.run, *at, jitter=lambda: self.jitter) for at in self.places
        }
        self.real = {at: RedisLeaseQueue(self.client, self.run, *at, jitter=lambda: self.jitter) for at in self.places}
        self.both(self.places[1], lambda queue, _: queue.configure(self.limits, groups=groups))
        for at in self.places:
            self.configure_one(at)

    def configure_one(self, at: At) -> None:
        self.both(at, lambda queue, _: queue.configure(self.limits))
        self.both(at, lambda queue, _: queue.limits())

    def at(self, place: int) -> At:
        return self.places[place % len(self.places)]

    def both(self, at: At, call: Callable[[LeaseQueue, LeaseQueue], Any]) -> Any:
        """The one result, or the one error, of both sides; a call is given its queue and the samples queue."""
        samples = self.places[1]
        wanted = _outcome(call, self.model[at], self.model[samples])
        got = _outcome(call, self.real[at], self.real[samples])
        assert got == wanted
        return wanted

    def token(self, at: At, place: int) -> int:
        known = self.tokens.get(at, [])
        return known[-1 - place % len(known)] if known else 1

    def session(self, at: At, age: int) -> int:
        known = self.sessions.get(at, [0])
        return known[-1 - min(age, len(known) - 1)]

    def groups_of(self, name: str) -> list[At]:
        return [at for at in self.places if at[0] == name]

    @rule(place=PLACES, ids=SOME, payload=PAYLOADS, size=st.integers(0, 20))
    def put(self, place: int, ids: list[str], payload: bytes, size: int) -> None:
        at = self.at(place)
        items = [QueueItem(i, payload, size) for i in ids]
        result = self.both(at, lambda queue, _: queue.put(items))
        if not isinstance(result, str):
            self.known |= {(at[0], i) for i in ids}

    @rule(place=PLACES, n=st.integers(1, 5), timeout_s=st.sampled_from([0.5, 2.0, 30.0]), age=AGES)
    def lease(self, place: int, n: int, timeout_s: float, age: int) -> None:
        at = self.at(place)
        session = self.session(at, age)
        got = self.both(
            at, lambda queue, _: queue.lease(n, visibility_timeout_s=timeout_s, consumer="c", session=session)
        )
        if isinstance(got, Lease):
            self.tokens.setdefault(at, []).append(got.token)
            for item in got.items:
                assert (at, item.id) not in self.tentative
                self.holder[at, item.id] = got.token

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.0, 5.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(place=PLACES, token_place=TOKENS)
    def renew(self, place: int, token_place: int) -> None:
        at = self.at(place)
        token = self.token(at, token_place)
        self.both(at, lambda queue, _: queue.renew(token, visibility_timeout_s=2.0))

    @rule(place=PLACES, token_place=TOKENS, ids=SOME, step=st.none() | STEPS, age=AGES)
    def ack(self, place: int, token_place: int, ids: list[str], step: int | None, age: int) -> None:
        at = self.at(place)
        token, session = self.token(at, token_place), self.session(at, age)
        result = self.both(at, lambda queue, _: queue.ack(token, ids, step=step, session=session))
        if isinstance(result, str):
            return
        self.took(at, token, result.ok)
        if step is None:
            self.done |= {(at, i) for i in result.ok}
        else:
            self.tentative.update({(at, i): step for i in result.ok})

    @rule(
        place=PLACES,
        token_place=TOKENS,
        ids=SOME,
        retryable=st.booleans(),
        delay_s=st.sampled_from([None, 0, 0.4, 3.0]),
        counted=st.booleans(),
        jitter=st.floats(0, 1, exclude_max=True),
    )
    def nack(
        self,
        place: int,
        token_place: int,
        ids: list[str],
        retryable: bool,
        delay_s: float | None,
        counted: bool,
        jitter: float,
    ) -> None:
        at = self.at(place)
        token, self.jitter, reason = self.token(at, token_place), jitter, f"r{token_place}"
        options: dict[str, Any] = {"reason": reason, "retryable": retryable, "delay_s": delay_s, "counted": counted}
        before = {item.id: item.delivery_count for item in self.model[at].payloads()}
        result = self.both(at, lambda queue, _: queue.nack(token, ids, **options))
        self.took(at, token, result.ok)
        after = {item.id: item.delivery_count for item in self.model[at].payloads()}
        ended = int(counted and not (retryable and delay_s == 0))
        assert all(after[i] == before[i] + ended for i in result.ok if i in after)

    def took(self, at: At, token: int, ids: tuple[str, ...]) -> None:
        """Who settles an item or gives it back is the newest lease's holder, and does so once."""
        assert len(set(ids)) == len(ids)
        for i in ids:
            assert self.holder.pop((at, i)) == token
            assert (at, i) not in self.done

    @rule(place=PLACES, step=STEPS, age=AGES)
    def commit(self, place: int, step: int, age: int) -> None:
        at, session = self.at(place), self.session(self.at(place), age)
        result = self.both(at, lambda queue, _: queue.commit(step, session=session))
        if not isinstance(result, str):
            assert result == self.learned(at, step)

    def learned(self, at: At, step: int) -> int:
        """What is tentative up to the step is done; how many."""
        up_to = [key for key, of in self.tentative.items() if key[0] == at and of <= step]
        self.done |= set(up_to)
        for key in up_to:
            del self.tentative[key]
        return len(up_to)

    @rule(place=PLACES, step=STEPS, seen=st.lists(IDS, max_size=3))
    def restore(self, place: int, step: int, seen: list[str]) -> None:
        at = self.at(place)
        dead = {letter.id for letter in self.model[at].dead_letters()}
        held = set(self.model_held(at))
        result = self.both(at, lambda queue, _: queue.restore(step, seen=seen))
        if isinstance(result, str):
            return
        self.sessions.setdefault(at, [0]).append(result)
        for i in set(seen) - dead - held:
            if (at[0], i) in self.known and (at, i) not in self.done:
                self.tentative[at, i] = step
        self.learned(at, step)
        for book in (self.tentative, self.holder):
            for key in [key for key in book if key[0] == at]:
                del book[key]

    def model_held(self, at: At) -> list[str]:
        return [i.decode() for i in self.client.call("HKEYS", self.real[at].key("held"))]

    @rule(place=PLACES, ids=SOME)
    def forget(self, place: int, ids: list[str]) -> None:
        self.both(self.at(place), lambda queue, _: queue.forget(ids))

    @rule(token_place=TOKENS, prompt=IDS, sample=st.none() | IDS, payload=PAYLOADS, size=st.integers(0, 20))
    def handoff(self, token_place: int, prompt: str, sample: str | None, payload: bytes, size: int) -> None:
        self.hand_off(token_place, prompt, QueueItem(sample or prompt, payload, size), "")

    @rule(token_place=TOKENS, prompt=IDS, payload=PAYLOADS, size=st.integers(0, 20), holder=PRODUCERS)
    def keep_and_hand_off(self, token_place: int, prompt: str, payload: bytes, size: int, holder: str) -> None:
        self.hand_off(token_place, prompt, QueueItem(prompt, payload, size), holder)

    def hand_off(self, token_place: int, prompt: str, item: QueueItem, holder: str) -> None:
        at = self.places[0]
        token = self.token(at, token_place)
        result = self.both(at, lambda queue, samples: queue.handoff(token, prompt, item, samples, holder=holder))
        if result is None:
            self.known.add(("samples", item.id))
            if self.holder.get((at, prompt)) == token:
                del self.holder[at, prompt]
                self.done.add((at, prompt))

    @rule()
    def recall(self) -> None:
        at = self.places[0]
        self.both(at, lambda queue, samples: queue.recall(samples))

    @precondition(lambda self: len(self.known) > 6)
    @rule(place=PLACES)
    def close(self, place: int) -> None:
        self.both(self.at(place), lambda queue, _: queue.close())

    @rule(place=PLACES, ids=SOME)
    def requeue(self, place: int, ids: list[str]) -> None:
        self.both(self.at(place), lambda queue, _: queue.requeue(ids))

    @precondition(lambda self: len(self.done) > 2)
    @rule(place=PLACES)
    def purge(self, place: int) -> None:
        at = self.at(place)
        self.both(at, lambda queue, _: queue.purge())
        self.configure_one(at)
        self.known = {(of, i) for of, i in self.known if of != at[0]}
        self.done = {(of, i) for of, i in self.done if of[0] != at[0]}
        for book in (self.holder, self.tentative):
            for key in [key for key in book if key[0][0] == at[0]]:
                del book[key]

    @rule(place=PLACES, worker=PRODUCERS, lives=st.booleans())
    def show_life(self, place: int, worker: str, lives: bool) -> None:
        at = self.at(place)
        self.both(at, lambda queue, _: (queue.beat if lives else queue.farewell)("producer", worker))

    @invariant()
    def both_tell_the_same(self) -> None:
        for at in self.model:
            self.both(at, lambda queue, _: queue.stats())
            self.both(at, lambda queue, _: queue.has_room())
            self.both(at, lambda queue, _: sorted(queue.dead_letters()))
            self.both(at, lambda queue, _: list(queue.payloads()))
            self.both(at, lambda queue, _: sorted(queue.released()))

    @invariant()
    def held_prompts_are_waited_for_as_long_as_their_samples_are_open(self) -> None:
        prompts, samples = self.places[:2]
        held = {i.decode() for i in self.client.call("HKEYS", self.real[prompts].key("held"))}
        open_ids = {item.id for item in self.model[samples].payloads()}
        assert self.both(prompts, lambda queue, of: queue.held_for(of)) == len(held & open_ids)

    @invariant()
    def every_item_is_in_one_place_of_each_group(self) -> None:
        for at, queue in self.real.items():
            places = {
                "ready": self.client.call("LRANGE", queue.key("ready"), 0, -1),
                "leased": self.leased(queue),
                "delayed": self.client.call("ZRANGE", queue.key("delayed"), 0, -1),
                "tentative": self.learned_ids(queue),
                "parked": self.client.call("SMEMBERS", queue.key("parked")),
                "dead": self.client.call("HKEYS", queue.key("dead")),
                "held": self.client.call("HKEYS", queue.key("held")),
            }
            found = [i.decode() for ids in places.values() for i in ids]
            # what this machine's own book says; a prompt whose producer died is not done although it was handed off
            done = [i for of, i in self.done if of == at and (at[0] == "samples" or i not in found)]
            assert sorted(found + done) == sorted(i for of, i in self.known if of == at[0]), places
            assert self.client.call("LLEN", queue.key("wake")) <= 4
            assert self.client.call("LLEN", queue.key("room")) <= 64
            tentative = {i: step for (of, i), step in self.tentative.items() if of == at}
            assert sorted(i.decode() for i in places["tentative"]) == sorted(tentative)

    @invariant()
    def payloads_are_those_of_all_that_some_group_has_to_do(self) -> None:
        for name in {at[0] for at in self.real}:
            groups = self.groups_of(name)
            settled = [self.settled(at) for at in groups]
            unsettled = {i for of, i in self.known if of == name} - set.intersection(*settled)
            assert sorted(i for i, *_ in self.real[groups[0]].payloads()) == sorted(unsettled)

    def leased(self, queue: RedisLeaseQueue) -> list[bytes]:
        return [i for value in self.client.call("HVALS", queue.key("state")) for i in value.split(b"\n")[1:]]

    def learned_ids(self, queue: RedisLeaseQueue) -> list[bytes]:
        return [i for ids in self.client.call("ZRANGE", queue.key("tentative"), 0, -1) for i in ids.split(b"\n")]

    def settled(self, at: At) -> set[str]:
        queue = self.real[at]
        parts = [self.client.call("LRANGE", queue.key("ready"), 0, -1)]
        parts += [self.client.call("ZRANGE", queue.key("delayed"), 0, -1), self.client.call("HKEYS", queue.key("held"))]
        parts += [self.client.call("SMEMBERS", queue.key("parked")), self.leased(queue), self.learned_ids(queue)]
        open_ids = {i.decode() for part in parts for i in part}
        return {i for of, i in self.known if of == at[0]} - open_ids


def _outcome(call: Callable[..., Any], queue: LeaseQueue, samples: LeaseQueue) -> Any:
    try:
        return call(queue, samples)
    except (QueueError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


def _check(pool: Any, examples: int, steps: int = 40) -> None:
    machine = type("Machine", (QueueMachine,), {"pool": pool})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=checks,
            # shrinking a failure takes longer than a test may
            phases=[Phase.explicit, Phase.generate],
            print_blob=True,
        ),
    )


def test_fakeredis_does_what_the_model_does() -> None:
    _check(fakeredis.FakeRedis().connection_pool, 25)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_real_server_does_what_the_model_does(kind: str, clients: dict[str, QueueClient]) -> None:
    if kind not in clients:
        pytest.skip(f"no {kind}-server is installed")
    _check(clients[kind]._pool, 40)
