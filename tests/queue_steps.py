"""What tests of a lease queue do again and again."""

from collections.abc import Sequence

from eaglefeed.queue.base import Lease, LeaseQueue, NoLease, QueueItem, QueueLimits
from queue_servers import Bench

SHORT_S = 0.04
LONG_S = 60.0


def items(*names: str, stored_bytes: int = 0) -> list[QueueItem]:
    return [QueueItem(i, f"payload of {i}\n\xff".encode("latin-1"), stored_bytes) for i in names]


def numbered(n: int) -> list[str]:
    return [f"i{k:05}" for k in range(n)]


def lease(queue: LeaseQueue, n: int = 10, timeout_s: float = LONG_S, consumer: str = "c", session: int = 0) -> Lease:
    got = queue.lease(n, visibility_timeout_s=timeout_s, consumer=consumer, session=session)
    assert isinstance(got, Lease), got
    return got


def nothing(queue: LeaseQueue, session: int = 0, wait_s: float = 0.0) -> NoLease:
    got = queue.lease(10, visibility_timeout_s=LONG_S, consumer="c", session=session, wait_s=wait_s)
    assert isinstance(got, NoLease), got
    return got


def ids(got: Lease) -> list[str]:
    return [item.id for item in got.items]


def expire(bench: Bench, queue: LeaseQueue, n: int = 10) -> Lease:
    """Lease and let the lease run out; nobody has reclaimed it yet."""
    got = lease(queue, n, SHORT_S)
    bench.pass_time(SHORT_S * 2)
    return got


def learn(queue: LeaseQueue, n: int, step: int, session: int = 0) -> list[str]:
    """Lease up to `n` items and acknowledge them at `step`."""
    got = lease(queue, n, session=session)
    assert list(queue.ack(got.token, ids(got), step=step, session=session).ok) == ids(got)
    return ids(got)


def finish(queue: LeaseQueue, n: int = 10) -> list[str]:
    """Lease up to `n` items and settle them for good."""
    got = lease(queue, n)
    assert list(queue.ack(got.token, ids(got)).ok) == ids(got)
    return ids(got)


def fail(queue: LeaseQueue, *names: str, reason: str = "bad") -> None:
    """Lease the items of the head, which must be `names`, and make them dead letters."""
    got = lease(queue, len(names))
    assert queue.nack(got.token, names, reason=reason, retryable=False).ok == names


def filled(bench: Bench, *names: str) -> LeaseQueue:
    queue = bench.queue("samples")
    queue.put(items(*names))
    return queue


def two_groups(bench: Bench) -> tuple[LeaseQueue, LeaseQueue]:
    """The samples as groups "a" and "b" see them."""
    a, b = bench.queue("samples", "a"), bench.queue("samples", "b")
    a.configure(QueueLimits(), groups=["a", "b"])
    return a, b


def counts(queue: LeaseQueue) -> Sequence[int]:
    s = queue.stats()
    return s.ready, s.delayed, s.leased, s.done, s.dead


def dead_ids(queue: LeaseQueue) -> list[str]:
    return sorted(dead.id for dead in queue.dead_letters())


def released_ids(queue: LeaseQueue) -> list[str]:
    return sorted(item.id for item in queue.released())


Pair = tuple[LeaseQueue, LeaseQueue]


def ref(name: str, generation: int = 1, stored_bytes: int = 10) -> QueueItem:
    return QueueItem(name, f"{name} by generation {generation}".encode(), stored_bytes)


def hand_off(pair: Pair, *names: str, holder: str = "p1", generation: int = 1, stored_bytes: int = 10) -> None:
    """Lease the prompts of the head, which must be `names`, and hand them off in the opposite order."""
    prompts, samples = pair
    held = lease(prompts, len(names))
    assert ids(held) == list(names)
    for name in reversed(names):
        prompts.handoff(held.token, name, ref(name, generation, stored_bytes), samples, holder=holder)


def held_pair(bench: Bench, *names: str) -> Pair:
    """Prompts and samples after p1, which never showed a sign of life, has handed off `names` and holds them."""
    pair = bench.queue("prompts"), bench.queue("samples")
    pair[0].put(items(*names))
    hand_off(pair, *names)
    return pair


def held_and_done(prompts: LeaseQueue) -> Sequence[int]:
    s = prompts.stats()
    return s.ready, s.held, s.done
