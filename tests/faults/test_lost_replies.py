"""A call whose reply is lost, or that never arrives, is repeated: it returns and leaves what one call does."""

import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest

import queue_servers
from eaglefeed.errors import QueueUnavailable
from eaglefeed.queue import EmbeddedServer, connect, connection
from eaglefeed.queue.base import Lease, NoLease, QueueLimits
from eaglefeed.queue.redis import RedisLeaseQueue
from faults import operations_leasing, operations_of_runs
from faults.operation_base import Call, Run
from faults.processes import in_thread, kill, restarted, wait_until
from faults.reply_proxy import Loss, Plan, ReplyProxy, Request, reply_proxy
from faults.run_state import attempt, kept_of, keys_of, told
from queue_steps import LONG_S, finish, ids, items, lease, nothing, numbered

SERVERS = queue_servers.real_servers()
OPERATIONS = {**operations_leasing.operation, **operations_of_runs.operation}
PLAIN = {"limits", "has_room", "wait_for_room_in_vain", "wait_for_room_that_is_there", "farewell", "dead_letters"}
PLAIN |= {"find", "known", "held_for", "leased", "agree", "agree_on_what_stands", "agreed"}
"""Those that are no script."""
GROW = {"configure", "configure_groups", "put", "put_two_chunks", "put_for_two_groups", "agree"}
_numbers = count(1)


class Place:
    """A server, a connection to it, and one that leads over a proxy."""

    def __init__(self, server: EmbeddedServer, proxy: ReplyProxy) -> None:
        self.server, self.proxy = server, proxy
        self.direct, self.via = connect(server.url), connect(proxy.url)

    def prepared(self, name: str) -> tuple[str, Call]:
        """A new run and the call to make on it."""
        namespace = f"run{next(_numbers)}"
        return namespace, OPERATIONS[name](Run(self.direct, namespace))

    def told_of(self, result: object, namespace: str) -> str:
        return told(result, kept_of(self.direct, namespace))

    def plainly(self, name: str) -> str:
        """What one undisturbed call returns and leaves."""
        namespace, call = self.prepared(name)
        return self.told_of(attempt(call, Run(self.direct, namespace)), namespace)

    def close(self) -> None:
        for client in (self.direct, self.via):
            client.close()


@pytest.fixture(scope="module", params=["valkey", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param not in SERVERS:
        pytest.skip(f"no {request.param}-server is installed")
    folder = tmp_path_factory.mktemp(request.param)
    with (
        EmbeddedServer(folder / "queue", binary=SERVERS[request.param]) as server,
        reply_proxy(folder / "proxy.sock", server.folder / "server.sock") as proxy,
    ):
        place = Place(server, proxy)
        yield place
        place.close()


@pytest.fixture
def place(opened: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(connection, "_BACKOFF_S", 0.001)
    opened.proxy.reset()
    return opened


def once(loss: Loss) -> Plan:
    """Every request is lost once, and passes when it is repeated."""
    return lambda request: loss if request.total % 2 else None


def twice(request: Request) -> Loss | None:
    return Loss.REPLY if request.total % 3 else None


# every operation


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("plan", [once(Loss.REPLY), twice, once(Loss.REQUEST)], ids=["reply", "replies", "request"])
def test_an_operation_that_is_cut_off_returns_and_leaves_what_one_call_does(
    place: Place, plan: Plan, name: str
) -> None:
    namespace, call = place.prepared(name)
    place.proxy.plan = plan
    result = attempt(call, Run(place.via, namespace))
    assert place.proxy.lost
    assert place.told_of(result, namespace) == place.plainly(name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_repeated_script_that_the_server_forgot_is_sent_whole_and_runs_no_second_time(
    place: Place, name: str
) -> None:
    namespace, call = place.prepared(name)
    place.proxy.plan = once(Loss.REPLY)
    place.proxy.after_loss = lambda _: place.direct.call("SCRIPT", "FLUSH")
    result = attempt(call, Run(place.via, namespace))
    assert place.told_of(result, namespace) == place.plainly(name)


def test_the_server_restarts_between_an_operation_and_its_repeat(place: Place) -> None:
    """All operations at once: each is carried out, then the server is killed and started again, then each repeats."""
    calls = {name: place.prepared(name) for name in OPERATIONS}
    carried_out = set[str]()

    def is_first_script(request: Request) -> Loss | None:
        fresh = request.is_script and request.run not in carried_out
        carried_out.update([request.run] if fresh else [])
        return Loss.REPLY if fresh else None

    def restart() -> None:
        kill(place.server, place.direct)
        with restarted(place.server):
            place.direct.call("PING")

    barrier = threading.Barrier(len(calls) - len(PLAIN), restart)
    place.proxy.plan, place.proxy.after_loss = is_first_script, lambda _: barrier.wait(30)
    told_of = run_at_once(place, calls)
    assert carried_out == {namespace for name, (namespace, _) in calls.items() if name not in PLAIN}
    for name in OPERATIONS:
        assert told_of[name] == place.plainly(name), name


def run_at_once(place: Place, calls: dict[str, tuple[str, Call]]) -> dict[str, str]:
    """Every call on a thread and over a client of its own."""
    results = dict[str, object]()

    def work(name: str, namespace: str, call: Call) -> None:
        client = connect(place.proxy.url)
        results[name] = attempt(call, Run(client, namespace))
        client.close()

    threads = [threading.Thread(target=work, args=(name, *call)) for name, call in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return {name: place.told_of(results[name], namespace) for name, (namespace, _) in calls.items()}


# waiting


def lose_the_wake_up(place: Place, wake: Callable[[], object]) -> threading.Thread:
    """Lose the reply of the first blocking read; `wake` ends it."""
    place.proxy.plan = lambda request: Loss.REPLY if (request.name, request.nth) == ("BLPOP", 1) else None

    def wake_who_waits() -> None:
        wait_until(lambda: any(request.name == "BLPOP" for request in place.proxy.seen))
        wake()

    return in_thread(wake_who_waits)


def test_a_waiting_lease_whose_wake_up_is_lost_returns_what_was_put(place: Place) -> None:
    namespace = f"run{next(_numbers)}"
    waker = lose_the_wake_up(place, lambda: Run(place.direct, namespace).samples.put(items("a")))
    got = Run(place.via, namespace).samples.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=LONG_S)
    waker.join()
    assert isinstance(got, Lease)
    assert (ids(got), place.proxy.lost) == (["a"], ["BLPOP"])


def test_a_producer_whose_wake_up_is_lost_learns_of_the_room(place: Place) -> None:
    namespace = f"run{next(_numbers)}"
    samples = Run(place.direct, namespace).samples
    samples.configure(QueueLimits(high_count=1, low_count=0))
    samples.put(items("a"))
    waker = lose_the_wake_up(place, lambda: finish(samples))
    assert Run(place.via, namespace).samples.wait_for_room(LONG_S)
    waker.join()
    assert place.proxy.lost == ["BLPOP"]


# out of memory


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_out_of_memory_refuses_what_grows_and_carries_out_the_rest(place: Place, name: str) -> None:
    namespace, call = place.prepared(name)
    before = kept_of(place.direct, namespace)
    place.direct.call("CONFIG", "SET", "maxmemory", "1")
    try:
        result = attempt(call, Run(place.direct, namespace))
    finally:
        place.direct.call("CONFIG", "SET", "maxmemory", "0")
    if name in GROW:
        assert isinstance(result, QueueUnavailable)
        assert (result.retryable, "out of memory" in str(result)) == (True, True)
        assert kept_of(place.direct, namespace) == before
    else:
        assert place.told_of(result, namespace) == place.plainly(name)


# the replies that are kept


def replies_of(place: Place, namespace: str) -> bytes:
    """The one key of this client's replies."""
    ending = f":replay:{place.via.id}".encode()
    (key,) = (key for key in keys_of(place.direct, namespace) if key.endswith(ending))
    return key


def test_a_client_keeps_one_key_of_replies_a_run_with_one_reply_an_operation(place: Place) -> None:
    namespace, call = place.prepared("handoff")
    call(Run(place.via, namespace))
    samples = Run(place.via, namespace).samples
    samples.put(items(*numbered(50)))
    for _ in range(5):
        samples.ack(lease(samples, 9).token, ["i00003"], step=1)
    samples.commit(1)
    names = ["prompts/main/handoff", *(f"samples/main/{name}" for name in ("put", "lease", "ack", "commit"))]
    assert place.direct.call("HKEYS", replies_of(place, namespace)) == [name.encode() for name in names]


def test_the_replies_that_are_kept_expire_and_last_as_long_as_the_client_calls(place: Place) -> None:
    namespace = f"run{next(_numbers)}"
    samples = Run(place.via, namespace).samples
    assert isinstance(nothing(samples), NoLease)  # leaves no reply behind, and so nothing that expires
    samples.put(items("a", "b"))
    key = replies_of(place, namespace)
    assert 3_600_000 < place.direct.call("PTTL", key) <= 7_200_000
    place.direct.call("PEXPIRE", key, 60_000)
    lease(samples, 1)
    assert 3_600_000 < place.direct.call("PTTL", key) <= 7_200_000


def test_threads_of_one_client_each_get_their_own_reply_while_replies_are_lost(place: Place) -> None:
    namespace, names = f"run{next(_numbers)}", numbered(120)
    place.proxy.plan = lambda request: Loss.REPLY if request.total % 3 == 0 else None
    taken: list[tuple[int, list[str]]] = []
    accepted: list[int] = []

    def work(mine: list[str]) -> None:
        queue = Run(place.via, namespace).samples
        for name in mine:
            accepted.append(queue.put(items(name, "shared")).accepted)
            got = lease(queue, 1)
            taken.append((got.token, ids(got)))
            assert queue.ack(got.token, ids(got)).ok == tuple(ids(got))

    threads = [threading.Thread(target=work, args=(names[k::2],)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(place.proxy.lost) > 100
    assert sum(accepted) == 121
    assert len({token for token, _ in taken}) == 120
    assert len({name for _, leased in taken for name in leased}) == 120
    assert Run(place.direct, namespace).samples.stats().done == 120


def test_a_repeat_never_gets_the_reply_of_an_earlier_call(place: Place) -> None:
    namespace = f"run{next(_numbers)}"
    queue = Run(place.via, namespace).samples
    queue.put(items("a", "b", "c"))
    first = lease(queue, 1)
    place.proxy.plan = once(Loss.REQUEST)
    second = lease(queue, 1)
    assert ids(first) + ids(second) == ["a", "b"]
    assert queue.ack(second.token, ["a", "b"]) == (("b",), ("a",))
    assert queue.ack(second.token, ["b"]) == ((), ("b",))


def test_a_lease_whose_reply_was_lost_and_that_ran_out_meanwhile_is_taken_anew(place: Place) -> None:
    namespace = f"run{next(_numbers)}"
    samples = Run(place.direct, namespace).samples
    samples.put(items("a", "b"))
    place.proxy.plan = once(Loss.REPLY)
    place.proxy.after_loss = lambda _: expire_and_take_one(place, samples)
    got = Run(place.via, namespace).samples.lease(2, visibility_timeout_s=LONG_S, consumer="c")
    assert isinstance(got, Lease)
    assert [(item.id, item.delivery_count) for item in got.items] == [("b", 2)]


def expire_and_take_one(place: Place, samples: RedisLeaseQueue) -> None:
    """Somebody else reclaims what the lost reply was about, and leases the first item of it."""
    if samples.stats().leased == 2:
        (token,) = place.direct.call("ZRANGE", samples.key("leases"), 0, -1)
        samples.renew(int(token), visibility_timeout_s=0)
        assert ids(lease(samples, 1)) == ["a"]
