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
from eaglefeed.errors import QueueError
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem, QueueLimits
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.queue.redis import RedisLeaseQueue

IDS = st.sampled_from([f"id{k}" for k in range(8)])
SOME = st.lists(IDS, min_size=1, max_size=4)
NAMES = st.sampled_from(["prompts", "samples"])
PAYLOADS = st.sampled_from([b"one", b"two"])
TOKENS = st.integers(0, 10)
_runs = count(1)


class QueueMachine(RuleBasedStateMachine):
    """Calls both; `tokens` are those handed out, `holder` the newest lease of an id, `done` what was settled."""

    pool: Any

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.client = queue_servers.VirtualTimeClient(self.pool, self.clock)
        run, server = f"model{next(_runs)}", MemoryServer(self.clock)
        self.jitter = 0.5
        self.model: dict[str, LeaseQueue] = {
            name: MemoryLeaseQueue(server, run, name, jitter=lambda: self.jitter) for name in ("prompts", "samples")
        }
        self.real = {
            name: RedisLeaseQueue(self.client, run, name, jitter=lambda: self.jitter) for name in ("prompts", "samples")
        }
        self.tokens: dict[str, list[int]] = {"prompts": [], "samples": []}
        self.holder: dict[tuple[str, str], int] = {}
        self.known: set[tuple[str, str]] = set()
        self.done: set[tuple[str, str]] = set()

    def both(self, name: str, call: Callable[[LeaseQueue, dict[str, Any]], Any]) -> Any:
        """The one result, or the one error, of both queues."""
        wanted = _outcome(call, self.model[name], self.model)
        got = _outcome(call, self.real[name], self.real)
        assert got == wanted
        return wanted

    def token(self, name: str, place: int) -> int:
        known = self.tokens[name]
        return known[-1 - place % len(known)] if known else 1

    @initialize(
        high=st.integers(1, 6),
        low=st.integers(0, 3),
        size=st.integers(5, 60),
        cap=st.integers(2, 9),
        crashes=st.integers(1, 2),
    )
    def configure(self, high: int, low: int, size: int, cap: int, crashes: int) -> None:
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
        for name in self.model:
            self.configure_one(name)

    def configure_one(self, name: str) -> None:
        self.both(name, lambda queue, _: queue.configure(self.limits))

    @rule(name=NAMES, ids=SOME, payload=PAYLOADS, size=st.integers(0, 20))
    def put(self, name: str, ids: list[str], payload: bytes, size: int) -> None:
        items = [QueueItem(i, payload, size) for i in ids]
        result = self.both(name, lambda queue, _: queue.put(items))
        if not isinstance(result, QueueError | str):
            self.known |= {(name, i) for i in ids}

    @rule(name=NAMES, n=st.integers(1, 5), timeout_s=st.sampled_from([0.5, 2.0, 30.0]))
    def lease(self, name: str, n: int, timeout_s: float) -> None:
        got = self.both(name, lambda queue, _: queue.lease(n, visibility_timeout_s=timeout_s, consumer="c"))
        if isinstance(got, Lease):
            self.tokens[name].append(got.token)
            self.holder.update({(name, item.id): got.token for item in got.items})

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(name=NAMES, place=TOKENS)
    def renew(self, name: str, place: int) -> None:
        token = self.token(name, place)
        self.both(name, lambda queue, _: queue.renew(token, visibility_timeout_s=2.0))

    @rule(name=NAMES, place=TOKENS, ids=SOME)
    def ack(self, name: str, place: int, ids: list[str]) -> None:
        token = self.token(name, place)
        result = self.both(name, lambda queue, _: queue.ack(token, ids))
        self.took(name, token, result.ok)
        self.done |= {(name, i) for i in result.ok}

    @rule(
        name=NAMES,
        place=TOKENS,
        ids=SOME,
        retryable=st.booleans(),
        delay_s=st.sampled_from([None, 0, 0.4, 3.0]),
        jitter=st.floats(0, 1, exclude_max=True),
    )
    def nack(
        self, name: str, place: int, ids: list[str], retryable: bool, delay_s: float | None, jitter: float
    ) -> None:
        token, self.jitter = self.token(name, place), jitter
        result = self.both(
            name, lambda queue, _: queue.nack(token, ids, reason=f"r{place}", retryable=retryable, delay_s=delay_s)
        )
        self.took(name, token, result.ok)

    def took(self, name: str, token: int, ids: tuple[str, ...]) -> None:
        """Who settles an item or gives it back is the newest lease's holder, and does so once."""
        assert len(set(ids)) == len(ids)
        for i in ids:
            assert self.holder.pop((name, i)) == token
            assert (name, i) not in self.done

    @rule(place=TOKENS, prompt=IDS, sample=IDS, payload=PAYLOADS, size=st.integers(0, 20))
    def handoff(self, place: int, prompt: str, sample: str, payload: bytes, size: int) -> None:
        token, item = self.token("prompts", place), QueueItem(sample, payload, size)
        result = self.both("prompts", lambda queue, all_of: queue.handoff(token, prompt, item, all_of["samples"]))
        if result is None:
            self.known.add(("samples", sample))
            if self.holder.get(("prompts", prompt)) == token:
                del self.holder["prompts", prompt]
                self.done.add(("prompts", prompt))

    @precondition(lambda self: len(self.known) > 6)
    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.both(name, lambda queue, _: queue.close())

    @rule(name=NAMES, ids=SOME)
    def requeue(self, name: str, ids: list[str]) -> None:
        self.both(name, lambda queue, _: queue.requeue(ids))

    @precondition(lambda self: len(self.done) > 2)
    @rule(name=NAMES)
    def purge(self, name: str) -> None:
        self.both(name, lambda queue, _: queue.purge())
        self.configure_one(name)
        self.known = {(of, i) for of, i in self.known if of != name}
        self.done = {(of, i) for of, i in self.done if of != name}
        self.holder = {(of, i): token for (of, i), token in self.holder.items() if of != name}

    @rule(name=NAMES, worker=IDS)
    def beat(self, name: str, worker: str) -> None:
        self.both(name, lambda queue, _: queue.beat("producer", worker))

    @invariant()
    def both_tell_the_same(self) -> None:
        for name in self.model:
            self.both(name, lambda queue, _: queue.stats())
            self.both(name, lambda queue, _: sorted(queue.dead_letters()))
            self.both(name, lambda queue, _: list(queue.payloads()))

    @invariant()
    def every_item_is_in_one_place(self) -> None:
        for name, queue in self.real.items():
            places = {
                "ready": self.client.call("LRANGE", queue.key("ready"), 0, -1),
                "owned": self.client.call("HKEYS", queue.key("owner")),
                "delayed": self.client.call("ZRANGE", queue.key("delayed"), 0, -1),
                "dead": self.client.call("HKEYS", queue.key("dead")),
                "done": [i.encode() for of, i in self.done if of == name],
            }
            found = [i.decode() for ids in places.values() for i in ids]
            assert sorted(found) == sorted(i for of, i in self.known if of == name), places
            assert self.client.call("LLEN", queue.key("wake")) <= 4
            unsettled = [i for part in ("ready", "owned", "delayed") for i in places[part]]
            assert sorted(i.encode() for i, *_ in queue.payloads()) == sorted(unsettled)


def _outcome(call: Callable[..., Any], queue: LeaseQueue, all_of: Any) -> Any:
    try:
        return call(queue, all_of)
    except QueueError as error:
        return f"{type(error).__name__}: {error}"


def _check(pool: Any, examples: int) -> None:
    machine = type("Machine", (QueueMachine,), {"pool": pool})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
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
